"""A further node of an engine that spans several machines. Its ranks get their work from node 0.

Its options are vLLM's: nnodes, node_rank, master_addr, master_port. This file uses more of vLLM than its public
classes. Written against vLLM 0.30 to 0.33.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from handlers.lmi_vllm import process_setup
from handlers.lmi_vllm.arguments import engine_arguments
from handlers.lmi_vllm.executor import describe
from handlers.lmi_vllm.multi_process import NodeHeartbeat
from handlers.lmi_vllm.start_errors import explained
from handlers.lmi_vllm.startup_log import StartupLog
from lmi.errors import Unavailable
from lmi.executor import EngineInfo, Executor, IterationStats, Progress, Request, RequestStatsPerIteration, Response
from lmi.settings.config import EngineConfig


class Follower(Executor):
    """An executor that takes no requests: it loads this node's part of the model and waits until the group ends."""

    def __init__(self, model: str, config: EngineConfig, progress: Progress) -> None:
        progress("configuration", 0.0)
        startup_log = StartupLog.begin()
        try:
            arguments = AsyncEngineArgs(**engine_arguments(config, model))
            with startup_log.reported_to(progress), warnings.catch_warnings(action="ignore"):
                settings = arguments.create_engine_config(headless=True)
                self._ranks = MultiprocExecutor(settings, monitor_workers=False)
        except Exception as error:
            raise explained(error, model, config, startup_log.cause) from error
        process_setup.unlink_shared_memory()
        self._are_alive = True
        self._ranks.register_failure_callback(self._note_death)
        self._ranks.start_worker_monitor()
        rank, num_nodes, leader = arguments.node_rank, arguments.nnodes, arguments.master_addr
        self._heartbeat = NodeHeartbeat(leader, settings.parallel_config.master_port, rank, num_nodes)
        self._info = describe(settings, config.max_beam_width)
        self._is_closing = threading.Event()
        self._refusal = f"this is node {rank} of {num_nodes} and takes no requests; node 0, {leader}, does"

    def _note_death(self) -> None:
        self._are_alive = False

    @property
    def info(self) -> EngineInfo:
        return self._info

    def can_enqueue_requests(self) -> bool:
        """Whether the group is whole. Requests are refused in any case."""
        return self._are_alive and self._heartbeat.is_whole

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
