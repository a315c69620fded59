"""The plan of one step, which the scheduler gives the model runner. Plain Python, no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Chunk:
    """Consecutive tokens of one sequence, computed in one step.

    A decode is a chunk of one token. A prompt comes in chunks cut at fixed positions (multiples of the chunk length),
    so that its bits do not depend on the load. The keys and values of positions before `start` are in cache slot `slot`
    already, or an earlier chunk of the same plan writes them.
    """

    slot: int
    start: int
    token_ids: list[int]
    num_logits: int = 1  # logits of the last n tokens: 0 inside a prompt, 1 at its end, all for prompt log-probs

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(slots=True)
class Plan:
    """Decode chunks first, in order of slots, then prompt chunks."""

    decodes: list[Chunk]
    prefills: list[Chunk]

    @property
    def chunks(self) -> list[Chunk]:
        return self.decodes + self.prefills
