"""The interface of a model: a function of one step. It knows no layer and no checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from handlers.lmi_dist.attention import Attention


@dataclass(frozen=True, slots=True)
class AdaptedRows:
    """The rows of one adapter."""

    adapter: int
    rows: Tensor  # (num_rows,)
    wanted: Tensor  # (num_wanted,): places among the wanted rows


@dataclass(frozen=True, slots=True)
class Step:
    """The rows of one step are the tokens of all its chunks."""

    token_ids: Tensor  # (rows,)
    positions: Tensor  # (rows,)
    wanted: Tensor  # (num_wanted,): rows whose logits are asked for
    attention: Attention
    adapted: tuple[AdaptedRows, ...] = ()


class Model(Protocol):
    """A decoder on its device, with its weights."""

    def __call__(self, step: Step) -> Tensor:
        """Logits of the wanted rows, float32 (num_wanted, vocab_size)."""

    def output(self, name: str) -> Tensor | None:
        """The wanted rows of a declared output in the last step, (num_wanted, …); None if there are no such rows."""
