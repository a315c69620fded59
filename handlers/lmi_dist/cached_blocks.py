"""The cached blocks by content. Plain Python.

In the tree each block lies below the one before it, so that its place says all tokens from the
first on. The blocks below one, which is full, are sorted by their tokens: what has most in common
with some tokens is next to where they would stand. Strangers share only parts of 16 tokens, and
clients are told of such parts: if single tokens counted, those of a prompt could be guessed one by
one, by time or by `cached_tokens`.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

# As many as vLLM has in a block.
TOKENS_PER_PART = 16


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


class ChildBlock(NamedTuple):
    """A block below another. Children are sorted by their tokens."""

    tokens: Tokens
    block: int


class BlockPlace(NamedTuple):
    """Where a block lies."""

    parent: Parent
    tokens: Tokens


class Similar(NamedTuple):
    """A block that begins with `num_equal` of the tokens that were looked for."""

    num_equal: int
    block: int


NOTHING_SIMILAR = Similar(0, -1)


class PrefixTree:
    """The cached blocks, each below the one with the tokens before it."""

    def __init__(self, tokens_per_block: int) -> None:
        self._tokens_per_block = tokens_per_block
        # The children are sorted, and never empty.
        self._children: dict[Parent, list[ChildBlock]] = {}
        self._places: dict[int, BlockPlace] = {}

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
            closest = self._closest(parent, tokens)
            if closest.num_equal < self._tokens_per_block:
                return Match(blocks, closest.block, root.num_shared(closest.num_equal))

            blocks.append(closest.block)
            parent = closest.block

        return Match(blocks)

    def _closest(self, parent: Parent, tokens: Tokens) -> Similar:
        """The block below `parent` that begins with most of the tokens."""
        siblings = self._children.get(parent, [])
        place = bisect_left(siblings, (tokens,))
        if place < len(siblings) and siblings[place].tokens == tokens:
            return Similar(len(tokens), siblings[place].block)

        # In their order, those beside the place of the tokens have most in common with them.
        neighbours = siblings[max(place - 1, 0) : place + 1]
        closest = NOTHING_SIMILAR
        for neighbour in neighbours:
            similar = Similar(num_equal(neighbour.tokens, tokens), neighbour.block)
            closest = max(closest, similar)

        return closest

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
        if place < len(siblings) and siblings[place].tokens[: len(tokens)] == tokens:
            return siblings[place].block

        insort(self._children.setdefault(parent, []), ChildBlock(tokens, block))
        self._places[block] = BlockPlace(parent, tokens)
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
