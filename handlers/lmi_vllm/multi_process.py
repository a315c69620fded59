"""vLLM's engine in separate processes: AsyncLLM, driven by an event loop on its own thread, and its further nodes.

It serves models on several devices. The options of several nodes are vLLM's: nnodes, node_rank, master_addr,
master_port. Written against vLLM 0.30 to 0.33.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.metrics.loggers import StatLoggerBase

from handlers.base.adapters import LoadedAdapter
from handlers.base.driven import EngineLoad
from handlers.base.driven_outputs import SequenceOutput
from handlers.base.engine_loop import EngineLoop, Processes
from handlers.base.stepped import EngineStopped
from handlers.lmi_vllm import process_setup
from handlers.lmi_vllm.start import starting
from handlers.lmi_vllm.translation import VllmWork, check_adapter, describe, kv_cache_stats, lora_request, of_request
from lmi.errors import Unavailable, cause_line
from lmi.executor import EngineInfo, Executor, IterationStats, Progress, Request, RequestStatsPerIteration, Response
from lmi.settings.config import EngineConfig
from lmi.shared import linux

BEAT_S = 0.5
SILENT_S = 10.0  # a node that is silent for longer is lost
WAIT_S = 0.1  # for an output of another process, before deadlines are checked

log = logging.getLogger("lmi.vllm")


class MultiProcess:
    def __init__(self, arguments: AsyncEngineArgs) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        self._stats = _Stats()
        self._llm = AsyncLLM.from_engine_args(arguments, stat_loggers=[self._stats.made])
        process_setup.unlink_shared_memory()
        # vLLM ends the other ranks before it reports that one has ended. Compilers are not watched.
        pids = [pid for pid in linux.descendants(os.getpid()) if linux.title(pid).startswith("VLLM")]
        self._processes = Processes(pids)
        self._num_steps = 0  # of the core, as far as `step` has reported them
        self._loop = EngineLoop("vllm")
        self.config = self._llm.vllm_config
        self._heartbeat: NodeHeartbeat | None = None
        if arguments.nnodes > 1:  # not on Ray, whose own nodes watch each other
            port = self.config.parallel_config.master_port
            self._heartbeat = NodeHeartbeat(arguments.master_addr, port, arguments.node_rank, arguments.nnodes)

    def add(self, work: VllmWork) -> None:
        self._loop.begin(work.id, self._follow(work))

    async def _follow(self, work: VllmWork) -> None:
        how = {"lora_request": work.adapter, "priority": work.priority}
        try:
            async for output in self._llm.generate(work.prompt, work.params, work.id, **how):
                self._loop.put(of_request(output))
        except Exception as error:
            self._loop.put(SequenceOutput(work.id, [], end=error))

    def abort(self, ids: Iterable[str]) -> None:
        self._loop.cancel(ids)

    def step(self) -> Sequence[SequenceOutput] | None:
        batch = self._loop.take(WAIT_S)
        if not self.is_alive or any(isinstance(output.end, EngineDeadError) for output in batch):
            log.error("vLLM's engine died; its own lines further up say why")
            raise EngineStopped("vLLM's engine died")
        before, self._num_steps = self._num_steps, self._stats.num_steps
        return batch if batch or self._num_steps > before else None

    def load(self) -> EngineLoad:
        """The KV cache and the counts after the core's last step."""
        return replace(self._stats.load, kv_cache=kv_cache_stats(self.config, self._stats.used_share))

    def wake(self) -> None:
        self._loop.wake()

    def check_adapter(self, adapter: LoadedAdapter) -> None:
        check_adapter(adapter, self.config)

    def add_adapter(self, adapter: LoadedAdapter) -> None:
        self._loop.run(self._llm.add_lora(lora_request(adapter)))
        if adapter.is_pinned:
            self._loop.run(self._llm.pin_lora(adapter.number))

    def remove_adapter(self, adapter: LoadedAdapter) -> None:
        self._loop.run(self._llm.remove_lora(adapter.number))

    @property
    def is_alive(self) -> bool:
        is_whole = self._heartbeat is None or self._heartbeat.is_whole
        return self._processes.are_alive and not self._llm.errored and is_whole

    def close(self) -> None:
        if not self.is_alive:
            self._processes.kill()  # the group is broken and cannot shut down in order
        if self._heartbeat is not None:
            self._heartbeat.close()
        self._loop.cancel_all()  # the core's end is not an error now
        self._llm.shutdown()
        del self._llm  # at the end of the interpreter its finalizer would call names that are gone
        self._loop.close()
        self._processes.close()


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


