"""Rotary position embeddings as one complex product.

Pairs of a head's channels are the real and imaginary parts of a number that turns with the position. Checkpoints keep
the two parts of a pair half a head apart; `interleave` brings the rows of query and key projections into neighbouring
order once, so that a step needs a single multiplication. Frequencies come from transformers, which knows every
scaling rule.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

log = logging.getLogger(__name__)

_FIXED_SCALINGS = ("linear", "llama3", "yarn", "longrope")


@dataclass(frozen=True)
class Rotary:
    """Turns of one pair per position, in radians, and a factor on the result. Channels past the pairs stand still."""

    frequencies: tuple[float, ...]
    factor: float = 1.0

    def table(self, max_length: int, head_dim: int, device: torch.device) -> Tensor:
        """Complex numbers of length `factor`, (max_length, head_dim / 2); 1 for channels that stand still."""
        angles = torch.arange(max_length).float()[:, None] * torch.tensor(self.frequencies)
        turns = torch.complex(angles.cos() * self.factor, angles.sin() * self.factor)
        still = torch.ones(max_length, head_dim // 2 - len(self.frequencies), dtype=turns.dtype)
        return torch.cat((turns, still), dim=1).to(device)

    def interleave(self, head_dim: int) -> Tensor:
        """The order of a head's channels in which the two parts of each pair are neighbours."""
        num_pairs = len(self.frequencies)
        pairs = torch.arange(2 * num_pairs).view(2, num_pairs).t().reshape(-1)
        return torch.cat((pairs, torch.arange(2 * num_pairs, head_dim)))


def rotary_of(config: Any, layer_types: Sequence[str], head_dim: int) -> tuple[tuple[Rotary | None, ...] | None, int]:
    """One Rotary for each layer, None if a scaling rule is unknown; and the context length that they are good for.

    Rules whose frequencies grow with the sequence (dynamic, longrope) would let a sequence change its own past and
    its neighbours: the context ends where their first stage does.
    """
    parameters = config.rope_parameters
    is_by_type = "rope_theta" not in parameters
    context_length = config.max_position_embeddings
    by_type: dict[str, Rotary] = {}
    for kind in sorted(set(layer_types)):
        chosen = parameters[kind] if is_by_type else parameters
        rotary = _rotary(config, chosen, kind if is_by_type else None, head_dim)
        if rotary is None:
            return None, context_length
        by_type[kind] = rotary
        if chosen["rope_type"] in ("dynamic", "longrope"):
            context_length = min(context_length, _first_stage(config, chosen))
    return tuple(by_type[kind] for kind in layer_types), context_length


def _first_stage(config: Any, parameters: dict[str, Any]) -> int:
    length = parameters.get("original_max_position_embeddings") or getattr(
        config, "original_max_position_embeddings", None
    )
    if length is not None and length < config.max_position_embeddings:
        log.warning("the context ends at %d tokens: %s scaling beyond it is not built", length, parameters["rope_type"])
    return length or config.max_position_embeddings


def _rotary(config: Any, parameters: dict[str, Any], layer_type: str | None, head_dim: int) -> Rotary | None:
    kind = parameters["rope_type"]
    if kind in _FIXED_SCALINGS:
        keywords = {} if layer_type is None else {"layer_type": layer_type}
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), **keywords)
        return Rotary(tuple(frequencies.tolist()), float(factor))
    if kind not in ("default", "dynamic"):
        return None
    num_channels = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
    powers = torch.arange(0, num_channels, 2, dtype=torch.float) / num_channels
    return Rotary(tuple((1.0 / parameters["rope_theta"] ** powers).tolist()))
