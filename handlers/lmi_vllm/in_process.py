"""vLLM's engine in this process, stepped on the caller's thread.

vLLM's scheduler is called directly, and no other process can be left behind. This file and `multi_process.py` use more
of vLLM than its public classes. Written against vLLM 0.30 to 0.33.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, ClassVar, cast

import torch
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.sample import sampler

from handlers.base.adapters import LoadedAdapter
from handlers.base.driven import EngineLoad
from handlers.base.driven_outputs import SequenceOutput
from handlers.base.stepped import EngineStopped
from handlers.lmi_vllm.translation import VllmWork, check_adapter, kv_cache_stats, lora_request, of_core

Allocate = Callable[..., Any]


class InProcess:
    num_open: ClassVar[int] = 0  # in this process
    closed: ClassVar[list[LLMEngine]] = []  # kept alive, because the finalizer of an engine ends groups of ranks too

    def __init__(self, arguments: AsyncEngineArgs) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        cast(Any, sampler).batched_count_greater_than = _no_ranks
        self._engine = LLMEngine.from_engine_args(arguments)
        self._scheduler = cast(Any, self._engine.engine_core).engine_core.scheduler
        shorten_allocation(self._scheduler)
        self._preempted: dict[str, int] = {}
        self._num_preemptions = 0
        self.config = self._engine.vllm_config
        InProcess.num_open += 1

    def add(self, work: VllmWork) -> None:
        self._engine.add_request(work.id, work.prompt, work.params, lora_request=work.adapter, priority=work.priority)

    def abort(self, ids: Iterable[str]) -> None:
        self._engine.abort_request(list(ids))

    def step(self) -> Sequence[SequenceOutput]:
        """Step the core directly. LLMEngine.step detokenises and copies each log-prob four times.

        For a small model that takes a tenth of the time. Raises EngineStopped if the device is lost.
        """
        try:
            new = self._engine.engine_core.get_output().outputs
        except Exception as error:
            if isinstance(error, getattr(torch, "AcceleratorError", ())) or "CUDA error" in str(error):
                raise EngineStopped(f"the device cannot be used any more: {error}") from error
            raise
        if ended := [output.request_id for output in new if output.finish_reason is not None]:
            self._engine.output_processor.abort_requests(ended, internal=True)  # the core has already forgotten them
        return [of_core(_outer_id(output.request_id), output) for output in new]

    def load(self) -> EngineLoad:
        before, self._preempted = self._preempted, {}
        for request in self._scheduler.waiting:  # a preempted one waits again and keeps the number of its preemptions
            if request.num_preemptions:
                self._preempted[request.request_id] = request.num_preemptions
                self._num_preemptions += request.num_preemptions > before.get(request.request_id, 0)
        running = [_outer_id(request.request_id) for request in self._scheduler.running]
        return EngineLoad(
            num_running=len(running),
            running=running,
            num_preemptions=self._num_preemptions,
            kv_cache=kv_cache_stats(self.config, self._scheduler.kv_cache_manager.usage),
        )

    def wake(self) -> None:
        return None

    def check_adapter(self, adapter: LoadedAdapter) -> None:
        check_adapter(adapter, self.config)

    def add_adapter(self, adapter: LoadedAdapter) -> None:
        self._engine.add_lora(lora_request(adapter))
        if adapter.is_pinned:
            self._engine.pin_lora(adapter.number)

    def remove_adapter(self, adapter: LoadedAdapter) -> None:
        self._engine.remove_lora(adapter.number)

    @property
    def is_alive(self) -> bool:
        return True

    def close(self) -> None:
        """Shut down. vLLM's groups of ranks belong to the process, so only the last of several engines ends them."""
        InProcess.num_open -= 1
        InProcess.closed.append(self._engine)
        if InProcess.num_open == 0:
            self._engine.engine_core.shutdown()
            InProcess.closed.clear()


def _no_ranks(log_probs: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Replace vLLM's count of likelier tokens, which lmi does not use: (rows, vocabulary), (rows, 1) to (rows,)."""
    return torch.zeros(len(chosen), dtype=torch.int64, device=chosen.device)


@lru_cache(maxsize=4096)  # asked twice a token
def _outer_id(inner_id: str) -> str:
    """The id that vLLM was given. vLLM appends eight letters to it."""
    return inner_id.rpartition("-")[0]


def shorten_allocation(scheduler: Any) -> bool:
    """Let the scheduler skip the allocation of cache blocks where nothing can change, if its cache allows that.

    vLLM asks its block manager for each sequence in each step, though a sequence that computes one token needs a new
    block only at every `block_size`-th. For a small model the question takes a twenty-fifth of the step. Anything but
    the plain cache of one group of full attention keeps vLLM's own way.
    """
    manager = scheduler.kv_cache_manager
    managers = manager.coordinator.single_type_managers
    if len(managers) != 1 or type(managers[0]) is not FullAttentionManager or scheduler.connector is not None:
        return False
    manager.allocate_slots = skipping(manager.allocate_slots, managers[0], manager.empty_kv_cache_blocks)
    return True


def skipping(allocate: Allocate, manager: FullAttentionManager, nothing: Any) -> Allocate:
    """Return `allocate` without its work for one more token that has room in the last block and does not fill it.

    A token that fills a block is left to vLLM, which then offers the block to other sequences.
    """
    block_size, blocks_of = manager.block_size, manager.req_to_blocks

    def allocate_slots(request: Any, num_new_tokens: int, *, num_lookahead_tokens: int = 0, **more: Any) -> Any:
        if num_new_tokens == 1 and not (num_lookahead_tokens or more):
            end = request.num_computed_tokens + 1
            if end % block_size and end > request.num_prompt_tokens:
                if len(blocks_of.get(request.request_id, ())) * block_size >= end:
                    return nothing
        return allocate(request, num_new_tokens, num_lookahead_tokens=num_lookahead_tokens, **more)

    return allocate_slots
