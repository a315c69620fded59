"""Some rows of the logits of a step."""

from __future__ import annotations

from torch import Tensor


def take_rows(logits: Tensor, rows: list[int]) -> Tensor:
    """These rows of `logits` (num_logits, vocab), (num_rows, vocab). If they are all rows in order, none is copied."""
    return logits if rows == list(range(len(logits))) else logits[rows]
