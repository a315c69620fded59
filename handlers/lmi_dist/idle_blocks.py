"""The cached blocks that nobody uses, by the order of their eviction. Plain Python.

The block with the lowest priority is evicted first, of these the one that was idle longest. The
tree must have nothing below it, so a block is kept as long as any of those below it.
"""

import heapq
import time
from collections.abc import Callable
from itertools import count
from typing import NamedTuple

from msgspec import Struct

from lmi.executor import DEFAULT_RETENTION_PRIORITY, KvCacheRetentionConfig

# How many entries a heap may have beside one for each idle block, before it is built anew.
MAX_STALE = 64


class Retention(NamedTuple):
    """The priority of an idle block, until it was idle for `duration_s`.

    Then it is the default again.
    """

    priority: int
    duration_s: float | None = None


def retentions(
    config: KvCacheRetentionConfig, num_prompt_tokens: int, num_tokens: int, tokens_per_block: int
) -> list[Retention | None]:
    """What a request says of each of its blocks: what it says of the block's first token.

    None: nothing.
    """

    def retention_of(token: int) -> Retention | None:
        if token >= num_prompt_tokens:
            return _retention(config.decode_retention_priority, config.decode_duration_ms)

        for span in config.token_range_retention_configs:
            if span.token_start <= token and (span.token_end is None or token < span.token_end):
                return _retention(span.priority, span.duration_ms)

        return None

    return [retention_of(token) for token in range(0, num_tokens, tokens_per_block)]


def _retention(priority: int, duration_ms: int | None) -> Retention:
    """Return a retention whose duration is left out where it would change nothing."""
    if duration_ms is None or priority == DEFAULT_RETENTION_PRIORITY:
        return Retention(priority)

    return Retention(priority, duration_ms / 1000)


DEFAULT = Retention(DEFAULT_RETENTION_PRIORITY)


class _Idle(Struct):
    # By the time at which the block became idle.
    order: int
    since_s: float
    priority: int
    # When the priority is the default again.
    end_s: float | None
    is_evictable: bool


class IdleBlocks:
    """The idle blocks, and how long those with a retention keep their priority."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._idle: dict[int, _Idle] = {}
        # Of blocks, idle and used, that do not have the default.
        self._retentions: dict[int, Retention] = {}

        # A heap of (priority, order, block): all that are evictable, and stale entries.
        self._heap: list[tuple[int, int, int]] = []
        # A heap of (end, order, block), with stale entries too.
        self._ends: list[tuple[float, int, int]] = []
        self._orders = count()

    def __len__(self) -> int:
        return len(self._idle)

    def retain(self, block: int, retention: Retention) -> None:
        """Set the retention of a block, used or idle.

        It counts when the block is idle, each time from then on.
        """
        idle = self._idle.get(block)
        if idle is not None:
            self.remove(block)

        self._retentions[block] = retention
        if idle is not None:
            self.add(block, is_evictable=idle.is_evictable)

    def release(self, block: int) -> None:
        """Let a block have the default retention again: its own has ended, or its data is gone."""
        self._retentions.pop(block, None)

    def add(self, block: int, *, is_evictable: bool) -> None:
        """Note that nobody uses a block any more. It may be evicted if nothing lies below it."""
        retention = self._retentions.get(block, DEFAULT)
        now_s = self._now_s()
        idle = _Idle(next(self._orders), now_s, retention.priority, None, is_evictable)
        self._idle[block] = idle
        if retention.duration_s is not None:
            idle.end_s = now_s + retention.duration_s
            heapq.heappush(self._ends, (idle.end_s, idle.order, block))
            self._drop_stale()

        if is_evictable:
            self._push(block, idle)

    def remove(self, block: int) -> None:
        """Take a block that is used again."""
        idle = self._idle.pop(block)
        if idle.end_s is not None and idle.end_s <= self._now_s():
            self.release(block)

    def allow(self, block: int) -> None:
        """Let a block be evicted, if it is idle: nothing lies below it any more."""
        idle = self._idle.get(block)
        if idle is not None and not idle.is_evictable:
            idle.is_evictable = True
            self._push(block, idle)

    def pop(self) -> int:
        """Evict a block, after the retentions that have ended."""
        block = self._first()
        assert block is not None
        del self._idle[block]
        self.release(block)
        return block

    def is_first_older(self, time_s: float) -> bool:
        """Whether there is a block to evict first, and nobody has used it since a time."""
        block = self._first()
        return block is not None and self._idle[block].since_s <= time_s

    def _first(self) -> int | None:
        """Return the block that is evicted first, if one may be."""
        if self._ends:
            self._end_retentions(self._now_s())

        while self._heap:
            priority, order, block = self._heap[0]
            idle = self._idle.get(block)
            if idle is not None and (idle.priority, idle.order) == (priority, order):
                return block

            # It was used since, or has another priority now.
            heapq.heappop(self._heap)

        return None

    def _end_retentions(self, now_s: float) -> None:
        while self._ends and self._ends[0][0] <= now_s:
            _, order, block = heapq.heappop(self._ends)
            idle = self._idle.get(block)
            if idle is not None and idle.order == order:
                idle.priority = DEFAULT.priority
                self.release(block)
                if idle.is_evictable:
                    self._push(block, idle)

    def _push(self, block: int, idle: _Idle) -> None:
        heapq.heappush(self._heap, (idle.priority, idle.order, block))
        self._drop_stale()

    def _drop_stale(self) -> None:
        """Make a heap anew that has grown much larger than what is idle: its other entries are of
        blocks that were used since.
        """
        max_entries = 2 * len(self._idle) + MAX_STALE
        if len(self._heap) > max_entries:
            self._heap = []
            for number, entry in self._idle.items():
                if entry.is_evictable:
                    self._heap.append((entry.priority, entry.order, number))

            heapq.heapify(self._heap)

        if len(self._ends) > max_entries:
            self._ends = []
            for number, entry in self._idle.items():
                if entry.end_s is not None:
                    self._ends.append((entry.end_s, entry.order, number))

            heapq.heapify(self._ends)
