"""The budget of the key-value cache, in blocks and rows. Plain Python.

Physically a running sequence owns one row of contiguous memory, which the operating system fills page by page;
logically it is charged blocks of 16 tokens against one budget, as in a paged cache. So every rule of a paged cache
stays (admission, growth, preemption) and only the table of addresses is gone.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

TOKENS_PER_BLOCK = 16


def num_blocks_for(num_tokens: int) -> int:
    return -(-num_tokens // TOKENS_PER_BLOCK)


class KvCache:
    """Who holds how much. `on_free` is told each row that is given back, before anyone else can get it."""

    def __init__(self, num_blocks: int, num_rows: int, on_free: Callable[[int], None] = lambda row: None) -> None:
        self.num_blocks = num_blocks
        self.num_free_blocks = num_blocks
        self._free_rows = list(range(num_rows))  # a heap: the lowest row first keeps the active rows dense
        self._held: dict[int, int] = {}  # row -> blocks
        self._on_free = on_free

    @property
    def num_used_blocks(self) -> int:
        return self.num_blocks - self.num_free_blocks

    def can_allocate(self, num_tokens: int, num_reserved: int = 0) -> bool:
        """Whether a row is free and blocks for `num_tokens`, with `num_reserved` blocks to spare."""
        return bool(self._free_rows) and num_blocks_for(num_tokens) + num_reserved <= self.num_free_blocks

    def allocate(self, num_tokens: int) -> int:
        """The lowest free row, charged with the blocks of `num_tokens`; ask `can_allocate` first."""
        assert self.can_allocate(num_tokens)
        row = heapq.heappop(self._free_rows)
        self._held[row] = num_blocks_for(num_tokens)
        self.num_free_blocks -= self._held[row]
        return row

    def grow(self, row: int, num_tokens: int) -> bool:
        """Charge the row for `num_tokens` in all; False, and nothing changed, when blocks are short."""
        num_more = num_blocks_for(num_tokens) - self._held[row]
        if num_more > self.num_free_blocks:
            return False
        if num_more > 0:
            self._held[row] += num_more
            self.num_free_blocks -= num_more
        return True

    def free(self, row: int) -> None:
        self.num_free_blocks += self._held.pop(row)
        self._on_free(row)
        heapq.heappush(self._free_rows, row)
