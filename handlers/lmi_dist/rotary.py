"""Rotary position embeddings: the angles by which pairs of a head's channels rotate.

The two parts of a pair are half of the rotated channels apart, as in checkpoints. Frequencies come from transformers,
which knows every scaling rule.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from handlers.lmi_dist.arrays import Array

log = logging.getLogger(__name__)

_FIXED_SCALINGS = ("linear", "llama3", "yarn", "longrope")


@dataclass(frozen=True)
class Rotary:
    """The angle of each pair per position, in radians, and a factor on the result. Other channels do not change."""

    frequencies: tuple[float, ...]
    factor: float = 1.0

    def rotations(self, max_length: int) -> Array:
        """Cosines and sines of every position times `factor`, (max_length, 2, num_pairs)."""
        angles = torch.arange(max_length).float()[:, None] * torch.tensor(self.frequencies)
        return (torch.stack((angles.cos(), angles.sin()), dim=1) * self.factor).numpy()


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
            why = "the context ends at %d tokens: beyond it %s scaling would change the keys of earlier tokens"
            log.warning(why, first_stage, rule)
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
