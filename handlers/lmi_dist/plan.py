"""The plan of one step, which the scheduler gives a runner. No torch."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec


class Chunk(msgspec.Struct):
    """Consecutive tokens of one sequence, computed in one step.

    A decode is a chunk of one token and, behind it, perhaps a draft of the next ones. The keys and
    values of positions before `start` are in the cache already. Position p lies in block `table[p
    // tokens_per_block]`, or in slot `slot` of a runner that has slots.
    """

    slot: int
    start: int
    token_ids: list[int]
    # Only the last tokens have logits: none inside a prompt, one at its end, and all of a chunk
    # whose prompt log-probs are wanted.
    num_logits: int = 1
    # The blocks of the sequence, at least up to `end`. They must not be changed.
    table: list[int] = []
    # The number by which the runner knows the adapter, or 0 for none.
    adapter: int = 0

    @property
    def end(self) -> int:
        """The position behind its last token."""
        return self.start + len(self.token_ids)


@dataclass(slots=True)
class Plan:
    """Decode chunks first, in order of slots, then prompt chunks. A sequence has at most one chunk.

    For a runner that reads blocks, decodes are in order of adapters first, so that those of one are
    neighbours. It first copies whole blocks, in the order of `copies`.
    """

    decodes: list[Chunk]
    prefills: list[Chunk]
    # Pairs of blocks: copied from, copied to.
    copies: list[tuple[int, int]] = field(default_factory=list)

    @property
    def chunks(self) -> list[Chunk]:
        """All chunks, in the order of the step's rows."""
        return self.decodes + self.prefills


def num_tokens_of(chunks: Iterable[Chunk]) -> int:
    """Return how many tokens chunks have together."""
    return sum(len(chunk.token_ids) for chunk in chunks)
