"""Rotary position embeddings as one complex product.

A pair of a head's channels is a complex number that rotates with the position. Checkpoints keep the two parts of a pair
half a head apart. `interleave` gives the order in which they are neighbours; the rows of query and key projections are
reordered once, so that a step needs a single multiplication. Frequencies come from transformers, which knows every
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
    """The angle of each pair per position, in radians, and a factor on the result. Other channels do not change."""

    frequencies: tuple[float, ...]
    factor: float = 1.0

    def table(self, max_length: int, head_dim: int, device: torch.device) -> Tensor:
        """Complex numbers of length `factor`, (max_length, head_dim / 2); 1 for channels that do not change."""
        angles = torch.arange(max_length).float()[:, None] * torch.tensor(self.frequencies)
        rotations = torch.complex(angles.cos() * self.factor, angles.sin() * self.factor)
        unrotated = torch.ones(max_length, head_dim // 2 - len(self.frequencies), dtype=rotations.dtype)
        return torch.cat((rotations, unrotated), dim=1).to(device)

    def interleave(self, head_dim: int) -> Tensor:
        """The order (head_dim,) of a head's channels in which the two parts of each pair are neighbours."""
        num_pairs = len(self.frequencies)
        pairs = torch.arange(2 * num_pairs).view(2, num_pairs).t().reshape(-1)
        return torch.cat((pairs, torch.arange(2 * num_pairs, head_dim)))


def rotaries_of(config: Any, layer_types: Sequence[str], head_dim: int) -> tuple[Rotary, ...] | None:
    """One Rotary for each layer, or None if a scaling rule is unknown."""
    by_type: dict[str, Rotary] = {}
    for kind, parameters in _parameters(config, layer_types).items():
        is_shared = "rope_theta" in config.rope_parameters
        rotary = _rotary(config, parameters, None if is_shared else kind, head_dim)
        if rotary is None:
            return None
        by_type[kind] = rotary
    return tuple(by_type[kind] for kind in layer_types)


def stable_context_length(config: Any) -> int:
    """The largest number of tokens of a sequence.

    The frequencies of some rules (dynamic, longrope) change with the length of the sequence. They would then also apply
    to its cached keys and to its neighbours in the batch, so with them the context ends with their first stage.
    """
    longest: int = config.max_position_embeddings
    if not getattr(config, "rope_parameters", None):
        return longest
    for parameters in _parameters(config, getattr(config, "layer_types", None) or [""]).values():
        if parameters.get("rope_type") not in ("dynamic", "longrope"):
            continue
        first_stage = parameters.get("original_max_position_embeddings")
        first_stage = first_stage or getattr(config, "original_max_position_embeddings", None) or longest
        if first_stage < longest:
            rule = parameters["rope_type"]
            log.warning("the context ends at %d tokens: %s scaling beyond it is not built", first_stage, rule)
            longest = first_stage
    return longest


def _parameters(config: Any, layer_types: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The rope parameters of each type of layer. In most models they are the same for all types."""
    parameters = config.rope_parameters
    if "rope_theta" in parameters or "rope_type" in parameters:
        return dict.fromkeys(sorted(set(layer_types)), parameters)
    return {kind: parameters[kind] for kind in sorted(set(layer_types)) if parameters.get(kind)}


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
