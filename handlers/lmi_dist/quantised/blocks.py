"""Quantised weights as the blocks that our kernels multiply by as they are.

A block has 32 inputs of a row, with one scale and, in Q4_1, one minimum in float16. Of four bits
it is Q4_1, whose minimum is that of the zero point; of eight bits it is Q8_0, which has no zero
point. Whole numbers are kept exactly. A scale that is not float16 already is rounded to it, and so
is a minimum. So a weight moves by a sixty-eighth of the largest step of its row at most (four
bits), or by a sixteenth (eight bits).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from handlers.lmi_dist.arrays import Array
from handlers.lmi_dist.gguf.block_rows import BlockRows
from handlers.lmi_dist.quantised.weight import Floats, QuantisedWeight
from handlers.lmi_dist.quantised.words import Codes
from lmi.shared.gguf_file import TENSOR_TYPES, TensorType

TYPES = {kind.name: kind for kind in TENSOR_TYPES.values()}
Q4_1 = TYPES["Q4_1"]
Q8_0 = TYPES["Q8_0"]

# The inputs of a block.
BLOCK = 32
# The zero point of eight bits with a sign, once half of their range is added.
MIDDLE = 128
# A float16 that is not too small has this relative error at most.
HALF_PRECISION = 2.0**-11
# The largest zero point of four bits.
MAX_ZERO_POINT = 15


class _Halves(NamedTuple):
    """What the blocks of each row have in float16, (num_out, num_blocks) each."""

    scales: Array
    minima: Array


def type_of(weight: QuantisedWeight) -> TensorType | None:
    """Return the type of the blocks that hold a weight, or None if none does."""
    if _halves_of(weight) is None:
        return None

    return _type_of_bits(weight)


def blocks_of(weight: QuantisedWeight) -> BlockRows | None:
    """Return a weight in blocks, or None if none hold it."""
    halves = _halves_of(weight)
    if halves is None:
        return None

    kind = _type_of_bits(weight)
    codes = weight.read_codes()
    num_out, num_in = weight.shape
    blocks = np.empty((num_out, num_in // BLOCK, kind.num_bytes), np.uint8)
    blocks[:, :, 0:2] = _as_bytes(halves.scales)
    if kind is Q4_1:
        blocks[:, :, 2:4] = _as_bytes(halves.minima)
        blocks[:, :, 4:] = _nibbles(codes)
    else:
        blocks[:, :, 2:] = codes.reshape(num_out, -1, BLOCK) ^ MIDDLE

    return BlockRows(kind, blocks.reshape(num_out, -1))


def _type_of_bits(weight: QuantisedWeight) -> TensorType:
    return Q4_1 if weight.num_bits == 4 else Q8_0


def _halves_of(weight: QuantisedWeight) -> _Halves | None:
    """Return the scales and minima of a weight's blocks, or None if no blocks hold the weight."""
    groups = _groups_of_blocks(weight)
    if groups is None:
        return None

    scales = weight.scales[:, groups]
    zero_points = weight.zero_points[:, groups]
    if weight.num_bits == 4:
        return _rounded(scales, zero_points)

    return _rounded(scales, np.zeros_like(zero_points)) if (zero_points == MIDDLE).all() else None


def _groups_of_blocks(weight: QuantisedWeight) -> Array | None:
    """Return the group of each block of a row, or None if blocks share no group."""
    _, num_in = weight.shape
    if num_in % BLOCK:
        return None

    groups = weight.groups.reshape(-1, BLOCK)
    firsts = groups[:, 0]
    return firsts if (groups == firsts[:, None]).all() else None


def _rounded(scales: Floats, zero_points: Array) -> _Halves | None:
    """Return scales and minima in float16, or None if one is too far from what it is exactly."""
    largest = np.abs(scales).max(axis=1, keepdims=True, initial=0)
    limit = HALF_PRECISION * largest
    # What is too large has an error that is infinite, or no number.
    with np.errstate(over="ignore", invalid="ignore"):
        halves = scales.astype(np.float16)
        minima = -zero_points.astype(np.float32) * halves
        rounded_minima = minima.astype(np.float16)
        are_scales_near = np.abs(scales - halves) <= limit
        are_minima_near = np.abs(minima - rounded_minima) <= MAX_ZERO_POINT * limit

    is_near = are_scales_near & are_minima_near
    return _Halves(halves, rounded_minima) if is_near.all() else None


def _as_bytes(halves: Array) -> Array:
    """Return the two bytes of each float16, (num_out, num_blocks, 2)."""
    return np.ascontiguousarray(halves)[:, :, None].view(np.uint8)


def _nibbles(codes: Codes) -> Codes:
    """Return the bytes of blocks, (num_out, num_blocks, 16): the first half of a block has the low
    bits, the second half the high bits.
    """
    by_half = codes.reshape(len(codes), -1, 2, BLOCK // 2)
    return by_half[:, :, 0] | by_half[:, :, 1] << np.uint8(4)
