"""The cached blocks by content, and those of them that are idle by the order of their eviction.
Plain Python.

In the tree each block lies below the one before it, so that its place says all tokens from the
first on. The blocks below one, which is full, are sorted by their tokens: what has most in common
with given tokens is next to where they would stand. Strangers share only parts of 16 tokens, and
clients are told of such parts: if single tokens counted, those of a prompt could be guessed one by
one, by time or by `cached_tokens`.

Of the idle blocks that with the lowest priority is evicted first, then the one that was idle
longest. The tree must have nothing below it, so a block is kept as long as any of those below it.
"""

import heapq
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple, TypeAlias

from lmi.executor import DEFAULT_RETENTION_PRIORITY, KvCacheRetentionConfig

# As many as vLLM has in a block.
TOKENS_PER_PART = 16
# How many entries a heap may have beside one for each idle block, before it is built anew.
MAX_STALE = 64


class Root(NamedTuple):
    """What requests must have in common to share anything.

    All requests without a salt are strangers to each other.
    """

    cache_salt: str | None
    # A number that no other adapter ever has, also none of the same name.
    adapter: int = 0

    def num_shared(self, num_tokens: int) -> int:
        """How many of the first `num_tokens` of a sequence others may find."""
        if self.cache_salt is not None:
            return num_tokens

        return num_tokens // TOKENS_PER_PART * TOKENS_PER_PART


class Match(NamedTuple):
    """`blocks` hold the first tokens, and the first `num_partial` tokens of `partial_block` are
    those that follow.
    """

    blocks: list[int]
    partial_block: int = -1
    num_partial: int = 0


Tokens: TypeAlias = tuple[int, ...]
# A block, or what the first blocks lie below.
Parent: TypeAlias = Root | int


class PrefixTree:
    """The cached blocks, each below the one with the tokens before it."""

    def __init__(self, tokens_per_block: int) -> None:
        self._tokens_per_block = tokens_per_block
        # The children are sorted, and never empty.
        self._children: dict[Parent, list[tuple[Tokens, int]]] = {}
        # The place of each block.
        self._places: dict[int, tuple[Parent, Tokens]] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._places

    def has_children(self, block: int) -> bool:
        """Whether other blocks lie below a block."""
        return block in self._children

    def find(self, root: Root, token_ids: list[int], end: int) -> Match:
        """The longest known beginning of `token_ids[:end]` that may be shared: whole blocks, and of
        one more.
        """
        parent: Parent = root
        blocks: list[int] = []
        for start in range(0, end, self._tokens_per_block):
            tokens = tuple(token_ids[start : min(start + self._tokens_per_block, end)])
            num_found, block = self._closest(parent, tokens)
            if num_found < self._tokens_per_block:
                return Match(blocks, block, root.num_shared(num_found))

            blocks.append(block)
            parent = block

        return Match(blocks)

    def _closest(self, parent: Parent, tokens: Tokens) -> tuple[int, int]:
        """How many of the tokens the most similar block below `parent` begins with, and that
        block.
        """
        siblings = self._children.get(parent, [])
        place = bisect_left(siblings, (tokens,))
        if place < len(siblings) and siblings[place][0] == tokens:
            return len(tokens), siblings[place][1]

        similar = [(0, -1)]
        for tokens_of_block, block in siblings[max(place - 1, 0) : place + 1]:
            similar.append((num_equal(tokens_of_block, tokens), block))

        return max(similar)

    def insert(self, parent: Parent, tokens: Tokens, block: int) -> int:
        """Put a block below its parent, which is in the tree.

        A block that was there with fewer tokens moves.

        If another block begins with these tokens already, the tree keeps that one. Returns the
        block that it keeps.
        """
        if block in self._places:
            self.remove(block)

        siblings = self._children.get(parent, [])
        place = bisect_left(siblings, (tokens,))
        if place < len(siblings) and siblings[place][0][: len(tokens)] == tokens:
            return siblings[place][1]

        insort(self._children.setdefault(parent, []), (tokens, block))
        self._places[block] = parent, tokens
        return block

    def remove(self, block: int) -> Parent:
        """Forget a block, which must have none below it. Returns what it lay below."""
        assert block not in self._children
        parent, tokens = self._places.pop(block)
        siblings = self._children[parent]
        del siblings[bisect_left(siblings, (tokens,))]
        if not siblings:
            del self._children[parent]

        return parent


def num_equal(first: Sequence[int], second: Sequence[int]) -> int:
    """The length of the longest common beginning."""
    pairs = zip(first, second, strict=False)
    for place, (token_id, expected_id) in enumerate(pairs):
        if token_id != expected_id:
            return place

    return min(len(first), len(second))


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


@dataclass(slots=True)
class _Idle:
    # By the time at which the block became idle.
    order: int
    priority: int
    # When the priority is the default again.
    end_s: float | None
    is_evictable: bool


class IdleBlocks:
    """`now_s` is read only if a retention has a duration."""

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
        """Forget the retention of a used block: what it held is gone."""
        self._retentions.pop(block, None)

    def add(self, block: int, *, is_evictable: bool) -> None:
        """Note that nobody uses a block any more. It may be evicted if nothing lies below it."""
        retention = self._retentions.get(block, DEFAULT)
        idle = _Idle(next(self._orders), retention.priority, None, is_evictable)
        self._idle[block] = idle
        if retention.duration_s is not None:
            idle.end_s = self._now_s() + retention.duration_s
            heapq.heappush(self._ends, (idle.end_s, idle.order, block))

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
        if self._ends:
            self._end_retentions(self._now_s())

        while True:
            priority, order, block = heapq.heappop(self._heap)
            idle = self._idle.get(block)
            if idle is not None and (idle.priority, idle.order) == (priority, order):
                del self._idle[block]
                self.release(block)
                return block

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
