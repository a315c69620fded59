"""Tensors of checkpoints as numpy arrays. numpy has no bfloat16: an array of uint16 is the bits of such numbers."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]

BFLOAT16 = np.dtype(np.uint16)
NAMES = {np.dtype(np.float32): "float32", BFLOAT16: "bfloat16", np.dtype(np.float16): "float16"}


def is_float(array: Array) -> bool:
    """Whether it is one of the floats that weights have here."""
    return array.dtype in NAMES


def as_float32(array: Array) -> Array:
    """The same numbers in float32. Every float of 16 bits is one exactly."""
    if array.dtype == BFLOAT16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32, copy=False)


def dtype_name(array: Array) -> str:
    return NAMES.get(array.dtype, array.dtype.name)
