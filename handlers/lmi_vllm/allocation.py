"""The allocation of vLLM's cache blocks, which is skipped where it would change nothing."""

from collections.abc import Callable
from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

Allocate = Callable[..., Any]


def shorten_allocation(scheduler: Any) -> None:
    """Let the scheduler skip allocations that would change nothing, if its cache allows that.

    vLLM asks its block manager for each sequence in each step, though a sequence that computes one
    token needs a new block only at every `block_size`-th. For a small model the question takes a
    twenty-fifth of the step. Only with the plain cache, of one group of full attention, it is
    skipped.
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
    does not fill it. `nothing` is what it returns then.

    A token that fills a block is left to vLLM, which then offers the block to other sequences.
    """
    block_size = manager.block_size
    blocks_of = manager.req_to_blocks

    def has_room(request: Any) -> bool:
        end: int = request.num_computed_tokens + 1
        fills_block = end % block_size == 0
        if fills_block or end <= request.num_prompt_tokens:
            return False

        blocks = blocks_of.get(request.request_id, ())
        num_tokens: int = len(blocks) * block_size
        return num_tokens >= end

    def allocate_slots(
        request: Any, num_new_tokens: int, *, num_lookahead_tokens: int = 0, **more: Any
    ) -> Any:
        is_plain_decode = num_new_tokens == 1 and not num_lookahead_tokens and not more
        if is_plain_decode and has_room(request):
            return nothing

        return allocate(request, num_new_tokens, num_lookahead_tokens=num_lookahead_tokens, **more)

    return allocate_slots
