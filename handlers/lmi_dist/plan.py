"""What the scheduler asks of the model runner in one step. Plain Python, no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Piece:
    """A run of consecutive tokens of one sequence, computed in one step.

    A decode is a piece of one token; a prompt comes in pieces cut at fixed positions (multiples of the piece length),
    so that its bits do not depend on the load. Keys and values of positions 0..start are in cache slot `slot` already,
    or are written by an earlier piece of the same plan.
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
    """Decode pieces first, in order of slots, then prompt pieces."""

    decodes: list[Piece]
    prefills: list[Piece]

    @property
    def pieces(self) -> list[Piece]:
        return self.decodes + self.prefills
