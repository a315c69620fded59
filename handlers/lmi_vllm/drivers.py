"""vLLM's engine: its scheduler runs in this process. It uses more of vLLM than its
public classes.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Any, ClassVar, cast

import torch
from torch.distributed import TCPStore
from vllm.config import ParallelConfig
from vllm.distributed.kv_events import ZmqEventPublisher
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.lora.peft_helper import PEFTHelper
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.sample import sampler

from handlers.base.adapters import LoadedAdapter, check_names
from handlers.base.kv_events import replica_here
from handlers.base.stepped import EngineStopped
from handlers.driven.executor import EngineLoad
from handlers.driven.loop import Processes
from handlers.driven.outputs import SequenceOutput
from handlers.lmi_vllm import process_setup, translation
from lmi.errors import cause_line
from lmi.executor import KvCacheStats
from lmi.shared import linux

BEAT_S = 0.5
SILENT_S = 10.0  # a node that is silent for longer is lost
FIRST_BEAT_S = (
    60.0  # for its first heartbeat: the nodes of a group do not end their start at the same moment
)

Allocate = Callable[..., Any]

log = logging.getLogger("lmi.vllm")


class VllmEngine:
    """vLLM's scheduler is called directly. Several ranks are processes, perhaps on
    several nodes.
    """

    num_open: ClassVar[int] = 0  # in this process
    closed: ClassVar[
        list[LLMEngine]
    ] = []  # kept alive, because the finalizer of an engine ends groups of ranks too

    def __init__(self, arguments: AsyncEngineArgs) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        cast(Any, sampler).batched_count_greater_than = _no_ranks
        num_threads = torch.get_num_threads()
        self._engine = LLMEngine.from_engine_args(arguments)
        self._scheduler = cast(Any, self._engine.engine_core).engine_core.scheduler
        shorten_allocation(self._scheduler)
        if isinstance(publisher := self._scheduler.kv_event_publisher, ZmqEventPublisher):
            publisher._data_parallel_rank = (
                replica_here()
            )  # of its events: each replica is vLLM's rank 0

        self._preempted: dict[str, int] = {}
        self._num_preemptions = 0
        self.config, self.tasks = self._engine.vllm_config, self._engine.get_supported_tasks()
        self.renderer = self._engine.renderer
        process_setup.unlink_shared_memory()
        # vLLM ends the other ranks before it reports that one has ended. Compilers are not watched.
        pids = [
            pid for pid in linux.descendants(os.getpid()) if linux.title(pid).startswith("VLLM")
        ]
        self._ranks = Processes(pids)
        self._is_alone = isinstance(self._engine.model_executor, UniProcExecutor)
        if not self._is_alone:
            torch.set_num_threads(
                num_threads
            )  # vLLM leaves one to this process, where another engine may compute

        nodes = self.config.parallel_config  # of one node on Ray, whose own nodes watch each other
        self._heartbeat = NodeHeartbeat(nodes) if nodes.nnodes > 1 else None
        VllmEngine.num_open += 1

    def add(self, work: translation.VllmWork) -> None:
        self._engine.add_request(
            work.id, work.prompt, work.params, lora_request=work.adapter, priority=work.priority
        )

    def abort(self, ids: Iterable[str]) -> None:
        self._engine.abort_request(list(ids))

    def step(self) -> Sequence[SequenceOutput]:
        """Step the core directly. LLMEngine.step detokenises and copies each log-prob four times.

        For a small model that takes a tenth of the time. Raises EngineStopped if the device is
        lost, or a rank.
        """
        try:
            new = self._engine.engine_core.get_output().outputs
        except Exception as error:
            if not self._is_alone:  # the ranks may wait for each other now
                log.error(
                    "vLLM's engine died; its own lines further up say why", exc_info=self.is_alive
                )
                self._ranks.kill()
                raise EngineStopped("vLLM's engine died") from error

            if isinstance(error, getattr(torch, "AcceleratorError", ())) or "CUDA error" in str(
                error
            ):
                raise EngineStopped(f"the device cannot be used any more: {error}") from error

            raise

        if ended := [output.request_id for output in new if output.finish_reason is not None]:
            self._engine.output_processor.abort_requests(
                ended, internal=True
            )  # the core has already forgotten them

        return [translation.of_core(_outer_id(output.request_id), output) for output in new]

    def load(self) -> EngineLoad:
        before, self._preempted = self._preempted, {}
        for request in (
            self._scheduler.waiting
        ):  # a preempted one waits again and keeps the number of its preemptions
            if request.num_preemptions:
                self._preempted[request.request_id] = request.num_preemptions
                self._num_preemptions += request.num_preemptions > before.get(request.request_id, 0)

        running = [_outer_id(request.request_id) for request in self._scheduler.running]
        num_blocks = translation.num_blocks(self.config)
        num_used = round(self._scheduler.kv_cache_manager.usage * num_blocks)
        kv_cache = KvCacheStats(
            max_num_blocks=num_blocks,
            free_num_blocks=num_blocks - num_used,
            used_num_blocks=num_used,
            tokens_per_block=self.config.cache_config.block_size,
        )
        return EngineLoad(running, self._num_preemptions, kv_cache)

    def wake(self) -> None:
        """End a step that waits for a lost rank or node: vLLM does so too, but gives the other
        ranks nine seconds.
        """
        if not self.is_alive:
            self._ranks.kill()

    def check_adapter(self, adapter: LoadedAdapter) -> None:
        """vLLM compares patterns of names by an engine that some keep busy for ever, so only plain
        ones get there.
        """
        helper = PEFTHelper.from_local_dir(adapter.path, self.config.model_config.max_model_len)
        patterns = ("rank_pattern", "alpha_pattern")  # 0.30 has neither
        check_names(**{name: getattr(helper, name, None) for name in patterns})
        helper.validate_legal(self.config.lora_config)

    def add_adapter(self, adapter: LoadedAdapter) -> None:
        self._engine.add_lora(translation.lora_request(adapter))
        if adapter.is_pinned:
            self._engine.pin_lora(adapter.number)

    def remove_adapter(self, adapter: LoadedAdapter) -> None:
        self._engine.remove_lora(adapter.number)

    @property
    def is_alive(self) -> bool:
        has_failed = getattr(
            self._engine.model_executor, "is_failed", False
        )  # Ray's ranks are not ours
        return (
            self._ranks.are_alive
            and not has_failed
            and (self._heartbeat is None or self._heartbeat.is_whole)
        )

    def close(self) -> None:
        """Shut down. vLLM's groups of ranks belong to the process, so only the last of several
        engines ends them.
        """
        self.wake()  # a broken group cannot shut down in order
        if self._heartbeat is not None:
            self._heartbeat.close()

        self._ranks.close()
        VllmEngine.num_open -= 1
        VllmEngine.closed.append(self._engine)
        if VllmEngine.num_open == 0:
            self._engine.engine_core.shutdown()
            VllmEngine.closed.clear()


def _no_ranks(log_probs: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Replace vLLM's count of likelier tokens, which lmi does not use: (rows, vocabulary), (rows,
    1) to (rows,).
    """
    return torch.zeros(len(chosen), dtype=torch.int64, device=chosen.device)


