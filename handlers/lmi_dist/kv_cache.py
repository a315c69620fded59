"""The budget of the key-value cache, in blocks and slots. Plain Python.

In memory a running sequence owns one contiguous slot, which the operating system fills page by page. In the budget it
is charged for blocks of 16 tokens, as in a paged cache. So every rule of a paged cache applies (admission, growth,
preemption); only a table of addresses is not needed.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

TOKENS_PER_BLOCK = 16


def num_blocks_for(num_tokens: int) -> int:
    return -(-num_tokens // TOKENS_PER_BLOCK)


class KvCache:
    """The blocks that each slot holds. `on_free` is called with each freed slot before it can be allocated again."""

    def __init__(self, num_blocks: int, num_slots: int, on_free: Callable[[int], None] = lambda slot: None) -> None:
        self.num_blocks = num_blocks
        self.num_free_blocks = num_blocks
        self._free_slots = list(range(num_slots))  # a heap: the lowest slot first keeps the active slots dense
        self._held: dict[int, int] = {}  # slot -> blocks
        self._on_free = on_free

    @property
    def num_used_blocks(self) -> int:
        return self.num_blocks - self.num_free_blocks

    def can_allocate(self, num_tokens: int, num_reserved: int = 0) -> bool:
        """Whether a slot is free, and blocks for `num_tokens` with `num_reserved` blocks to spare."""
        return bool(self._free_slots) and num_blocks_for(num_tokens) + num_reserved <= self.num_free_blocks

    def allocate(self, num_tokens: int) -> int:
        """Charge the lowest free slot for `num_tokens` and return it. Ask `can_allocate` first."""
        assert self.can_allocate(num_tokens)
        slot = heapq.heappop(self._free_slots)
        self._held[slot] = num_blocks_for(num_tokens)
        self.num_free_blocks -= self._held[slot]
        return slot

    def grow(self, slot: int, num_tokens: int) -> bool:
        """Charge the slot for `num_tokens` in all. Returns False and changes nothing when there are too few blocks."""
        num_more = num_blocks_for(num_tokens) - self._held[slot]
        if num_more > self.num_free_blocks:
            return False
        if num_more > 0:
            self._held[slot] += num_more
            self.num_free_blocks -= num_more
        return True

    def free(self, slot: int) -> None:
        self.num_free_blocks += self._held.pop(slot)
        self._on_free(slot)
        heapq.heappush(self._free_slots, slot)
