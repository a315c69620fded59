"""TensorRT-LLM's `LLM`, driven by an event loop on its own thread, which has a task for each
sequence.
"""

import asyncio
import contextlib
import logging
import os
import re
import threading
from collections.abc import Mapping, Sequence as SequenceOf
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from tensorrt_llm import LLM, SamplingParams
from tensorrt_llm.llmapi import RequestError, RequestOutput

from handlers.base.adapters import LoadedAdapter
from handlers.base.sequence import Sequence
from handlers.base.stepped import EngineStopped
from handlers.driven.engine import EngineLoad
from handlers.driven.loop import EngineLoop
from handlers.driven.outputs import SequenceOutput
from handlers.driven.processes import Processes
from handlers.lmi_trtllm import adapters
from handlers.lmi_trtllm.outputs import Cursor, OutputFault
from handlers.lmi_trtllm.processors import Faults
from lmi.errors import InvalidRequest, LmiError
from lmi.executor import KvCacheStats
from lmi.shared import processes

# TensorRT-LLM's own number, for what an LLM leaves open.
MAX_BATCH_SIZE = 2048
# The wait for an output, before deadlines are checked.
WAIT_S = 0.1
# The wait for statistics, before they are asked for again.
STATISTICS_WAIT_S = 0.5
# The wait for TensorRT-LLM's own shutdown, which may never return.
CLOSE_WAIT_S = 5.0
# The command line of a rank has one of them.
STARTERS = (b"mpi4py", b"multiprocessing.spawn", b"--multiprocessing-fork")
# What ends only one request. Any other error ends the engine. TensorRT-LLM asserts that a result is
# right.
OF_ONE_REQUEST = (RequestError, AssertionError, OutputFault, LmiError)
# TensorRT-LLM's names are ours in camel case.
CACHE_FIELDS = {
    field: re.sub("_(.)", lambda match: match[1].upper(), field)
    for field in KvCacheStats.__struct_fields__
}

log = logging.getLogger("lmi.trtllm")


@dataclass(frozen=True, slots=True)
class TrtllmWork:
    """A sequence as the arguments of one `LLM.generate_async`."""

    id: str
    token_ids: list[int]
    # It is never shared, because a submit changes it.
    params: SamplingParams
    # Further keyword arguments, and only those that the profile's signature has.
    more: dict[str, Any]
    # The engine's thread only reads what never changes of it.
    sequence: Sequence
    # It is so where the client does not stream too: each output shows that the engine goes on.
    is_streamed: bool = True


class Statistics:
    """What TensorRT-LLM reports of its iterations, if it is asked to (`enable_iter_perf_stats`).

    Reports come late, and parts of them may be missing. An iteration shows that the engine goes on
    while no request gets a token, as in a long prompt. The event loop writes here, and the
    executor's thread reads.
    """

    def __init__(self) -> None:
        self.kv_cache = KvCacheStats()
        self._num_iterations = 0
        self._num_seen = 0

    def has_news(self) -> bool:
        """Whether there were iterations since the last call."""
        num_before = self._num_seen
        self._num_seen = self._num_iterations
        return self._num_seen > num_before

    async def read(self, llm: LLM) -> None:
        """Read statistics until the task is cancelled. An error ends only this."""
        try:
            while True:
                async for iteration in llm.get_stats_async(timeout=STATISTICS_WAIT_S):
                    self.take(iteration)

                # Before the first request the call above returns at once.
                await asyncio.sleep(STATISTICS_WAIT_S)
        except Exception:
            log.warning("TensorRT-LLM reports no statistics any more", exc_info=True)

    def take(self, iteration: Mapping[str, object]) -> None:
        """Note what one iteration reports."""
        self._num_iterations += 1
        cache = iteration.get("kvCacheStats")
        if not isinstance(cache, dict):
            return

        fields = {}
        for field, name_there in CACHE_FIELDS.items():
            if cache.get(name_there) is not None:
                fields[field] = cache[name_there]

        self.kv_cache = msgspec.convert(fields, KvCacheStats)


