"""Rotary position embeddings: the angles by which pairs of a head's channels rotate.

The two parts of a pair are half of the rotated channels apart, as in checkpoints. Frequencies
follow transformers: float32, in its order of operations. Powers, cosines and sines are float64 and
then rounded: no machine changes them.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from handlers.lmi_dist.arrays import Array

log = logging.getLogger(__name__)


class Rotary(Struct, frozen=True):
    """The rotation of a head's channels. Those that have no pair do not change."""

    # By pair, in radians per position.
    frequencies: tuple[float, ...]
    # Of cosines and sines.
    factor: float = 1.0

    def rotations(self, max_length: int) -> Array:
        """Return cosines and sines of every position times `factor`, float32 (max_length, 2,
        num_pairs).
        """
        frequencies = np.array(self.frequencies, np.float32)
        positions = np.arange(max_length, dtype=np.float32)
        angles = positions[:, None] * frequencies

        table = np.empty((max_length, 2, len(frequencies)), np.float32)
        cosines = table[:, 0]
        sines = table[:, 1]
        np.cos(angles, out=cosines, dtype=np.float64, casting="same_kind")
        np.sin(angles, out=sines, dtype=np.float64, casting="same_kind")
        table *= np.float32(self.factor)
        return table


def _parameters(config: Any, layer_types: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the rope parameters of each type of layer.

    In most models they are the same for all types.
    """
    parameters = config.rope_parameters
    if _is_shared(parameters):
        return dict.fromkeys(sorted(set(layer_types)), parameters)

    return {kind: parameters[kind] for kind in sorted(set(layer_types)) if parameters.get(kind)}


def _is_shared(parameters: Mapping[str, Any]) -> bool:
    """Whether these are the parameters of all layers, and not a table by types of layers."""
    return "rope_theta" in parameters or "rope_type" in parameters


def _original_length(config: Any, parameters: Mapping[str, Any]) -> int:
    """Return the context before it was made longer, in tokens.

    Where all layers share the parameters, the configuration's own value goes before theirs.
    """
    name = "original_max_position_embeddings"
    length: int | None = None
    if _is_shared(config.rope_parameters):
        length = getattr(config, name, None)

    return length or parameters.get(name) or config.max_position_embeddings


def _num_channels(parameters: Mapping[str, Any], head_dim: int) -> int:
    """Return how many channels of a head rotate."""
    return int(head_dim * parameters.get("partial_rotary_factor", 1.0))


def _radian_lengths(parameters: Mapping[str, Any], head_dim: int) -> Array:
    """Return the positions in which each pair turns by one radian without scaling, float32
    (num_pairs,).
    """
    num_channels = _num_channels(parameters, head_dim)
    channels = np.arange(0, num_channels, 2, dtype=np.float32)
    powers = channels / num_channels
    theta = np.float32(parameters["rope_theta"])
    lengths = np.power(theta, powers, dtype=np.float64)
    return lengths.astype(np.float32)


def _rotary(frequencies: Array, factor: float = 1.0) -> Rotary:
    return Rotary(tuple(frequencies.tolist()), float(factor))


# The rules. Each takes a configuration, the rope parameters of a layer and the width of a head.


def _default(config: Any, parameters: Mapping[str, Any], head_dim: int) -> Rotary:
    return _rotary(1 / _radian_lengths(parameters, head_dim))


def _linear(config: Any, parameters: Mapping[str, Any], head_dim: int) -> Rotary:
    """Every rotation is slowed by `factor`."""
    return _rotary(1 / _radian_lengths(parameters, head_dim) / parameters["factor"])


def _llama3(config: Any, parameters: Mapping[str, Any], head_dim: int) -> Rotary:
    """Slow rotations are slowed further by `factor`, fast ones stay, and those between
    are mixed.
    """
    frequencies = 1 / _radian_lengths(parameters, head_dim)
    factor = parameters["factor"]
    low = parameters["low_freq_factor"]
    high = parameters["high_freq_factor"]
    length = _original_length(config, parameters)

    # The positions in which each pair turns once.
    turn_lengths = 1 / frequencies * (2 * math.pi)
    share = (1 / turn_lengths * length - low) / (high - low)
    mixed = (1 - share) * frequencies / factor + share * frequencies

    slow = np.where(turn_lengths > length / low, frequencies / factor, mixed)
    return _rotary(np.where(turn_lengths < length / high, frequencies, slow))


def _yarn(config: Any, parameters: Mapping[str, Any], head_dim: int) -> Rotary:
    """As llama3, mixed by a ramp over the pairs that turn `beta_fast` to `beta_slow` times in the
    context.
    """
    length = _original_length(config, parameters)
    factor = parameters.get("factor") or config.max_position_embeddings / length
    radian_lengths = _radian_lengths(parameters, head_dim)
    share = 1 - _yarn_ramp(parameters, length, head_dim)
    frequencies = 1 / (factor * radian_lengths) * (1 - share) + 1 / radian_lengths * share
    return _rotary(frequencies, _yarn_attention_factor(parameters, factor))


def _yarn_ramp(parameters: Mapping[str, Any], length: int, head_dim: int) -> Array:
    """Return how much each pair is slowed, from 0 to 1, float32 (num_pairs,), where the context was
    `length` tokens.
    """
    theta = parameters["rope_theta"]
    num_channels = _num_channels(parameters, head_dim)

    def pair(num_turns: float) -> float:
        """The number of the pair that turns so often in the context, between two whole ones."""
        return num_channels * math.log(length / (num_turns * 2 * math.pi)) / (2 * math.log(theta))

    first = pair(parameters.get("beta_fast") or 32)
    last = pair(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        first = math.floor(first)
        last = math.ceil(last)

    first = max(first, 0)
    last = min(last, num_channels - 1)
    if first == last:
        last = last + 0.001

    pairs = np.arange(num_channels // 2, dtype=np.float32)
    ramp: Array = ((pairs - first) / (last - first)).clip(0, 1)
    return ramp


def _yarn_attention_factor(parameters: Mapping[str, Any], factor: float) -> float:
    """Return the factor of cosines and sines where the context was made longer by `factor`."""
    attention_factor: float | None = parameters.get("attention_factor")
    if attention_factor is not None:
        return attention_factor

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    weight = parameters.get("mscale")
    all_weight = parameters.get("mscale_all_dim")
    if weight and all_weight:
        return scale(weight) / scale(all_weight)

    return scale(1)


def _longrope(config: Any, parameters: Mapping[str, Any], head_dim: int) -> Rotary:
    """Every pair has its own factor. Those of the first stage count."""
    length = _original_length(config, parameters)
    factor = parameters.get("factor") or config.max_position_embeddings / length
    factors = np.array(parameters["short_factor"], np.float32)
    frequencies = 1 / (factors * _radian_lengths(parameters, head_dim))

    attention_factor = parameters.get("attention_factor")
    if attention_factor is not None:
        return _rotary(frequencies, attention_factor)

    if factor <= 1:
        return _rotary(frequencies)

    return _rotary(frequencies, math.sqrt(1 + math.log(factor) / math.log(length)))


RULES: dict[str, Callable[[Any, Mapping[str, Any], int], Rotary]] = {
    "default": _default,
    # Sequences end with its first stage, which is the default rule.
    "dynamic": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
"""What makes the Rotary of a layer, by the type that its rope parameters name."""


def rotaries_of(
    config: Any, layer_types: Sequence[str], head_dim: int
) -> tuple[Rotary, ...] | None:
    """Return a Rotary for each layer, or None if a scaling rule is unknown.

    `layer_types` has the type of each layer, and heads have `head_dim` channels.
    """
    by_type: dict[str, Rotary] = {}
    for kind, parameters in _parameters(config, layer_types).items():
        rule = RULES.get(parameters["rope_type"])
        if rule is None:
            return None

        by_type[kind] = rule(config, parameters, head_dim)

    return tuple(by_type[kind] for kind in layer_types)


def stable_context_length(config: Any) -> int:
    """Return the largest number of tokens of a sequence.

    The frequencies of some rules (dynamic, longrope) change with the length of the sequence. They
    would then also apply to its cached keys and to its neighbours in the batch, so with them the
    context ends with their first stage.
    """
    longest: int = config.max_position_embeddings
    if not getattr(config, "rope_parameters", None):
        return longest

    layer_types = getattr(config, "layer_types", None) or [""]
    for parameters in _parameters(config, layer_types).values():
        if parameters.get("rope_type") not in ("dynamic", "longrope"):
            continue

        first_stage = _original_length(config, parameters)
        if first_stage < longest:
            log.warning(
                "the context ends at %d tokens: "
                "beyond it %s scaling would change the keys of earlier tokens",
                first_stage,
                parameters["rope_type"],
            )
            longest = first_stage

    return longest
