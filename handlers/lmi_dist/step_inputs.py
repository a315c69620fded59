"""What a model that torch runs gets for one step: its rows, which are the tokens of all chunks of
the plan, in their order.
"""

from dataclasses import dataclass

from torch import Tensor

from handlers.lmi_dist.attention import Attention


@dataclass(frozen=True, slots=True)
class AdaptedRows:
    """The rows of a step that have one adapter."""

    # The number of the adapter.
    adapter: int
    rows: Tensor  # (num_rows,)
    # (num_wanted,): places among the wanted rows
    wanted: Tensor


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The rows of a step, and the attention that reads and writes their keys and values."""

    token_ids: Tensor  # (rows,)
    positions: Tensor  # (rows,)
    # (num_wanted,): the rows whose logits are wanted
    wanted: Tensor
    attention: Attention
    # One for each adapter of the step.
    adapted: tuple[AdaptedRows, ...] = ()
