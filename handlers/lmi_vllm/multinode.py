"""A further node of an engine that spans several machines. Its ranks get their work from node 0.

Its options are vLLM's: nnodes, node_rank, master_addr, master_port. This file uses more of vLLM than its public
classes. Written against vLLM 0.30 to 0.33.
"""

from __future__ import annotations

import warnings

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from handlers.base.follower import Follower as BaseFollower
from handlers.lmi_vllm import process_setup
from handlers.lmi_vllm.arguments import engine_arguments
from handlers.lmi_vllm.executor import describe
from handlers.lmi_vllm.node_heartbeat import NodeHeartbeat
from handlers.lmi_vllm.start_errors import explained
from handlers.lmi_vllm.startup_log import StartupLog
from lmi.executor import Progress
from lmi.settings.config import EngineConfig


class Follower(BaseFollower):
    """A follower loads this node's part of the model and waits until the group ends."""

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
        parallel = settings.parallel_config
        self._heartbeat = NodeHeartbeat(
            arguments.master_addr, parallel.master_port, arguments.node_rank, arguments.nnodes
        )
        info = describe(settings, config.max_beam_width)
        super().__init__(info, arguments.node_rank, arguments.nnodes, arguments.master_addr)

    def _note_death(self) -> None:
        self._are_alive = False

    def can_enqueue_requests(self) -> bool:
        """Whether the group is whole. Requests are refused in any case."""
        return self._are_alive and self._heartbeat.is_whole

    def shutdown(self) -> None:
        """Shut down cleanly if the group is whole. Otherwise the ranks die with this process."""
        is_whole = self.can_enqueue_requests()
        self._is_closing.set()
        self._heartbeat.close()
        if is_whole:
            self._ranks.shutdown()
