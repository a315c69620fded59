"""vLLM's engine, whose scheduler runs in this process.

It uses more of vLLM than its public classes.
"""

import logging
import os
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, ClassVar, cast

import torch
from vllm.distributed.kv_events import ZmqEventPublisher
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.lora.peft_helper import PEFTHelper
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.sample import sampler

from handlers.base.adapter_names import check_names
from handlers.base.adapters import LoadedAdapter
from handlers.base.kv_events.endpoints import replica_here
from handlers.base.stepped import EngineStopped
from handlers.driven.engine import EngineLoad
from handlers.driven.outputs import SequenceOutput
from handlers.driven.processes import Processes
from handlers.lmi_vllm import engine_info, translation
from handlers.lmi_vllm.allocation import shorten_allocation
from handlers.lmi_vllm.heartbeat import NodeHeartbeat
from handlers.lmi_vllm.shared_memory import unlink_shared_memory
from lmi.executor import KvCacheStats
from lmi.shared import processes

log = logging.getLogger("lmi.vllm")


class VllmEngine:
    """An `Engine` that calls vLLM's core and scheduler directly.

    One rank computes in this process. Several ranks are processes, perhaps on several nodes.
    """

    # The number of engines in this process.
    num_open: ClassVar[int] = 0
    # They are kept alive, because the finalizer of an engine ends groups of ranks too.
    closed: ClassVar[list[LLMEngine]] = []

    def __init__(self, arguments: AsyncEngineArgs) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        cast(Any, sampler).batched_count_greater_than = _no_counts
        num_threads = torch.get_num_threads()

        self._engine = LLMEngine.from_engine_args(arguments)
        self._scheduler = cast(Any, self._engine.engine_core).engine_core.scheduler
        shorten_allocation(self._scheduler)

        publisher = self._scheduler.kv_event_publisher
        if isinstance(publisher, ZmqEventPublisher):
            # Its events carry this number. Each replica is vLLM's rank 0.
            publisher._data_parallel_rank = replica_here()

        # By vLLM's id: how often a sequence that waits again was preempted.
        self._preempted: dict[str, int] = {}
        self._num_preemptions = 0
        self.config = self._engine.vllm_config
        self.tasks = self._engine.get_supported_tasks()
        self.renderer = self._engine.renderer
        unlink_shared_memory()

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
        """Make a step of the core, and return its outputs.

        It does not call LLMEngine.step, which makes text of tokens and copies each log-prob four
        times: a tenth of the time of a small model. Raises EngineStopped if the device is lost, or
        a rank.
        """
        try:
            outputs = self._engine.engine_core.get_output().outputs
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

        ended_ids = [output.request_id for output in outputs if output.finish_reason is not None]
        if ended_ids:
            # The core has already forgotten them.
            self._engine.output_processor.abort_requests(ended_ids, internal=True)

        return [translation.of_core(_outer_id(output.request_id), output) for output in outputs]

    def load(self) -> EngineLoad:
        """Return how busy the scheduler is."""
        self._count_preemptions()
        running = [_outer_id(request.request_id) for request in self._scheduler.running]
        num_blocks = engine_info.num_blocks(self.config)
        num_used = round(self._scheduler.kv_cache_manager.usage * num_blocks)
        kv_cache = KvCacheStats(
            max_num_blocks=num_blocks,
            free_num_blocks=num_blocks - num_used,
            used_num_blocks=num_used,
            tokens_per_block=self.config.cache_config.block_size,
        )
        return EngineLoad(running, self._num_preemptions, kv_cache)

    def _count_preemptions(self) -> None:
        """Count the sequences that were preempted since the last call.

        A preempted one waits again, and keeps the number of its preemptions.
        """
        before = self._preempted
        self._preempted = {}
        for request in self._scheduler.waiting:
            request_id = request.request_id
            num_preemptions = request.num_preemptions
            if num_preemptions:
                self._preempted[request_id] = num_preemptions
                if num_preemptions > before.get(request_id, 0):
                    self._num_preemptions += 1

    def wake(self) -> None:
        """End a step that waits for a lost rank or node.

        vLLM does so too, but gives the other ranks nine seconds.
        """
        if not self.is_alive:
            self._ranks.kill()

    def check_adapter(self, adapter: LoadedAdapter) -> None:
        """Read the configuration of an adapter: see `AdapterEngine`.

        vLLM matches its names as patterns, some of which would keep Python's `re` busy for ever. So
        only plain names get there.
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


def _no_counts(log_probs: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Stand in for vLLM's count of likelier tokens, which lmi does not use.

    (rows, vocabulary) and (rows, 1) to (rows,).
    """
    return torch.zeros(len(values), dtype=torch.int64, device=values.device)


# It is called twice a token.
@lru_cache(maxsize=4096)
def _outer_id(inner_id: str) -> str:
    """Return the id that vLLM was given. vLLM appends eight letters to it."""
    return inner_id.rpartition("-")[0]
