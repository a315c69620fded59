"""Quantised weights as the blocks that our kernels multiply by as they are.

A block has 32 inputs of a row, with one scale and one zero point. Whole numbers and zero points are
kept exactly. So is a scale that is float16 or bfloat16; of one in float32 the kernels keep 15 bits
of the fraction, so a weight moves by a 65,536th of itself at most.
"""

from __future__ import annotations

import numpy as np

from handlers.lmi_dist.arrays import Array
from handlers.lmi_dist.gguf.block_rows import BlockRows
from handlers.lmi_dist.gguf.blocks import ZERO4, ZERO8
from handlers.lmi_dist.quantised.weight import QuantisedWeight
from handlers.lmi_dist.quantised.words import Codes
from lmi.shared.gguf_file import TensorType

# The inputs of a block.
BLOCK = 32
# What makes eight bits with a sign of eight without.
SIGN_BIT = np.uint8(0x80)


def type_of(weight: QuantisedWeight) -> TensorType | None:
    """Return the type of the blocks that hold a weight, or None if none does: inputs of one block
    are of different groups.
    """
    if _groups_of_blocks(weight) is None:
        return None

    return ZERO4 if weight.num_bits == 4 else ZERO8


def blocks_of(weight: QuantisedWeight) -> BlockRows | None:
    """Return a weight in blocks, or None if none hold it."""
    groups = _groups_of_blocks(weight)
    if groups is None:
        return None

    codes = weight.read_codes()
    zero_points: Codes = weight.zero_points[:, groups].astype(np.uint8)
    if weight.num_bits == 4:
        kind = ZERO4
        numbers = _nibbles(codes)
    else:
        kind = ZERO8
        zero_points ^= SIGN_BIT
        numbers = codes.reshape(len(codes), -1, BLOCK) ^ SIGN_BIT

    scales = np.ascontiguousarray(weight.scales[:, groups], np.float32)
    blocks = np.empty((*scales.shape, kind.num_bytes), np.uint8)
    blocks[:, :, 0:4] = scales[:, :, None].view(np.uint8)
    blocks[:, :, 4] = zero_points
    blocks[:, :, 5:] = numbers
    return BlockRows(kind, blocks.reshape(len(codes), -1))


def _groups_of_blocks(weight: QuantisedWeight) -> Array | None:
    """Return the group of each block of a row, or None if blocks share no group."""
    _, num_in = weight.shape
    if num_in % BLOCK:
        return None

    groups = weight.groups.reshape(-1, BLOCK)
    firsts = groups[:, 0]
    return firsts if (groups == firsts[:, None]).all() else None


def _nibbles(codes: Codes) -> Codes:
    """Return the bytes of blocks, (num_out, num_blocks, 16): the first half of a block has the low
    bits, the second half the high bits.
    """
    by_half = codes.reshape(len(codes), -1, 2, BLOCK // 2)
    return by_half[:, :, 0] | by_half[:, :, 1] << np.uint8(4)
