"""The interface of a model: a function of one step. It knows no layer and no checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from handlers.lmi_dist.attention import Attention


@dataclass(frozen=True, slots=True)
class Step:
    """The rows of one step are the tokens of all its chunks."""

    token_ids: Tensor  # (rows,)
    positions: Tensor  # (rows,)
    wanted: Tensor  # (num_wanted,): rows whose logits are asked for
    attention: Attention


class Model(Protocol):
    """A decoder on its device, with its weights."""

    def __call__(self, step: Step) -> Tensor:
        """Logits of the wanted rows, float32 (num_wanted, vocab_size)."""
