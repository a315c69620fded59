"""The device of a model that torch runs, its dtype, and the form of its weights; arrays of numpy as
tensors and back.

On a CPU oneDNN packs a constant weight once. It is then read at memory speed in every batch size,
and the same call applies an activation. A packed weight is opaque: it cannot be sliced, saved or
copied.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from handlers.lmi_dist.arrays import BFLOAT16, Array
from lmi.settings.config import EngineConfig

log = logging.getLogger(__name__)

_reorder = torch.ops.mkldnn._reorder_linear_weight
_pointwise: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "silu": functional.silu,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}
# oneDNN's names.
_POST_OPS = {
    "silu": ("swish", ""),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
}
# The batch size that oneDNN packs for. Every other batch size works as well.
_PACK_ROWS = 64
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class Placement:
    """The device of weights and cache, and their dtype."""

    device: torch.device
    dtype: torch.dtype


def choose_placement(config: EngineConfig, device: str, checkpoint_dtype: str | None) -> Placement:
    """A device, and the dtype of torch's arithmetic on it.

    On CUDA `auto` is the dtype of the checkpoint. On a CPU it is float32 for every checkpoint, as
    with the native kernels, so that a machine without them gives the same answers up to rounding.
    Only `bf16` asks for less.
    """
    if torch.device(device).type == "cuda":
        dtype = _DTYPES.get(config.dtype) or getattr(torch, checkpoint_dtype or "float32")
        return Placement(torch.device(device), dtype)

    if config.dtype == "fp16":
        log.warning("float32 instead of float16: this CPU has no arithmetic for it")

    dtype = torch.bfloat16 if config.dtype == "bf16" else torch.float32
    return Placement(torch.device(device), dtype)


class Weight(Protocol):
    """A weight (N, K) in the form that its product needs."""

    def __call__(self, x: Tensor, bias: Tensor | None = None, activation: str = "none") -> Tensor:
        """activation(x W^T + bias), from (rows, K) to (rows, N)."""


def dense(weight: Tensor) -> Weight:
    """The plain product, for CUDA and for dtypes that oneDNN does not pack."""

    def multiply(x: Tensor, bias: Tensor | None = None, activation: str = "none") -> Tensor:
        return ACTIVATIONS[activation](functional.linear(x, weight, bias))

    return multiply


def packed(weight: Tensor) -> Weight:
    """oneDNN's packed product."""
    opaque = _reorder(weight.contiguous(), _PACK_ROWS)

    def multiply(x: Tensor, bias: Tensor | None = None, activation: str = "none") -> Tensor:
        post_op, algorithm = _POST_OPS.get(activation, (activation, ""))
        return _pointwise(x, opaque, bias, post_op, [], algorithm)

    return multiply


def packer(placement: Placement) -> Callable[[Tensor], Weight]:
    """The function that takes a weight in the dtype of the checkpoint and gives its form on the
    device.
    """
    kind = dense
    if placement.device.type == "cpu" and torch.backends.mkldnn.is_available():
        has_bfloat16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
        if placement.dtype == torch.float32 or (placement.dtype == torch.bfloat16 and has_bfloat16):
            kind = packed

    return lambda weight: kind(weight.to(placement.device, placement.dtype))


def to_tensor(array: Array) -> Tensor:
    """The same memory, or a copy of what is mapped from a file, which torch would take for its own
    to write.
    """
    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    if array.dtype == BFLOAT16:
        return tensor.view(torch.bfloat16)

    return tensor


def to_array(tensor: Tensor) -> Array:
    """A tensor on the host, in its memory."""
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.uint16)

    array: Array = tensor.numpy()
    return array


def load_pickled(file: Path) -> dict[str, Array]:
    """The tensors of a pickled file, which may run no code of its own.

    Raises ValueError, or what torch raises.
    """
    tensors = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(tensors, dict):
        raise ValueError("holds something else than a table of tensors")

    if not all(isinstance(value, Tensor) for value in tensors.values()):
        raise ValueError("holds something else than a table of tensors")

    return {name: to_array(tensor.detach().contiguous()) for name, tensor in tensors.items()}
