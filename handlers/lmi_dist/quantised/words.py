"""Small whole numbers in words of 32 bits."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from handlers.lmi_dist.arrays import Array

# Small numbers without a sign.
Codes: TypeAlias = npt.NDArray[np.uint8]

WORD_BITS = 32


def num_words(num_numbers: int, num_bits: int) -> int:
    """Return how many words so many numbers take."""
    return -(-num_numbers // (WORD_BITS // num_bits))


def unpacked(words: Array, num_bits: int) -> Codes:
    """Return the numbers in words (num_rows, num_words), from the lowest bits on: (num_rows, 8 or 4
    for each word). `num_bits` is 4 or 8.
    """
    num_rows = len(words)
    data = np.ascontiguousarray(words).view(np.uint8).reshape(num_rows, -1)
    if num_bits == 8:
        return data

    numbers = np.empty((num_rows, 2 * data.shape[1]), np.uint8)
    numbers[:, 0::2] = data & 15
    numbers[:, 1::2] = data >> 4
    return numbers
