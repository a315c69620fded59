"""The idle blocks and the order of their eviction: the lowest priority first, then the block that was idle longest.

A block can be evicted only when the tree has nothing below it, so a block is kept as long as any of those below it. How
long a request wants its blocks to be kept, it says block by block. Plain Python.
"""

import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from lmi.executor import DEFAULT_RETENTION_PRIORITY, KvCacheRetentionConfig


class Retention(NamedTuple):
    """The priority of an idle block, until it was idle for `duration_s`. Then it is the default again."""

    priority: int
    duration_s: float | None = None


def retentions(
    config: KvCacheRetentionConfig, num_prompt_tokens: int, num_tokens: int, tokens_per_block: int
) -> list[Retention | None]:
    """What a request says of each of its blocks: what it says of the block's first token. None: nothing."""
    ranges = config.token_range_retention_configs

    def said_of(token: int) -> Retention | None:
        if token >= num_prompt_tokens:
            priority, duration_ms = config.decode_retention_priority, config.decode_duration_ms
        else:
            own = (
                one for one in ranges if one.token_start <= token and (one.token_end is None or token < one.token_end)
            )
            if (found := next(own, None)) is None:
                return None
            priority, duration_ms = found.priority, found.duration_ms
        if duration_ms is None or priority == DEFAULT_RETENTION_PRIORITY:
            return Retention(priority)
        return Retention(priority, duration_ms / 1000)

    return [said_of(token) for token in range(0, num_tokens, tokens_per_block)]


DEFAULT = Retention(DEFAULT_RETENTION_PRIORITY)
MAX_STALE = 64  # entries of a heap beside one for each idle block, before it is built anew


@dataclass(slots=True)
class _Idle:
    order: int  # by the time at which it became idle
    priority: int
    end_s: float | None  # when the priority is the default again
    is_evictable: bool


class IdleBlocks:
    """`now_s` is read only if a retention has a duration."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._idle: dict[int, _Idle] = {}
        self._retentions: dict[int, Retention] = {}  # of blocks, idle and used, that do not have the default
        self._heap: list[tuple[int, int, int]] = []  # priority, order, block: all that are evictable, and stale entries
        self._ends: list[tuple[float, int, int]] = []  # a heap: end, order, block; with stale entries too
        self._orders = count()

    def __len__(self) -> int:
        return len(self._idle)

    def retain(self, block: int, retention: Retention) -> None:
        """Set the retention of a block, used or idle. It counts when the block is idle, each time from then on."""
        one = self._idle.get(block)
        if one is not None:
            self.remove(block)
        self._retentions[block] = retention
        if one is not None:
            self.add(block, is_evictable=one.is_evictable)

    def release(self, block: int) -> None:
        """Forget the retention of a used block: what it held is gone."""
        self._retentions.pop(block, None)

    def add(self, block: int, *, is_evictable: bool) -> None:
        retention = self._retentions.get(block, DEFAULT)
        end_s = None if retention.duration_s is None else self._now_s() + retention.duration_s
        one = self._idle[block] = _Idle(next(self._orders), retention.priority, end_s, is_evictable)
        if end_s is not None:
            heapq.heappush(self._ends, (end_s, one.order, block))
        if is_evictable:
            self._push(block, one)

    def remove(self, block: int) -> None:
        """Take a block that is used again."""
        one = self._idle.pop(block)
        if one.end_s is not None and one.end_s <= self._now_s():
            self.release(block)

    def allow(self, block: int) -> None:
        """Let a block be evicted, if it is idle: nothing lies below it any more."""
        one = self._idle.get(block)
        if one is not None and not one.is_evictable:
            one.is_evictable = True
            self._push(block, one)

    def pop(self) -> int:
        """Evict a block, after the retentions that have ended."""
        now_s = self._now_s() if self._ends else 0.0
        while self._ends and self._ends[0][0] <= now_s:
            _, order, block = heapq.heappop(self._ends)
            one = self._idle.get(block)
            if one is not None and one.order == order:
                one.priority = DEFAULT.priority
                self.release(block)
                if one.is_evictable:
                    self._push(block, one)
        while True:
            priority, order, block = heapq.heappop(self._heap)
            one = self._idle.get(block)
            if one is not None and (one.priority, one.order) == (priority, order):
                del self._idle[block]
                self.release(block)
                return block

    def _push(self, block: int, one: _Idle) -> None:
        heapq.heappush(self._heap, (one.priority, one.order, block))
        most = 2 * len(self._idle) + MAX_STALE
        if len(self._heap) > most:
            self._heap = [(one.priority, one.order, at) for at, one in self._idle.items() if one.is_evictable]
            heapq.heapify(self._heap)
        if len(self._ends) > most:
            self._ends = [(one.end_s, one.order, at) for at, one in self._idle.items() if one.end_s is not None]
            heapq.heapify(self._ends)