class NodeHeartbeat:
    """Heartbeats by which the nodes of one engine watch each other. `is_whole` is false once a watched node is lost.

    In vLLM a group that has lost a node waits without end. So each node writes a heartbeat to the store that torch
    keeps on node 0 while the group lives, at `address` and `port`, and reads the heartbeats that it watches.
    """

    def __init__(self, address: str, port: int, rank: int, num_nodes: int) -> None:
        self.is_whole = True
        self._address, self._port, self._rank = address, port, rank
        # Every node watches node 0, which watches every node.
        watched = range(1, num_nodes) if rank == 0 else [0]
        self._heard = {node: (0, time.monotonic()) for node in watched}
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="node-heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closed.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            store = TCPStore(self._address, self._port, is_master=False, timeout=timedelta(seconds=SILENT_S))
            while not self._is_closed.wait(BEAT_S):
                store.add(f"lmi/beat/{self._rank}", 1)
                for node, (last, heard_s) in self._heard.items():
                    num_beats, now = store.add(f"lmi/beat/{node}", 0), time.monotonic()
                    if num_beats != last:
                        self._heard[node] = num_beats, now
                    elif now - heard_s > SILENT_S:
                        raise TimeoutError(f"node {node} was silent for {now - heard_s:.0f} s")
        except Exception as error:
            if not self._is_closed.is_set():
                log.critical("node 0 is lost: its store does not answer: %s", cause_line(error))
                self.is_whole = False


class Follower(Executor):
    """An executor that takes no requests: it loads this node's part of the model and waits until the group ends."""

    def __init__(self, model: str, config: EngineConfig, progress: Progress) -> None:
        with starting(model, config, progress) as arguments:
            settings = arguments.create_engine_config(headless=True)
            self._ranks = MultiprocExecutor(settings, monitor_workers=False)
        process_setup.unlink_shared_memory()
        self._has_lost_rank = threading.Event()
        self._ranks.register_failure_callback(self._has_lost_rank.set)
        self._ranks.start_worker_monitor()
        rank, num_nodes, leader = arguments.node_rank, arguments.nnodes, arguments.master_addr
        self._heartbeat = NodeHeartbeat(leader, settings.parallel_config.master_port, rank, num_nodes)
        self._info = describe(settings, config.max_beam_width)
        self._is_closing = threading.Event()
        self._refusal = f"this is node {rank} of {num_nodes} and takes no requests; node 0, {leader}, does"

    @property
    def info(self) -> EngineInfo:
        return self._info

    def can_enqueue_requests(self) -> bool:
        """Whether the group is whole. Requests are refused in any case."""
        return not self._has_lost_rank.is_set() and self._heartbeat.is_whole

    def enqueue_request(self, request: Request) -> int:
        raise Unavailable(self._refusal)

    def await_responses(
        self, request_id: int | Sequence[int] | None = None, timeout_s: float | None = None
    ) -> list[Response] | list[list[Response]]:
        self._is_closing.wait(timeout_s)
        return []

    def get_num_responses_ready(self, request_id: int | None = None) -> int:
        return 0

    def cancel_request(self, request_id: int) -> None:
        return None

    def get_latest_iteration_stats(self) -> list[IterationStats]:
        return []

    def get_latest_request_stats(self) -> list[RequestStatsPerIteration]:
        return []

    def shutdown(self) -> None:
        """Shut down cleanly if the group is whole. Otherwise the ranks die with this process."""
        is_whole = self.can_enqueue_requests()
        self._is_closing.set()
        self._heartbeat.close()
        if is_whole:
            self._ranks.shutdown()
