"""The plan of one step, which the scheduler gives a runner. No torch."""

from collections.abc import Iterable
from typing import NamedTuple

import msgspec
from msgspec import Struct, field


class Chunk(msgspec.Struct):
    """Consecutive tokens of one sequence, computed in one step.

    A decode is a chunk of one token and, behind it, perhaps a draft of the next ones. The keys and
    values of the positions before `start` are in the cache already. A runner that reads blocks
    finds position p in block `table[p // tokens_per_block]`, a runner with slots in slot `slot`.
    """

    slot: int
    # The position of the first token.
    start: int
    token_ids: list[int]
    # How many of the last tokens have logits: none inside a prompt, one at its end, and all of a
    # chunk whose prompt log-probs are wanted.
    num_logits: int = 1
    # The blocks of the sequence, at least up to `end`. They must not be changed.
    table: list[int] = []
    # The number by which the runner knows the adapter, or 0 for none.
    adapter: int = 0

    @property
    def end(self) -> int:
        """The position behind its last token."""
        return self.start + len(self.token_ids)


class BlockCopy(NamedTuple):
    """A block of the cache that is copied into another one before the step."""

    source: int
    target: int


class Plan(Struct):
    """The chunks of a step, of each sequence one at most.

    Decodes are in the order of their slots. For a runner that reads blocks, those with one adapter
    are neighbours, and in the order of slots among themselves.
    """

    decodes: list[Chunk]
    # The chunks of prompts.
    prefills: list[Chunk]
    # They are made first, in this order.
    copies: list[BlockCopy] = field(default_factory=list)

    @property
    def chunks(self) -> list[Chunk]:
        """All chunks, in the order of the step's rows: decodes first."""
        return self.decodes + self.prefills


def num_tokens_of(chunks: Iterable[Chunk]) -> int:
    """Return how many tokens chunks have together."""
    return sum(len(chunk.token_ids) for chunk in chunks)
