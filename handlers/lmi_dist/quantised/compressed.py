"""A weight in the layouts of compressed-tensors.

`pack-quantized`: words hold neighbouring inputs of one output: `weight_packed` (num_out, words of
num_in), `weight_shape` (2,), and zero points along the outputs: `weight_zero_point` (words of
num_out, num_groups). `int-quantized`: `weight` (num_out, num_in) and `weight_zero_point` are int8.
Both: `weight_scale` (num_out, num_groups), and perhaps `weight_g_idx` (num_in,), the group of each
input. Signed numbers are kept in words with half of their range added.
"""

from __future__ import annotations

import numpy as np

from handlers.lmi_dist.arrays import Array
from handlers.lmi_dist.quantised.parts import INT32, INT64, Parts
from handlers.lmi_dist.quantised.scheme import Scheme
from handlers.lmi_dist.quantised.weight import Floats, QuantisedWeight
from handlers.lmi_dist.quantised.words import Codes, num_words, unpacked

# What is known of activations is not used: they are not rounded so far here.
OF_ACTIVATIONS = (
    "input_scale",
    "input_zero_point",
    "output_scale",
    "output_zero_point",
)
OF_INTEGERS = ("weight_scale", "weight_zero_point", "weight_g_idx")
PACKED_PARTS = ("weight_packed", "weight_shape", *OF_INTEGERS)
INT8 = np.dtype(np.int8)
SIGN_BIT = np.uint8(0x80)


def read_packed(parts: Parts, scheme: Scheme) -> QuantisedWeight:
    """Return the weight in `parts` of `pack-quantized`. Raises ValueError."""
    words = parts.matrix("weight_packed", INT32)
    num_out, num_in = _shape(parts, words, scheme)

    return QuantisedWeight(
        shape=(num_out, num_in),
        num_bits=scheme.num_bits,
        read_codes=lambda: unpacked(words, scheme.num_bits)[:, :num_in],
        scales=_scales(parts, scheme, num_out, num_in),
        zero_points=_packed_zero_points(parts, scheme, num_out, num_in),
        groups=parts.groups("weight_g_idx", num_in, scheme),
    )


def read_integers(parts: Parts, scheme: Scheme) -> QuantisedWeight:
    """Return the weight in `parts` of `int-quantized`. Raises ValueError."""
    integers = parts.matrix("weight", INT8)
    num_out, num_in = integers.shape

    return QuantisedWeight(
        shape=(num_out, num_in),
        # So many has the type, whatever the configuration says of their range.
        num_bits=8,
        read_codes=lambda: _unsigned(integers),
        scales=_scales(parts, scheme, num_out, num_in),
        zero_points=_zero_points(parts, scheme, num_out, num_in),
        groups=parts.groups("weight_g_idx", num_in, scheme),
    )


def _shape(parts: Parts, words: Array, scheme: Scheme) -> tuple[int, int]:
    """Return what `weight_shape` says, which must be a shape that takes so many words."""
    stored = parts.integers("weight_shape", INT32, INT64)
    sizes = stored.reshape(-1).tolist()
    if len(sizes) == 2:
        num_out, num_in = sizes
        if words.shape == (num_out, num_words(num_in, scheme.num_bits)):
            return num_out, num_in

    raise ValueError(f"its part weight_shape is {sizes}, weight_packed has {words.shape} words")


def _scales(parts: Parts, scheme: Scheme, num_out: int, num_in: int) -> Floats:
    """Return the scales of each row, (num_out, num_groups)."""
    shape = (num_out, scheme.num_groups(num_in))
    if not scheme.is_of_tensor:
        return parts.scales("weight_scale", shape)

    scale = parts.scales("weight_scale", parts.take("weight_scale").shape)
    if scale.size != 1:
        raise ValueError(f"its part weight_scale has shape {scale.shape}, a tensor has one scale")

    return np.broadcast_to(scale.reshape(1, 1), shape)


def _packed_zero_points(parts: Parts, scheme: Scheme, num_out: int, num_in: int) -> Array:
    num_groups = scheme.num_groups(num_in)
    if not scheme.has_zero_points:
        return np.full((num_out, num_groups), 1 << (scheme.num_bits - 1))

    shape = (num_words(num_out, scheme.num_bits), num_groups)
    words = parts.words("weight_zero_point", shape)
    return unpacked(words.T, scheme.num_bits)[:, :num_out].T


def _zero_points(parts: Parts, scheme: Scheme, num_out: int, num_in: int) -> Array:
    shape = (num_out, scheme.num_groups(num_in))
    if not scheme.has_zero_points:
        return np.full(shape, SIGN_BIT)

    zero_points = parts.integers("weight_zero_point", INT8)
    if zero_points.size == 1 and scheme.is_of_tensor:
        zero_points = np.broadcast_to(zero_points.reshape(1, 1), shape)

    if zero_points.shape != shape:
        given = zero_points.shape
        raise ValueError(f"its part weight_zero_point has shape {given}, the others need {shape}")

    return _unsigned(zero_points)


def _unsigned(integers: Array) -> Codes:
    """Return numbers of int8 with half of their range added."""
    codes: Codes = np.ascontiguousarray(integers).view(np.uint8) ^ SIGN_BIT
    return codes
