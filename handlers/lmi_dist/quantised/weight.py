"""A quantised weight: small whole numbers, with a scale and a zero point for each group of
inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from handlers.lmi_dist.arrays import Array
from handlers.lmi_dist.quantised.words import Codes

Floats: TypeAlias = npt.NDArray[np.float32]

# The arrays in between take some MB, however large a weight is.
NUMBERS_AT_A_TIME = 1 << 20


class QuantisedWeight(Struct, frozen=True):
    """A weight (num_out, num_in).

    Weight i of row o is (codes[o, i] - zero_points[o, g]) * scales[o, g], with g = groups[i].
    """

    shape: tuple[int, int]
    num_bits: int
    # Reads and unpacks the codes, (num_out, num_in).
    read_codes: Callable[[], Codes]
    # (num_out, num_groups), both.
    scales: Floats
    zero_points: Array
    # The group of each input, (num_in,).
    groups: Array

    def floats(self) -> Floats:
        """Return the weight in float32, (num_out, num_in)."""
        num_out, num_in = self.shape
        codes = self.read_codes()
        zero_points = self.zero_points.astype(np.float32)
        numbers = np.empty(self.shape, np.float32)
        num_rows = max(1, NUMBERS_AT_A_TIME // max(1, num_in))
        for start in range(0, num_out, num_rows):
            part = slice(start, start + num_rows)
            steps = codes[part] - zero_points[part][:, self.groups]
            np.multiply(steps, self.scales[part][:, self.groups], out=numbers[part])

        return numbers
