"""Arrays of numpy as tensors of torch and back. Only what runs with torch imports this module."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from handlers.lmi_dist.arrays import BFLOAT16, Array


def to_tensor(array: Array) -> Tensor:
    """The same memory, or a copy of what is mapped from a file, which torch would take for its own to write."""
    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    return tensor.view(torch.bfloat16) if array.dtype == BFLOAT16 else tensor


def to_array(tensor: Tensor) -> Array:
    """A tensor on the host, in its memory."""
    array: Array = (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array


def load_pickled(file: Path) -> dict[str, Array]:
    """The tensors of a pickled file, which may run no code of its own. Raises ValueError, or what torch raises."""
    tensors = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(tensors, dict) or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise ValueError("holds something else than a table of tensors")
    return {name: to_array(tensor.detach().contiguous()) for name, tensor in tensors.items()}
