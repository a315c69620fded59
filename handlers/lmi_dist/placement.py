"""The device and the dtype of a model that torch runs, chosen once, at load; and arrays of numpy as tensors and back.

Only what runs with torch imports this module.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from handlers.lmi_dist.safetensors import BFLOAT16, Array
from lmi.settings.config import EngineConfig

log = logging.getLogger(__name__)

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class Placement:
    """The device of weights and cache, and their dtype."""

    device: torch.device
    dtype: torch.dtype


def choose_placement(config: EngineConfig, device: str, checkpoint_dtype: str | None) -> Placement:
    chosen = torch.device(device)
    dtype = None if checkpoint_dtype is None else getattr(torch, checkpoint_dtype)
    return Placement(chosen, choose_dtype(config, chosen, dtype))


def choose_dtype(config: EngineConfig, device: torch.device, checkpoint_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of torch's arithmetic, weights and cache.

    On CUDA `auto` is the dtype of the checkpoint. On a CPU it is float32 for every checkpoint, as with the native
    kernels, so that a machine without them gives the same answers up to rounding. Only `bf16` asks for less.
    """
    if device.type == "cuda":
        return _DTYPES.get(config.dtype) or checkpoint_dtype or torch.float32
    if config.dtype == "fp16":
        log.warning("float32 instead of float16: this CPU has no arithmetic for it")
    return torch.bfloat16 if config.dtype == "bf16" else torch.float32


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