@lru_cache(maxsize=4096)  # asked twice a token
def _outer_id(inner_id: str) -> str:
    """The id that vLLM was given. vLLM appends eight letters to it."""
    return inner_id.rpartition("-")[0]


def shorten_allocation(scheduler: Any) -> None:
    """Let the scheduler skip the allocation of cache blocks where nothing can change, if its cache
    allows that.

    vLLM asks its block manager for each sequence in each step, though a sequence that computes one
    token needs a new block only at every `block_size`-th. For a small model the question takes a
    twenty-fifth of the step. Anything but the plain cache of one group of full attention keeps
    vLLM's own way.
    """
    manager = scheduler.kv_cache_manager
    managers = manager.coordinator.single_type_managers
    if (
        len(managers) == 1
        and type(managers[0]) is FullAttentionManager
        and scheduler.connector is None
    ):
        manager.allocate_slots = skipping(
            manager.allocate_slots, managers[0], manager.empty_kv_cache_blocks
        )


def skipping(allocate: Allocate, manager: FullAttentionManager, nothing: Any) -> Allocate:
    """Return `allocate` without its work for one more token that has room in the last block and
    does not fill it.

    A token that fills a block is left to vLLM, which then offers the block to other sequences.
    """
    block_size = manager.block_size
    blocks_of = manager.req_to_blocks

    def allocate_slots(
        request: Any, num_new_tokens: int, *, num_lookahead_tokens: int = 0, **more: Any
    ) -> Any:
        if num_new_tokens == 1 and not (num_lookahead_tokens or more):
            end = request.num_computed_tokens + 1
            if end % block_size and end > request.num_prompt_tokens:
                if len(blocks_of.get(request.request_id, ())) * block_size >= end:
                    return nothing

        return allocate(request, num_new_tokens, num_lookahead_tokens=num_lookahead_tokens, **more)

    return allocate_slots


class NodeHeartbeat:
    """Heartbeats by which the nodes of one engine watch each other. `is_whole` is false once a
    watched node is lost.

    In vLLM a group that has lost a node waits without end. So each node writes a heartbeat to the
    store that torch keeps on node 0 while the group lives, and reads the heartbeats that it
    watches.
    """

    def __init__(self, nodes: ParallelConfig) -> None:
        self.is_whole = True
        self._nodes = nodes
        # Every node watches node 0, which watches every node.
        watched = range(1, nodes.nnodes) if nodes.node_rank == 0 else [0]
        self._heard = {node: (0, time.monotonic()) for node in watched}
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="node-heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closed.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            address = self._nodes.master_addr
            port = self._nodes.master_port
            store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=SILENT_S))
            while not self._is_closed.wait(BEAT_S):
                store.add(f"lmi/beat/{self._nodes.node_rank}", 1)
                for node, (last, heard_s) in self._heard.items():
                    num_beats = store.add(f"lmi/beat/{node}", 0)
                    now = time.monotonic()
                    if num_beats != last:
                        self._heard[node] = num_beats, now
                    elif now - heard_s > (SILENT_S if num_beats else FIRST_BEAT_S):
                        raise TimeoutError(f"node {node} was silent for {now - heard_s:.0f} s")
        except Exception as error:
            if not self._is_closed.is_set():
                log.critical("node 0 is lost: its store does not answer: %s", cause_line(error))
                self.is_whole = False
