"""Arrays of weights and states, as all files of this engine name them, and the floats in them.

numpy has no bfloat16: an array of uint16 is the bits of such numbers.
"""

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]

BFLOAT16 = np.dtype(np.uint16)
FLOAT_NAMES = {
    np.dtype(np.float32): "float32",
    BFLOAT16: "bfloat16",
    np.dtype(np.float16): "float16",
}
"""The dtypes that weights may have, each with its name."""

# So many rows of two tables are compared at a time.
_ROWS_AT_A_TIME = 1024


def is_float(array: Array) -> bool:
    """Whether an array is of one of the floats that weights may have."""
    return array.dtype in FLOAT_NAMES


def dtype_name(array: Array) -> str:
    """Return the name of an array's dtype, which for uint16 is bfloat16."""
    return FLOAT_NAMES.get(array.dtype, array.dtype.name)


def as_float32(array: Array) -> Array:
    """Return the same numbers in float32, which holds every float of 16 bits exactly."""
    if array.dtype == BFLOAT16:
        return (array.astype(np.uint32) << 16).view(np.float32)

    return array.astype(np.float32, copy=False)


def are_equal(first: Array, second: Array) -> bool:
    """Whether two arrays hold the same numbers, as far as the coarser of their dtypes tells."""
    return _rounds_to(first, second) or _rounds_to(second, first)


def are_same_rows(first: Array, second: Array) -> bool:
    """Whether two tables, (num_rows, width), are equal. It needs memory for a few rows."""
    if first.shape != second.shape:
        return False

    for start in range(0, len(first), _ROWS_AT_A_TIME):
        rows = slice(start, start + _ROWS_AT_A_TIME)
        if not are_equal(first[rows], second[rows]):
            return False

    return True


def _rounds_to(array: Array, coarser: Array) -> bool:
    """Whether the numbers of an array, rounded to the dtype of another one, are that one's."""
    rounded = _rounded(array, coarser.dtype)
    return np.array_equal(as_float32(rounded), as_float32(coarser))


def _rounded(array: Array, dtype: np.dtype[Any]) -> Array:
    """Return the numbers of an array in another dtype, each the nearest one, of two the even
    one.
    """
    numbers = as_float32(array)
    if dtype != BFLOAT16:
        with np.errstate(over="ignore"):
            return numbers.astype(dtype)

    bits = numbers.view(np.uint32)
    last_bit = bits >> 16 & 1
    return ((bits + 0x7FFF + last_bit) >> 16).astype(BFLOAT16)
