"""The cached blocks by content: each lies below the one before it, so that its place says all tokens from the first on.

The blocks below one, which is full, are sorted by their tokens: what has most in common with given tokens is next to
where they would stand. Strangers share only parts of 16 tokens, and clients are told of such parts: if single tokens
counted, those of a prompt could be guessed one by one, by time or by `cached_tokens`.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

TOKENS_PER_PART = 16  # as many as vLLM has in a block


class Root(NamedTuple):
    """What requests must have in common to share anything. All requests without a salt are strangers to each other."""

    cache_salt: str | None
    adapter: int = 0  # a number that no other adapter ever has, also none of the same name

    def num_shared(self, num_tokens: int) -> int:
        """How many of the first `num_tokens` of a sequence others may find."""
        return num_tokens if self.cache_salt is not None else num_tokens // TOKENS_PER_PART * TOKENS_PER_PART


class Match(NamedTuple):
    """`blocks` hold the first tokens, and the first `num_partial` tokens of `partial_block` are those that follow."""

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
        """The longest known beginning of `token_ids[:end]` that may be shared: whole blocks, and of one more."""
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
        return max(((num_equal(tokens, wanted), block) for tokens, block in neighbours), default=(0, -1))

    def insert(self, parent: Parent, tokens: Tokens, block: int) -> int:
        """Put a block below its parent, which is in the tree. A block that was there with fewer tokens moves.

        If another block begins with these tokens already, the tree keeps that one. Returns the block that it keeps.
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
    return next((place for place, (one, other) in enumerate(pairs) if one != other), min(len(tokens), len(others)))
