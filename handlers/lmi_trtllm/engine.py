"""TensorRT-LLM's `LLM`, driven by an event loop on its own thread.

    executor's thread ──Work──▶ event loop: one task for each sequence ──▶ LLM, its processes
                      ◀──────────outputs, batched────────────────────

A request that TensorRT-LLM refuses or gives up ends by itself. Any other error means that it cannot go on, and so does
the end of one of its processes. After a cancel nobody waits for it. Checked against the published
sources of main of October 2025 and of August 2026.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable, Sequence
from typing import Any

from tensorrt_llm import LLM
from tensorrt_llm.llmapi import RequestError, RequestOutput

from handlers.base.adapters import LoadedAdapter
from handlers.base.driven import EngineLoad
from handlers.base.engine_loop import EngineLoop
from handlers.base.outputs import SequenceOutput
from handlers.base.stepped import EngineStopped
from handlers.lmi_trtllm import adapters
from handlers.lmi_trtllm.completions import OutputFault
from handlers.lmi_trtllm.effective import Effective
from handlers.lmi_trtllm.guides import Guides
from handlers.lmi_trtllm.outputs import Cursor
from handlers.lmi_trtllm.processors import Faults
from handlers.lmi_trtllm.statistics import Statistics
from handlers.lmi_trtllm.work import Work
from handlers.lmi_trtllm.workers import Workers
from lmi.errors import InvalidRequest, LmiError

WAIT_S = 0.1  # for an output, before deadlines are checked
CLOSE_WAIT_S = 5.0  # for TensorRT-LLM's own shutdown, which may never return
# What ends only one request. An AssertionError comes from TensorRT-LLM's check of one result.
OF_ONE_REQUEST = (RequestError, AssertionError, OutputFault, LmiError)

log = logging.getLogger("lmi.trtllm")


class Engine:
    def __init__(self, arguments: dict[str, Any], guides: Guides | None = None) -> None:
        """`arguments` are those of `tensorrt_llm.LLM`. Without `guides` no request has a structure."""
        self._llm = LLM(**arguments)
        self.arguments = Effective(arguments, self._llm)
        self.faults = Faults()
        self._guides = guides
        self._workers = Workers()
        self._error: Exception | None = None  # after which TensorRT-LLM cannot go on
        self._open: set[str] = set()  # the ids of the sequences that it has
        self._checked: set[str] = set()  # the ids of those that wait for the check of their structure
        self._statistics = Statistics()
        self._loop = EngineLoop("trtllm")
        if self.arguments.get("enable_iter_perf_stats"):
            self._loop.begin("statistics", self._statistics.read(self._llm))

    # The executor's thread.

    def add(self, work: Work) -> None:
        self._open.add(work.id)
        self._loop.begin(work.id, self._follow(work))

    def abort(self, ids: Iterable[str]) -> None:
        names = list(ids)
        self._open.difference_update(names)
        self._loop.cancel(names)

    def step(self) -> Sequence[SequenceOutput] | None:
        batch = self._loop.take(WAIT_S)
        if not self.is_alive:
            log.error("TensorRT-LLM cannot go on: %s", self._error or "one of its processes has ended")
            raise EngineStopped("TensorRT-LLM's engine died") from self._error
        batch, failed = self.faults.end(batch)
        if failed:
            self.abort(failed)
        self._open.difference_update(output.id for output in batch if output.end is not None)
        return batch if batch or self._statistics.has_news() else None

    def load(self) -> EngineLoad:
        """The first sequences count as running, as many as fit: TensorRT-LLM does not say which do."""
        num_running = min(len(self._open), self.arguments.max_num_sequences)
        return EngineLoad(num_running, kv_cache=self._statistics.kv_cache)

    def wake(self) -> None:
        self._loop.wake()

    def check_adapter(self, adapter: LoadedAdapter) -> None:
        adapters.check_adapter(adapter, self.arguments.get("lora_config"))

    def add_adapter(self, adapter: LoadedAdapter) -> None:
        self._loop.run(adapters.read(self._llm, adapter, self.arguments.max_beam_width))

    def remove_adapter(self, adapter: LoadedAdapter) -> None:
        """TensorRT-LLM drops an adapter by itself when newer ones need its place."""

    @property
    def is_waiting_for_guides(self) -> bool:
        return 0 < len(self._open) <= len(self._checked)

    @property
    def is_alive(self) -> bool:
        return self._error is None and self._workers.are_alive

    def close(self) -> None:
        """Shut down, for at most a few seconds. What is left of a broken engine is killed."""
        is_whole = self.is_alive
        with contextlib.suppress(TimeoutError):
            self._loop.cancel_all(CLOSE_WAIT_S)
        shutdown = threading.Thread(target=self._shut_down, name="trtllm-end", daemon=True)
        shutdown.start()
        shutdown.join(CLOSE_WAIT_S if is_whole else 0.0)
        if shutdown.is_alive():
            self._workers.kill()
            shutdown.join(CLOSE_WAIT_S)
        self._loop.close(CLOSE_WAIT_S)
        self._workers.close()
        self.faults.close()
        if self._guides is not None:
            self._guides.close()

    def _shut_down(self) -> None:
        try:
            self._llm.shutdown()
        except Exception:
            log.warning("TensorRT-LLM did not shut down in order", exc_info=True)

    # The event loop.

    async def _follow(self, work: Work) -> None:
        try:
            await self._run(work)
        except OF_ONE_REQUEST as error:
            self._loop.put(SequenceOutput(work.id, [], end=error))
        except Exception as error:
            self._error = error
            self.wake()

    async def _run(self, work: Work) -> None:
        guide = work.sequence.request.guided_decoding_params
        if guide is not None and self._guides is not None:
            self._checked.add(work.id)
            try:
                await self._guides.check(guide)
            finally:
                self._checked.discard(work.id)
        try:
            output = self._submit(work)
        except (TypeError, ValueError) as error:  # of a check of the arguments
            raise InvalidRequest(f"TensorRT-LLM refuses it: {error}") from error
        try:
            await self._read(work, output)
        finally:
            if not output.finished:
                with contextlib.suppress(Exception):  # an engine that is gone has nothing to abort
                    output.abort()

    def _submit(self, work: Work) -> RequestOutput:
        return self._llm.generate_async(
            inputs={"prompt_token_ids": work.token_ids},
            sampling_params=work.params,
            streaming=work.is_streamed,
            **work.more,
        )

    async def _read(self, work: Work, output: RequestOutput) -> None:
        cursor, end = Cursor(work.id, work.sequence), None
        async for step in output:
            if (new := _new_of(cursor, step)) is not None:
                self._loop.put(new)
                end = new.end
        if end is None:
            raise OutputFault("the engine ended it without a reason")


def _new_of(cursor: Cursor, step: RequestOutput) -> SequenceOutput | None:
    """What is new after a step. A form that is not known ends the request, and no other."""
    try:
        return cursor.read(step)
    except OutputFault:
        raise
    except Exception as error:
        log.exception("an output of TensorRT-LLM cannot be read")
        raise OutputFault(f"the engine's output cannot be read: {error}") from error
