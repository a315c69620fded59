"""Beam search: each beam has its tokens, their log-probs, and why it ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Beam:
    tokens: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    # The logits from which its tokens were chosen
    rows: tuple[Tensor, ...] = ()
    # A FinishReason once it has ended
    reason: Any = None

    @property
    def sum(self) -> float:
        return sum(self.log_probs)


@dataclass
class BeamSearch:
    """`reason_after` says why a beam with these tokens ends, or None."""

    width: int
    length_penalty: float
    early_stopping: int
    reason_after: Callable[[tuple[int, ...]], Any]
    running: list[Beam] = field(default_factory=lambda: [Beam()])
    finished: list[Beam] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return not self.running

    def advance(self, row_after: Callable[[tuple[int, ...]], tuple[Tensor, Tensor]]) -> None:
        """Give each running beam its next token. `row_after` returns a beam's logits before and
        after all rules.
        """
        candidates = [
            candidate
            for beam in self.running
            for candidate in self._continued(beam, *row_after(beam.tokens))
        ]
        candidates.sort(key=lambda beam: beam.sum, reverse=True)
        best = candidates[: self.width]
        self.finished += [beam for beam in best if beam.reason is not None]
        self.running = [beam for beam in candidates if beam.reason is None][: self.width]
        self.finished = sorted(self.finished, key=self._score, reverse=True)[: self.width]
        if self._is_settled():
            self.running = []

    def best(self, num: int) -> list[Beam]:
        return sorted(self.finished + self.running, key=self._score, reverse=True)[:num]

    def _continued(self, beam: Beam, logits: Tensor, row: Tensor) -> list[Beam]:
        values, ids = row.log_softmax(-1).topk(min(2 * self.width, int(row.isfinite().sum())))
        return [
            Beam(
                tokens := (*beam.tokens, int(token)),
                (*beam.log_probs, float(value)),
                (*beam.rows, logits),
                self.reason_after(tokens),
            )
            for token, value in zip(ids, values, strict=True)
        ]

    def _is_settled(self) -> bool:
        if len(self.finished) < self.width or not self.running:
            return False

        return self.early_stopping == 1 or self._score(self.running[0]) <= self._score(
            self.finished[-1]
        )

    def _score(self, beam: Beam) -> float:
        return beam.sum / float(max(1, len(beam.tokens))) ** self.length_penalty
