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
from lmi.shared import processes

BEAT_S = 0.5
# A node that is silent for longer is lost.
SILENT_S = 10.0
# The wait for its first heartbeat. The nodes of a group do not end their start at the same moment.
FIRST_BEAT_S = 60.0

Allocate = Callable[..., Any]

log = logging.getLogger("lmi.vllm")


class VllmEngine:
    """vLLM's scheduler is called directly. Several ranks are processes, perhaps on
    several nodes.
    """

    # The number of engines in this process.
    num_open: ClassVar[int] = 0
    # They are kept alive, because the finalizer of an engine ends groups of ranks too.
    closed: ClassVar[list[LLMEngine]] = []

    def __init__(self, arguments: AsyncEngineArgs) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        cast(Any, sampler).batched_count_greater_than = _no_ranks
        num_threads = torch.get_num_threads()

        self._engine = LLMEngine.from_engine_args(arguments)
        self._scheduler = cast(Any, self._engine.engine_core).engine_core.scheduler
        shorten_allocation(self._scheduler)

        publisher = self._scheduler.kv_event_publisher
        if isinstance(publisher, ZmqEventPublisher):
            # Its events carry this number. Each replica is vLLM's rank 0.
            publisher._data_parallel_rank = replica_here()

        # The numbers of preemptions of the sequences that wait again, by vLLM's ids.
        self._preempted: dict[str, int] = {}
        self._num_preemptions = 0
        self.config = self._engine.vllm_config
        self.tasks = self._engine.get_supported_tasks()
        self.renderer = self._engine.renderer
        process_setup.unlink_shared_memory()

        # vLLM ends the other ranks before it reports that one has ended. Compilers are not watched.
        pids = processes.descendants(os.getpid())
        self._ranks = Processes(pid for pid in pids if processes.title(pid).startswith("VLLM"))
        self._is_alone = isinstance(self._engine.model_executor, UniProcExecutor)
        if not self._is_alone:
            # vLLM leaves one thread to this process, where another engine may compute.
            torch.set_num_threads(num_threads)

        # With Ray there is one node here, and Ray's own nodes watch each other.
        nodes = self.config.parallel_config
        self._heartbeat = NodeHeartbeat(nodes) if nodes.nnodes > 1 else None
        VllmEngine.num_open += 1

    def add(self, work: translation.VllmWork) -> None:
        """Queue a sequence. Raises what vLLM's check of it raises."""
        self._engine.add_request(
            work.id, work.prompt, work.params, lora_request=work.adapter, priority=work.priority
        )

    def abort(self, ids: Iterable[str]) -> None:
        """Forget sequences; ids that have ended are ignored."""
        self._engine.abort_request(list(ids))

    def step(self) -> Sequence[SequenceOutput]:
        """Step the core directly. LLMEngine.step detokenises and copies each log-prob four times.

        For a small model that takes a tenth of the time. Raises EngineStopped if the device is
        lost, or a rank.
        """
        try:
            new = self._engine.engine_core.get_output().outputs
        except Exception as error:
            if not self._is_alone:
                # The ranks may wait for each other now.
                log.error(
                    "vLLM's engine died; its own lines further up say why", exc_info=self.is_alive
                )
                self._ranks.kill()
                raise EngineStopped("vLLM's engine died") from error

            if _is_of_device(error):
                raise EngineStopped(f"the device cannot be used any more: {error}") from error

            raise

        ended = [output.request_id for output in new if output.finish_reason is not None]
        if ended:
            # The core has already forgotten them.
            self._engine.output_processor.abort_requests(ended, internal=True)

        return [translation.of_core(_outer_id(output.request_id), output) for output in new]

    def load(self) -> EngineLoad:
        """Return how busy the scheduler is."""
        before = self._preempted
        self._preempted = {}
        for request in self._scheduler.waiting:
            # A preempted request waits again and keeps the number of its preemptions.
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
        # vLLM 0.30 has neither pattern.
        check_names(
            rank_pattern=getattr(helper, "rank_pattern", None),
            alpha_pattern=getattr(helper, "alpha_pattern", None),
        )
        helper.validate_legal(self.config.lora_config)

    def add_adapter(self, adapter: LoadedAdapter) -> None:
        """Let vLLM read the weights of an adapter, and pin it if it is to be pinned."""
        self._engine.add_lora(translation.lora_request(adapter))
        if adapter.is_pinned:
            self._engine.pin_lora(adapter.number)

    def remove_adapter(self, adapter: LoadedAdapter) -> None:
        """Free the weights of an adapter, if vLLM has them."""
        self._engine.remove_lora(adapter.number)

    @property
    def is_alive(self) -> bool:
        """Whether all ranks live, and all nodes if there are several."""
        # Ray's ranks are no processes of ours, so vLLM tells of them.
        has_failed = getattr(self._engine.model_executor, "is_failed", False)
        if has_failed or not self._ranks.are_alive:
            return False

        return self._heartbeat is None or self._heartbeat.is_whole

    def close(self) -> None:
        """Shut down. vLLM's groups of ranks belong to the process, so only the last of several
        engines ends them.
        """
        # A broken group cannot shut down in order.
        self.wake()
        if self._heartbeat is not None:
            self._heartbeat.close()

        self._ranks.close()
        VllmEngine.num_open -= 1
        VllmEngine.closed.append(self._engine)
        if VllmEngine.num_open == 0:
            self._engine.engine_core.shutdown()
            VllmEngine.closed.clear()


def _is_of_device(error: Exception) -> bool:
    """Whether an error says that the device cannot be used any more."""
    if isinstance(error, getattr(torch, "AcceleratorError", ())):
        return True

    return "CUDA error" in str(error)


def _no_ranks(log_probs: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Replace vLLM's count of likelier tokens, which lmi does not use: (rows, vocabulary), (rows,
    1) to (rows,).
    """
    return torch.zeros(len(values), dtype=torch.int64, device=values.device)


# It is called twice a token.
@lru_cache(maxsize=4096)
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
    is_plain = len(managers) == 1 and type(managers[0]) is FullAttentionManager
    if is_plain and scheduler.connector is None:
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
        """End the heartbeat of this node."""
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
                    max_silence_s = SILENT_S if num_beats else FIRST_BEAT_S
                    if num_beats != last:
                        self._heard[node] = (num_beats, now)
                    elif now - heard_s > max_silence_s:
                        raise TimeoutError(f"node {node} was silent for {now - heard_s:.0f} s")
        except Exception as error:
            if not self._is_closed.is_set():
                log.critical("node 0 is lost: its store does not answer: %s", cause_line(error))
                self.is_whole = False
