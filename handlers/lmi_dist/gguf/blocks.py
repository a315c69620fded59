"""The numbers in the blocks of GGUF's tensors, and in two types of blocks of our own, in float32.

A block holds the next elements of a row as small whole numbers q, with the scales that they share.
Every function takes blocks as rows of bytes, (num_blocks, bytes of one), and gives float32,
(num_blocks, elements of one). Source: `ggml-common.h` and `ggml-quants.c` of ggml; the products are
rounded in the order in which its own reader `gguf.dequantize` does it, so the bits are equal.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from lmi.shared.gguf_file import TensorType

ZERO4 = TensorType("ZERO4", 32, 21)
"""Numbers q of four bits that no file has in blocks: a scale in float32, a byte z, then the bits of
q as in Q4_0. A number is d * (q - z).
"""
ZERO8 = TensorType("ZERO8", 32, 37)
"""The same of eight bits: z and q have a sign."""

# Arrays of uint8.
Bytes: TypeAlias = npt.NDArray[Any]
Floats: TypeAlias = npt.NDArray[np.float32]

# The arrays in between take some MB, however large a tensor is.
BLOCKS_AT_A_TIME = 1 << 15
# The elements of a block that is no super-block, and of each part of most super-blocks.
SMALL = 32
# The elements of a super-block.
LARGE = 256
# The bytes of a float16.
HALF_BYTES = 2
# The bytes of the eight scales and eight minima of a super-block.
PACKED_SCALES = 12

IQ4_VALUES = np.array(
    (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), np.float32
)


def dequantise(data: Bytes, kind: TensorType) -> Floats:
    """Return the numbers of a tensor in their order, (num_elements,), from its bytes, (num_bytes,).

    `kind` is a type with blocks: one of `DEQUANTISE`.
    """
    blocks = data.reshape(-1, kind.num_bytes)
    numbers = np.empty((len(blocks), kind.num_elements), np.float32)
    read_blocks = DEQUANTISE[kind.name]
    for start in range(0, len(blocks), BLOCKS_AT_A_TIME):
        part = slice(start, start + BLOCKS_AT_A_TIME)
        numbers[part] = read_blocks(blocks[part])

    return numbers.reshape(-1)


def _halves(blocks: Bytes, first: int) -> Floats:
    """Return the float16 at byte `first` of each block, (num_blocks, 1)."""
    two_bytes = np.ascontiguousarray(blocks[:, first : first + HALF_BYTES])
    return two_bytes.view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """Return four bits in each byte, (num_blocks, 2 * bytes): first the low ones of all bytes, then
    the high ones.
    """
    return np.concatenate((packed & 0x0F, packed >> 4), axis=1)


def _fifth_bits(packed: Bytes) -> Bytes:
    """Return the fifth bit of each of 32 elements from four bytes, as 0 or 16, (num_blocks, 32)."""
    bits: Bytes = np.unpackbits(packed, axis=1, bitorder="little")
    return bits << 4


def _q4_0(blocks: Bytes) -> Floats:
    q = _nibbles(blocks[:, 2:]).astype(np.int8) - np.int8(8)
    return _halves(blocks, 0) * q.astype(np.float32)


def _q4_1(blocks: Bytes) -> Floats:
    q = _nibbles(blocks[:, 4:])
    return _halves(blocks, 0) * q.astype(np.float32) + _halves(blocks, 2)


def _q5_0(blocks: Bytes) -> Floats:
    unsigned = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    q = unsigned.astype(np.int8) - np.int8(16)
    return _halves(blocks, 0) * q.astype(np.float32)


def _q5_1(blocks: Bytes) -> Floats:
    q = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return _halves(blocks, 0) * q.astype(np.float32) + _halves(blocks, 2)


def _q8_0(blocks: Bytes) -> Floats:
    q = blocks[:, 2:].view(np.int8)
    return _halves(blocks, 0) * q.astype(np.float32)


def _iq4_nl(blocks: Bytes) -> Floats:
    return _halves(blocks, 0) * IQ4_VALUES[_nibbles(blocks[:, 2:])]


def _zero4(blocks: Bytes) -> Floats:
    q = _nibbles(blocks[:, 5:])
    return _scale_of_float32(blocks) * (q.astype(np.float32) - blocks[:, 4:5])


def _zero8(blocks: Bytes) -> Floats:
    z = blocks[:, 4:5].view(np.int8)
    q = blocks[:, 5:].view(np.int8)
    return _scale_of_float32(blocks) * (q.astype(np.float32) - z)


def _scale_of_float32(blocks: Bytes) -> Floats:
    return np.ascontiguousarray(blocks[:, :4]).view(np.float32)


def _q4_k(blocks: Bytes) -> Floats:
    scales, minima = _scales_and_minima(blocks)
    q = _nibbles_of_parts(blocks[:, 4 + PACKED_SCALES :])
    return _scaled_parts(q, scales, minima)


def _q5_k(blocks: Bytes) -> Floats:
    first = 4 + PACKED_SCALES
    fifth = blocks[:, first : first + SMALL]
    fourth = blocks[:, first + SMALL :]

    # Bit i of byte j is that of element j of part i.
    bits = np.unpackbits(fifth[:, None], axis=1, bitorder="little")
    low = _nibbles_of_parts(fourth)

    scales, minima = _scales_and_minima(blocks)
    return _scaled_parts(low | (bits << 4), scales, minima)


def _q6_k(blocks: Bytes) -> Floats:
    low_bits = blocks[:, :128]
    high_bits = blocks[:, 128:192]
    factors = blocks[:, 192:208].view(np.int8)

    low = _shifted(low_bits, (0, 4)) & 0x0F
    high = _shifted(high_bits, (0, 2, 4, 6)) & 0x03
    unsigned = low | (high << 4)
    q = unsigned.astype(np.int8) - np.int8(32)

    parts = q.reshape(-1, 16, 16)
    scales = _halves(blocks, 208) * factors
    numbers = scales[:, :, None] * parts
    return numbers.reshape(-1, LARGE)


def _shifted(packed: Bytes, shifts: tuple[int, ...]) -> Bytes:
    """Return the bytes shifted right, (num_blocks, 256): the first half of them by each shift in
    turn, then the second half.
    """
    shifted = []
    for half in np.split(packed, 2, axis=1):
        for shift in shifts:
            shifted.append(half >> np.uint8(shift))

    return np.concatenate(shifted, axis=1)


def _scales_and_minima(blocks: Bytes) -> tuple[Floats, Floats]:
    """Return the scale and the minimum of each of the eight parts of a super-block, (num_blocks, 8)
    each.

    Each has six bits. Those of the first four parts are the low bits of a byte each. The two high
    bits of that byte are the high bits of the last four parts, whose low bits share four bytes.
    """
    packed = blocks[:, 4 : 4 + PACKED_SCALES]
    first_scales = packed[:, 0:4]
    first_minima = packed[:, 4:8]
    low_bits_of_last = packed[:, 8:12]

    high_bits_of_scales = (first_scales >> 2) & 0x30
    last_scales = (low_bits_of_last & 0x0F) | high_bits_of_scales

    high_bits_of_minima = (first_minima >> 2) & 0x30
    last_minima = (low_bits_of_last >> 4) | high_bits_of_minima

    scales = np.concatenate((first_scales & 0x3F, last_scales), axis=1)
    minima = np.concatenate((first_minima & 0x3F, last_minima), axis=1)
    return _halves(blocks, 0) * scales, _halves(blocks, 2) * minima


def _nibbles_of_parts(packed: Bytes) -> Bytes:
    """Return four bits of each element, (num_blocks, 8, 32). 32 bytes hold those of two parts."""
    pairs = packed.reshape(-1, 4, 1, SMALL)
    nibbles: Bytes = np.concatenate((pairs & 0x0F, pairs >> 4), axis=2)
    return nibbles.reshape(-1, 8, SMALL)


def _scaled_parts(q: Bytes, scales: Floats, minima: Floats) -> Floats:
    parts = scales[:, :, None] * q.astype(np.float32) - minima[:, :, None]
    return parts.reshape(-1, LARGE)


DEQUANTISE: dict[str, Callable[[Bytes], Floats]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "ZERO4": _zero4,
    "ZERO8": _zero8,
}
