"""The plan of one step, which the scheduler gives the model runner. Plain Python, no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec


class Chunk(msgspec.Struct):
    """Consecutive tokens of one sequence, computed in one step.

    A decode is a chunk of one token and, behind it, perhaps a draft of the next ones. The keys and values of positions
    before `start` are in the cache already. Position p lies in block `table[p // tokens_per_block]`; a runner that does
    not share blocks uses slot `slot` instead.
    """

    slot: int
    start: int
    token_ids: list[int]
    num_logits: int = 1  # logits of the last n tokens: 0 inside a prompt, 1 at its end, all for prompt log-probs
    table: list[int] = []  # blocks of the sequence, at least up to `end`; not to be changed
    adapter: int = 0  # the number by which the runner knows it; 0: none

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(slots=True)
class Plan:
    """Decode chunks first, in order of slots, then prompt chunks. A sequence has at most one chunk.

    For a runner that shares blocks, decodes are in order of adapters first, so that those of one are neighbours.

    A runner that shares blocks first copies whole blocks, in the order of `copies`.
    """

    decodes: list[Chunk]
    prefills: list[Chunk]
    copies: list[tuple[int, int]] = field(default_factory=list)  # from block, to block

    @property
    def chunks(self) -> list[Chunk]:
        return self.decodes + self.prefills


def num_tokens_of(chunks: Iterable[Chunk]) -> int:
    return sum(len(chunk.token_ids) for chunk in chunks)
