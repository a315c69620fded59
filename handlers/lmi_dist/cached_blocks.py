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

TOKENS_PER_PART = 16  # as many as vLLM has in a block
MAX_STALE = 64  # entries of a heap beside one for each idle block, before it is built anew


class Root(NamedTuple):
    """What requests must have in common to share anything. All requests without a salt are
    strangers to each other.
    """

    cache_salt: str | None
    adapter: int = 0  # a number that no other adapter ever has, also none of the same name

    def num_shared(self, num_tokens: int) -> int:
        """How many of the first `num_tokens` of a sequence others may find."""
        return (
            num_tokens
            if self.cache_salt is not None
            else num_tokens // TOKENS_PER_PART * TOKENS_PER_PART
        )


class Match(NamedTuple):
    """`blocks` hold the first tokens, and the first `num_partial` tokens of `partial_block` are
    those that follow.
    """

    blocks: list[int]
    partial_block: int = -1
    num_partial: int = 0


Tokens: TypeAlias = tuple[int, ...]
Parent: TypeAlias = Root | int  # a block, or what the first blocks lie below


class PrefixTree:
    def __init__(self, tokens_per_block: int) -> None:
        self._tokens_per_block = tokens_per_block
        self._children: dict[Parent, list[tuple[Tokens, int]]] = {}  # sorted, never empty
        self._places: dict[int, tuple[Parent, Tokens]] = {}  # of each block

    def __contains__(self, block: int) -> bool:
        return block in self._places

    def has_children(self, block: int) -> bool:
        return block in self._children

    def find(self, root: Root, token_ids: list[int], end: int) -> Match:
        """The longest known beginning of `token_ids[:end]` that may be shared: whole blocks, and of
        one more.
        """
        parent: Parent = root
        blocks: list[int] = []
        for start in range(0, end, self._tokens_per_block):
            wanted = tuple(token_ids[start : min(start + self._tokens_per_block, end)])
            num_found, block = self._closest(parent, wanted)
            if num_found < self._tokens_per_block:
                return Match(blocks, block, root.num_shared(num_found))

            blocks.append(block)
            parent = block

        return Match(blocks)

    def _closest(self, parent: Parent, wanted: Tokens) -> tuple[int, int]:
        """How many tokens the most similar block below `parent` begins with, and that block."""
        siblings = self._children.get(parent, [])
        place = bisect_left(siblings, (wanted,))
        if place < len(siblings) and siblings[place][0] == wanted:
            return len(wanted), siblings[place][1]

        neighbours = siblings[max(place - 1, 0) : place + 1]
        return max(
            ((num_equal(tokens, wanted), block) for tokens, block in neighbours), default=(0, -1)
        )

    def insert(self, parent: Parent, tokens: Tokens, block: int) -> int:
        """Put a block below its parent, which is in the tree. A block that was there with fewer
        tokens moves.

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


def num_equal(tokens: Sequence[int], others: Sequence[int]) -> int:
    """The length of the longest common beginning."""
    pairs = zip(tokens, others, strict=False)
    return next(
        (place for place, (one, other) in enumerate(pairs) if one != other),
        min(len(tokens), len(others)),
    )


class Retention(NamedTuple):
    """The priority of an idle block, until it was idle for `duration_s`. Then it is the default
    again.
    """

    priority: int
    duration_s: float | None = None


def retentions(
    config: KvCacheRetentionConfig, num_prompt_tokens: int, num_tokens: int, tokens_per_block: int
) -> list[Retention | None]:
    """What a request says of each of its blocks: what it says of the block's first token. None:
    nothing.
    """
    ranges = config.token_range_retention_configs

    def said_of(token: int) -> Retention | None:
        if token >= num_prompt_tokens:
            priority = config.decode_retention_priority
            duration_ms = config.decode_duration_ms
        else:
            own = (
                one
                for one in ranges
                if one.token_start <= token and (one.token_end is None or token < one.token_end)
            )
            if (found := next(own, None)) is None:
                return None

            priority = found.priority
            duration_ms = found.duration_ms

        if duration_ms is None or priority == DEFAULT_RETENTION_PRIORITY:
            return Retention(priority)

        return Retention(priority, duration_ms / 1000)

    return [said_of(token) for token in range(0, num_tokens, tokens_per_block)]


DEFAULT = Retention(DEFAULT_RETENTION_PRIORITY)


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
        self._retentions: dict[
            int, Retention
        ] = {}  # of blocks, idle and used, that do not have the default
        self._heap: list[
            tuple[int, int, int]
        ] = []  # priority, order, block: all that are evictable, and stale entries
        self._ends: list[
            tuple[float, int, int]
        ] = []  # a heap: end, order, block; with stale entries too
        self._orders = count()

    def __len__(self) -> int:
        return len(self._idle)

    def retain(self, block: int, retention: Retention) -> None:
        """Set the retention of a block, used or idle. It counts when the block is idle, each time
        from then on.
        """
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
            self._heap = [
                (one.priority, one.order, at) for at, one in self._idle.items() if one.is_evictable
            ]
            heapq.heapify(self._heap)

        if len(self._ends) > most:
            self._ends = [
                (one.end_s, one.order, at)
                for at, one in self._idle.items()
                if one.end_s is not None
            ]
            heapq.heapify(self._ends)