class TrtllmEngine(EngineLoop):
    """TensorRT-LLM, seen as an `Engine`."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        """`arguments` are those of `tensorrt_llm.LLM`."""
        self._llm = LLM(**arguments)
        self.faults = Faults()
        self._ranks = ranks()
        # The error after which TensorRT-LLM cannot go on.
        self._error: Exception | None = None
        self._statistics = Statistics()
        super().__init__("trtllm")
        if self.argument("enable_iter_perf_stats"):
            self.begin("statistics", self._statistics.read(self._llm))

    def argument(self, name: str) -> Any:
        """Return an argument that the engine runs with, or None if this version does not know
        it.
        """
        return getattr(self._llm.args, name, None)

    @property
    def max_num_sequences(self) -> int:
        """How many sequences may run together."""
        return int(self.argument("max_batch_size") or MAX_BATCH_SIZE)

    @property
    def max_beam_width(self) -> int:
        """The width of the beams that all requests run at."""
        return int(self.argument("max_beam_width") or 1)

    # The executor's thread.

    def add(self, work: TrtllmWork) -> None:
        """Begin the task of a sequence."""
        self.begin(work.id, self._follow(work))

    def step(self) -> SequenceOf[SequenceOutput] | None:
        """Wait for outputs for a while, and return them, or None if nothing is new."""
        batch = self.take(WAIT_S)
        if not self.is_alive:
            reason = self._error or "one of its processes has ended"
            log.error("TensorRT-LLM cannot go on: %s", reason)
            raise EngineStopped("TensorRT-LLM's engine died") from self._error

        batch, failed = self.faults.end(batch)
        self.abort(failed)
        if batch or self._statistics.has_news():
            return batch

        return None

    def load(self) -> EngineLoad:
        """Return how busy the engine is. The first sequences count as running, as many as fit:
        TensorRT-LLM does not say which do.
        """
        return EngineLoad(self.max_num_sequences, kv_cache=self._statistics.kv_cache)

    def check_adapter(self, adapter: LoadedAdapter) -> None:
        """Read the configuration of an adapter: see `AdapterEngine`."""
        adapters.check_adapter(adapter, self.argument("lora_config"))

    def add_adapter(self, adapter: LoadedAdapter) -> None:
        """Let TensorRT-LLM read the weights of an adapter."""
        self.run(adapters.read(self._llm, adapter, self.max_beam_width))

    def remove_adapter(self, adapter: LoadedAdapter) -> None:
        """TensorRT-LLM drops an adapter by itself when newer ones need its place."""

    @property
    def is_alive(self) -> bool:
        """Whether it has not failed and all processes that compute live."""
        return self._error is None and self._ranks.are_alive

    def close(self) -> None:
        """Shut down, for at most a few seconds. What is left of a broken engine is killed."""
        is_whole = self.is_alive
        with contextlib.suppress(TimeoutError):
            self.cancel_all(CLOSE_WAIT_S)

        shutdown = threading.Thread(target=self._shut_down, name="trtllm-end", daemon=True)
        shutdown.start()
        shutdown.join(CLOSE_WAIT_S if is_whole else 0.0)
        if shutdown.is_alive():
            self._ranks.kill()
            shutdown.join(CLOSE_WAIT_S)

        self.end_loop(CLOSE_WAIT_S)
        self._ranks.close()
        self.faults.close()

    def _shut_down(self) -> None:
        try:
            self._llm.shutdown()
        except Exception:
            log.warning("TensorRT-LLM did not shut down in order", exc_info=True)

    # The event loop.

    async def _follow(self, work: TrtllmWork) -> None:
        """Run a sequence to its end. An error ends it alone, or the engine too."""
        try:
            await self._run(work)
        except OF_ONE_REQUEST as error:
            self.put(SequenceOutput(work.id, [], end=error))
        except Exception as error:
            self._error = error
            self.wake()

    async def _run(self, work: TrtllmWork) -> None:
        try:
            output = self._llm.generate_async(
                inputs={"prompt_token_ids": work.token_ids},
                sampling_params=work.params,
                streaming=work.is_streamed,
                **work.more,
            )
        except (TypeError, ValueError) as error:
            # A check of the arguments has raised it.
            raise InvalidRequest(f"TensorRT-LLM refuses it: {error}") from error

        cursor = Cursor(work.id, work.sequence)
        end = None
        try:
            async for step in output:
                new = _new_of(cursor, step)
                if new is not None:
                    self.put(new)
                    end = new.end
        finally:
            if not output.finished:
                # An engine that is gone has nothing to abort.
                with contextlib.suppress(Exception):
                    output.abort()

        if end is None:
            raise OutputFault("the engine ended it without a reason")


def _new_of(cursor: Cursor, step: RequestOutput) -> SequenceOutput | None:
    """Return what is new after a step. A form that is not known ends this request alone."""
    try:
        return cursor.read(step)
    except OutputFault:
        raise
    except Exception as error:
        log.exception("an output of TensorRT-LLM cannot be read")
        raise OutputFault(f"the engine's output cannot be read: {error}") from error


def ranks() -> Processes:
    """Return the processes that compute, which MPI's pool or Python's own has started.

    They end with this process.
    """
    pids = []
    for pid in processes.descendants(os.getpid()):
        # A process may have ended.
        with contextlib.suppress(OSError):
            command_line = Path(f"/proc/{pid}/cmdline").read_bytes()
            if any(word in command_line for word in STARTERS):
                pids.append(pid)

    return Processes(pids)
