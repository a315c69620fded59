"""The tensors that make up one quantised weight, held against the shapes that they must have."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from handlers.lmi_dist.arrays import Array, as_float32, dtype_name, is_float
from handlers.lmi_dist.quantised.scheme import Scheme
from handlers.lmi_dist.quantised.weight import Floats

INT32 = np.dtype(np.int32)
INT64 = np.dtype(np.int64)


class Parts:
    """The tensors of a weight by the last word of their names. Methods raise ValueError."""

    def __init__(self, names: Mapping[str, str], read: Callable[[str], Array]) -> None:
        """`names` are the tensors' whole names by their last word; `read` reads one of them."""
        self._names = names
        self._read = read

    def __contains__(self, part: str) -> bool:
        return part in self._names

    def take(self, part: str) -> Array:
        """Read a part as it is."""
        if part not in self._names:
            raise ValueError(f"its part {part} is missing")

        return self._read(self._names[part])

    def integers(self, part: str, *dtypes: np.dtype[np.signedinteger]) -> Array:
        """Read a part that has one of these dtypes."""
        array = self.take(part)
        if array.dtype not in dtypes:
            names = " or ".join(dtype.name for dtype in dtypes)
            raise ValueError(f"its part {part} must be {names}, given {dtype_name(array)}")

        return array

    def matrix(self, part: str, dtype: np.dtype[np.signedinteger]) -> Array:
        """Read a part of two dimensions."""
        array = self.integers(part, dtype)
        if array.ndim != 2:
            raise ValueError(f"its part {part} must be a matrix, given shape {array.shape}")

        return array

    def words(self, part: str, shape: tuple[int, ...]) -> Array:
        """Read words of 32 bits of this shape."""
        return _of_shape(part, self.integers(part, INT32), shape)

    def scales(self, part: str, shape: tuple[int, ...]) -> Floats:
        """Read floats of this shape, in float32."""
        array = self.take(part)
        if not is_float(array):
            raise ValueError(f"its part {part} must be floats, given {dtype_name(array)}")

        return as_float32(_of_shape(part, array, shape))

    def groups(self, part: str, num_in: int, scheme: Scheme) -> Array:
        """Return the group of each input, (num_in,): by a part where there is one, or else so many
        neighbours are one.
        """
        if part not in self and not scheme.has_order:
            return np.arange(num_in) // (scheme.group_size or max(1, num_in))

        groups = _of_shape(part, self.integers(part, INT32, INT64), (num_in,))
        num_groups = scheme.num_groups(num_in)
        if num_in and not 0 <= groups.min() <= groups.max() < num_groups:
            raise ValueError(
                f"its part {part} must be groups from 0 to {num_groups - 1}, "
                f"given {groups.min()} to {groups.max()}"
            )

        return groups


def _of_shape(part: str, array: Array, shape: tuple[int, ...]) -> Array:
    if array.shape != shape:
        raise ValueError(f"its part {part} has shape {array.shape}, the others need {shape}")

    return array
