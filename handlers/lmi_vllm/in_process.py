"""vLLM's engine, in this process or in its own, behind one small face.

`Inside` steps vLLM's engine on the caller's thread: nothing between the scheduler and us, no other process that could
be left behind. `Apart` is AsyncLLM, whose core and ranks are processes: for models on several devices. Ids are ours.
Everything that looks deeper into vLLM than its public classes is in this file. Written against vLLM 0.30 to 0.33.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import select
import signal
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import tokens_input
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.sample import sampler

from handlers.lmi_vllm import process_setup
from handlers.lmi_vllm.node_heartbeat import Link
from handlers.lmi_vllm.outputs import Output, of_core, of_request
from lmi.shared import processes

WAIT_S = 0.1  # for an output of another process, before deadlines are looked at


@dataclass(frozen=True, slots=True)
class Work:
    """One sequence as vLLM gets it."""

    id: str
    token_ids: list[int]
    params: SamplingParams
    adapter: LoRARequest | None
    priority: int


@dataclass(slots=True)
class Load:
    """How busy vLLM is. `running`: ids, or None where only their number is known."""

    num_running: int = 0
    running: list[str] | None = None
    num_preemptions: int = 0  # since the start
    used_share: float = 0.0  # of the KV cache


@dataclass(frozen=True, slots=True)
class Failure:
    """One request that vLLM could not go on with."""

    id: str
    error: Exception


class Engine(Protocol):
    """Used by one thread, but for `wake`."""

    config: VllmConfig

    def add(self, work: Work) -> None:
        """May raise what vLLM's check of the request raises."""

    def abort(self, ids: Iterable[str]) -> None: ...

    def step(self) -> Sequence[Output | Failure] | None:
        """What is new, perhaps nothing; None: no step was made. Raises what ended a step, or EngineDeadError."""

    def load(self) -> Load: ...

    def wake(self) -> None: ...

    def add_adapter(self, adapter: LoRARequest) -> None:
        """Raises with the reason when it cannot be loaded; the engine is unharmed."""

    def remove_adapter(self, adapter_id: int) -> None: ...

    @property
    def is_alive(self) -> bool:
        """False once a process of the engine or another of its nodes is gone, though nothing runs."""

    def close(self) -> None: ...


class Inside:
    """The engine on this thread."""

    num_open: ClassVar[int] = 0  # in this process
    closed: ClassVar[list[LLMEngine]] = []  # kept from the garbage collector, whose finalizers take groups down too

    def __init__(self, arguments: AsyncEngineArgs) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        sampler.batched_count_greater_than = _no_ranks
        self._engine = LLMEngine.from_engine_args(arguments)
        self._scheduler = self._engine.engine_core.engine_core.scheduler
        self._preempted: dict[str, int] = {}
        self._num_preemptions = 0
        self.config = self._engine.vllm_config
        Inside.num_open += 1

    def add(self, work: Work) -> None:
        self._engine.add_request(
            work.id, tokens_input(work.token_ids), work.params, lora_request=work.adapter, priority=work.priority
        )

    def abort(self, ids: Iterable[str]) -> None:
        self._engine.abort_request(list(ids))

    def step(self) -> Sequence[Output]:
        """vLLM's own step would detokenise, and copy each log-prob four times: a tenth of a small model's time."""
        new = self._engine.engine_core.get_output().outputs
        if over := [output.request_id for output in new if output.finish_reason is not None]:
            self._engine.output_processor.abort_requests(over, internal=True)  # it forgets them; the core has
        return [of_core(_outer_id(output.request_id), output) for output in new]

    def load(self) -> Load:
        scheduler = self._scheduler
        self._count_preemptions()
        return Load(
            num_running=len(scheduler.running),
            running=[_outer_id(request.request_id) for request in scheduler.running],
            num_preemptions=self._num_preemptions,
            used_share=scheduler.kv_cache_manager.usage,
        )

    def _count_preemptions(self) -> None:
        """A preempted request waits again, and remembers how often it did."""
        before, self._preempted = self._preempted, {}
        for request in self._scheduler.waiting:
            if request.num_preemptions:
                self._preempted[request.request_id] = request.num_preemptions
                self._num_preemptions += request.num_preemptions > before.get(request.request_id, 0)

    def wake(self) -> None:
        return None

    def add_adapter(self, adapter: LoRARequest) -> None:
        self._engine.add_lora(adapter)

    def remove_adapter(self, adapter_id: int) -> None:
        self._engine.remove_lora(adapter_id)

    @property
    def is_alive(self) -> bool:
        return True

    def close(self) -> None:
        """vLLM's groups of ranks belong to the process: only the last engine of several takes them down."""
        Inside.num_open -= 1
        Inside.closed.append(self._engine)
        if Inside.num_open == 0:
            self._engine.engine_core.shutdown()
            Inside.closed.clear()


