"""The interface of a model: a function of the tensors of one step. It knows no layer and no checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from handlers.lmi_dist.attention import View


@dataclass(slots=True)
class StepTensors:
    """The tensors of one step. Rows past `num_tokens` are padding and leave no keys and values."""

    token_ids: Tensor  # (rows,)
    positions: Tensor  # (rows,)
    num_tokens: int
    cells: Tensor  # the cells of keys and values, see KvSlots.cell_indices
    views: Mapping[int | None, View]  # by window
    wanted: Tensor  # (num_wanted,): rows whose logits are asked for
    queries: Tensor | None  # zeros (rows, padded group, kv_heads, head_dim) for the queries, if groups are padded


class Model(Protocol):
    """A decoder on its device, with its weights."""

    def __call__(self, step: StepTensors) -> Tensor:
        """Logits of the wanted rows, float32 (num_wanted, vocab_size)."""
