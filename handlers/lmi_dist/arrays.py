"""Arrays of weights and states, as all files of this engine name them."""

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]

# numpy has no bfloat16: its bits are kept in integers of the same size.
BFLOAT16 = np.dtype(np.uint16)
