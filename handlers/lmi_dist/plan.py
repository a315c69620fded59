"""What the scheduler asks of the model runner in one step. Plain Python, no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Chunk:
    """A run of consecutive tokens of one sequence, computed in one step.

    A decode is a chunk of one token; a prompt comes in chunks cut at fixed positions (multiples of the chunk length),
    so that its bits do not depend on the load. Keys and values of positions 0..start are in cache slot `slot` already,
    or are written by an earlier chunk of the same plan.
    """

    slot: int
    start: int
    token_ids: list[int]
    num_logits: int = 1  # wanted for the last n tokens: 0 inside a prompt, 1 at its end, all for prompt log-probs

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