class Apart:
    """The engine in processes of its own, driven by an event loop on a thread of its own."""

    def __init__(self, arguments: AsyncEngineArgs) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        self._stats = _Stats()
        self._llm = AsyncLLM.from_engine_args(arguments, stat_loggers=[lambda config, index=0: self._stats])
        process_setup.unlink_shared_memory()
        # vLLM lets the other ranks end before it says that one is gone. Compilers may come and go.
        pids = [pid for pid in process_setup.descendants() if processes.title(pid).startswith("VLLM")]
        self._processes = [os.pidfd_open(pid) for pid in pids]
        self._num_steps = 0  # of the core, as far as `step` has told of them
        self._ready: queue.SimpleQueue[list[Output | Failure]] = queue.SimpleQueue()
        self._batch: list[Output | Failure] = []
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True)
        self._thread.start()
        self.config = self._llm.vllm_config
        self._link: Link | None = None
        if arguments.nnodes > 1 and arguments.distributed_executor_backend != "ray":
            port = self.config.parallel_config.master_port
            self._link = Link(arguments.master_addr, port, arguments.node_rank, arguments.nnodes)

    def add(self, work: Work) -> None:
        self._loop.call_soon_threadsafe(self._begin, work)

    def _begin(self, work: Work) -> None:
        self._tasks[work.id] = self._loop.create_task(self._follow(work))

    async def _follow(self, work: Work) -> None:
        try:
            outputs = self._llm.generate(
                tokens_input(work.token_ids),
                work.params,
                work.id,
                lora_request=work.adapter,
                priority=work.priority,
            )
            async for output in outputs:
                self._hand_over(of_request(output))
        except Exception as error:
            self._hand_over(Failure(work.id, error))
        finally:
            self._tasks.pop(work.id, None)

    def _hand_over(self, item: Output | Failure) -> None:
        """What one turn of the event loop brings is one batch: the outputs of a step stay together."""
        if not self._batch:
            self._loop.call_soon(self._flush)
        self._batch.append(item)

    def _flush(self) -> None:
        batch, self._batch = self._batch, []
        self._ready.put(batch)

    def abort(self, ids: Iterable[str]) -> None:
        self._loop.call_soon_threadsafe(self._cancel, list(ids))

    def _cancel(self, ids: list[str]) -> None:
        for one in ids:
            if (task := self._tasks.get(one)) is not None:
                task.cancel()

    def step(self) -> Sequence[Output | Failure] | None:
        batch: list[Output | Failure] = []
        with contextlib.suppress(queue.Empty):
            batch += self._ready.get(timeout=WAIT_S)
            while True:
                batch += self._ready.get_nowait()
        for item in batch:
            if isinstance(item, Failure) and isinstance(item.error, EngineDeadError):
                raise item.error
        if not self.is_alive:
            raise EngineDeadError()
        before, self._num_steps = self._num_steps, self._stats.num_steps
        return batch if batch or self._num_steps > before else None

    def load(self) -> Load:
        return self._stats.load

    def wake(self) -> None:
        self._ready.put([])

    def add_adapter(self, adapter: LoRARequest) -> None:
        asyncio.run_coroutine_threadsafe(self._llm.add_lora(adapter), self._loop).result()

    def remove_adapter(self, adapter_id: int) -> None:
        asyncio.run_coroutine_threadsafe(self._llm.remove_lora(adapter_id), self._loop).result()

    @property
    def is_alive(self) -> bool:
        has_ended = bool(select.select(self._processes, (), (), 0)[0])
        return not (has_ended or self._llm.errored) and (self._link is None or self._link.is_whole)

    def close(self) -> None:
        if not self.is_alive:
            for process in self._processes:  # nobody waits for an end in order
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(process, signal.SIGKILL)
        if self._link is not None:
            self._link.close()
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result()  # the core's end is no error now
        self._llm.shutdown()
        del self._llm  # its finalizer calls names that the end of the interpreter has taken away
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        for process in self._processes:
            os.close(process)


async def _cancel_others() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class _Stats(StatLoggerBase):
    """What the core says about itself after each of its steps."""

    def __init__(self) -> None:
        self.load = Load()
        self.num_steps = 0

    def record(self, scheduler_stats: Any, iteration_stats: Any, *others: Any, **more: Any) -> None:
        self.num_steps += 1
        if scheduler_stats is not None:
            self.load.num_running = scheduler_stats.num_running_reqs
            self.load.used_share = scheduler_stats.kv_cache_usage
        if iteration_stats is not None:
            self.load.num_preemptions += iteration_stats.num_preempted_reqs

    def log_engine_initialized(self) -> None:
        return None


def _no_ranks(log_probs: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """In place of vLLM's count of the likelier tokens, (rows, vocabulary) and (rows, 1) to (rows,): nobody reads it."""
    return torch.zeros(len(chosen), dtype=torch.int64, device=chosen.device)


def _outer_id(inner_id: str) -> str:
    """vLLM appends eight letters to every id that it is given."""
    return inner_id.rpartition("-")[0]
