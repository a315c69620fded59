"""vLLM's engine in separate processes: AsyncLLM, driven by an event loop on its own thread.

It serves models on several devices. Written against vLLM 0.30 to 0.33.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import select
import signal
import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import StatLoggerBase

from handlers.base.adapters import LoadedAdapter
from handlers.base.driven import EngineLoad
from handlers.base.outputs import SequenceOutput
from handlers.base.stepped import EngineStopped
from handlers.lmi_vllm import process_setup
from handlers.lmi_vllm.node_heartbeat import NodeHeartbeat
from handlers.lmi_vllm.outputs import kv_cache_stats, of_request
from handlers.lmi_vllm.work import Work, check_adapter, lora_request
from lmi.shared import linux

WAIT_S = 0.1  # for an output of another process, before deadlines are checked

log = logging.getLogger("lmi.vllm")


class MultiProcess:
    def __init__(self, arguments: AsyncEngineArgs) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        self._stats = _Stats()
        self._llm = AsyncLLM.from_engine_args(arguments, stat_loggers=[self._stats.made])
        process_setup.unlink_shared_memory()
        # vLLM ends the other ranks before it reports that one has ended. Compilers are not watched.
        pids = [pid for pid in process_setup.descendants() if linux.title(pid).startswith("VLLM")]
        self._processes = [os.pidfd_open(pid) for pid in pids]
        self._num_steps = 0  # of the core, as far as `step` has reported them
        self._ready: queue.SimpleQueue[list[SequenceOutput]] = queue.SimpleQueue()
        self._batch: list[SequenceOutput] = []
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True)
        self._thread.start()
        self.config = self._llm.vllm_config
        self._heartbeat: NodeHeartbeat | None = None
        if arguments.nnodes > 1:  # not on Ray, whose own nodes watch each other
            port = self.config.parallel_config.master_port
            self._heartbeat = NodeHeartbeat(arguments.master_addr, port, arguments.node_rank, arguments.nnodes)

    def add(self, work: Work) -> None:
        self._loop.call_soon_threadsafe(self._begin, work)

    def _begin(self, work: Work) -> None:
        self._tasks[work.id] = self._loop.create_task(self._follow(work))

    async def _follow(self, work: Work) -> None:
        try:
            outputs = self._llm.generate(
                work.prompt,
                work.params,
                work.id,
                lora_request=work.adapter,
                priority=work.priority,
            )
            async for output in outputs:
                self._hand_over(of_request(output))
        except Exception as error:
            self._hand_over(SequenceOutput(work.id, [], end=error))
        finally:
            self._tasks.pop(work.id, None)

    def _hand_over(self, output: SequenceOutput) -> None:
        """Batch the outputs of one turn of the event loop, so that those of a step stay together."""
        if not self._batch:
            self._loop.call_soon(self._flush)
        self._batch.append(output)

    def _flush(self) -> None:
        batch, self._batch = self._batch, []
        self._ready.put(batch)

    def abort(self, ids: Iterable[str]) -> None:
        self._loop.call_soon_threadsafe(self._cancel, list(ids))

    def _cancel(self, ids: list[str]) -> None:
        for one in ids:
            if (task := self._tasks.get(one)) is not None:
                task.cancel()

    def step(self) -> Sequence[SequenceOutput] | None:
        batch: list[SequenceOutput] = []
        with contextlib.suppress(queue.Empty):
            batch += self._ready.get(timeout=WAIT_S)
            while True:
                batch += self._ready.get_nowait()
        if not self.is_alive or any(isinstance(output.end, EngineDeadError) for output in batch):
            log.error("vLLM's engine died; its own lines further up say why")
            raise EngineStopped("vLLM's engine died")
        before, self._num_steps = self._num_steps, self._stats.num_steps
        return batch if batch or self._num_steps > before else None

    def load(self) -> EngineLoad:
        """The KV cache and the counts after the core's last step."""
        return replace(self._stats.load, kv_cache=kv_cache_stats(self.config, self._stats.used_share))

    def wake(self) -> None:
        self._ready.put([])

    def check_adapter(self, adapter: LoadedAdapter) -> None:
        check_adapter(adapter, self.config)

    def add_adapter(self, adapter: LoadedAdapter) -> None:
        asyncio.run_coroutine_threadsafe(self._add_adapter(adapter), self._loop).result()

    async def _add_adapter(self, adapter: LoadedAdapter) -> None:
        await self._llm.add_lora(lora_request(adapter))
        if adapter.is_pinned:
            await self._llm.pin_lora(adapter.number)

    def remove_adapter(self, adapter: LoadedAdapter) -> None:
        asyncio.run_coroutine_threadsafe(self._llm.remove_lora(adapter.number), self._loop).result()

    @property
    def is_alive(self) -> bool:
        has_ended = bool(select.select(self._processes, (), (), 0)[0])
        return not (has_ended or self._llm.errored) and (self._heartbeat is None or self._heartbeat.is_whole)

    def close(self) -> None:
        if not self.is_alive:
            for process in self._processes:  # the group is broken and cannot shut down in order
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(process, signal.SIGKILL)
        if self._heartbeat is not None:
            self._heartbeat.close()
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result()  # the core's end is not an error now
        self._llm.shutdown()
        del self._llm  # at the end of the interpreter its finalizer would call names that are gone
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
    """The statistics that the core reports after each step."""

    def __init__(self) -> None:
        self.load = EngineLoad()
        self.used_share = 0.0  # of the KV cache
        self.num_steps = 0

    def made(self, config: VllmConfig, index: int = 0) -> StatLoggerBase:
        """vLLM calls this to make the logger of an engine's statistics."""
        return self

    def record(self, scheduler_stats: Any, iteration_stats: Any, *others: Any, **more: Any) -> None:
        self.num_steps += 1
        if scheduler_stats is not None:
            self.load.num_running = scheduler_stats.num_running_reqs
            self.used_share = scheduler_stats.kv_cache_usage
        if iteration_stats is not None:
            self.load.num_preemptions += iteration_stats.num_preempted_reqs

    def log_engine_initialized(self) -> None:
        return None
