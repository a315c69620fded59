"""Where torch keeps a model: on which device, in which dtype, and in which form of its weights.

On a CPU oneDNN packs a weight once, at load. It is then read at memory speed in every batch size,
and the same call applies an activation. A packed weight is opaque: it cannot be sliced, saved or
copied.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from handlers.lmi_dist.arrays import BFLOAT16, Array
from lmi.settings.config import EngineConfig

log = logging.getLogger(__name__)

# oneDNN's packing of a weight, and its product with a packed one.
_reorder = torch.ops.mkldnn._reorder_linear_weight
_pointwise: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "silu": functional.silu,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}


class _PostOp(NamedTuple):
    """An activation as oneDNN names it."""

    name: str
    algorithm: str = ""


# The others have the same name there.
_POST_OPS = {
    "silu": _PostOp("swish"),
    "gelu": _PostOp("gelu", "none"),
    "gelu_tanh": _PostOp("gelu", "tanh"),
}
# The batch size that oneDNN packs for. Every other batch size works as well.
_PACK_ROWS = 64
_NO_TABLE = "holds something else than a table of tensors"
# By the value of option.dtype.
_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@dataclass(frozen=True, slots=True)
class Placement:
    """The device of weights and cache, and their dtype."""

    device: torch.device
    dtype: torch.dtype


def choose_placement(config: EngineConfig, device: str, checkpoint_dtype: str | None) -> Placement:
    """Return a device with the dtype that option.dtype asks for there.

    On CUDA `auto` is the dtype of the checkpoint. On a CPU it is float32 for every checkpoint, as
    with the native kernels, so that a machine without them gives the same answers up to rounding.
    Only `bf16` asks for less.
    """
    chosen_device = torch.device(device)
    if chosen_device.type == "cuda":
        dtype = _DTYPES.get(config.dtype)
        if dtype is None:
            dtype = getattr(torch, checkpoint_dtype or "float32")

        return Placement(chosen_device, dtype)

    if config.dtype == "fp16":
        log.warning("float32 instead of float16: this CPU has no arithmetic for it")

    dtype = torch.bfloat16 if config.dtype == "bf16" else torch.float32
    return Placement(chosen_device, dtype)


class Weight(Protocol):
    """A weight (N, K) in the form that its product needs."""

    def __call__(self, x: Tensor, bias: Tensor | None = None, activation: str = "none") -> Tensor:
        """activation(x W^T + bias), from (rows, K) to (rows, N)."""


def dense(weight: Tensor) -> Weight:
    """Return a weight for torch's product: on CUDA, and in dtypes that oneDNN does not pack."""

    def multiply(x: Tensor, bias: Tensor | None = None, activation: str = "none") -> Tensor:
        return ACTIVATIONS[activation](functional.linear(x, weight, bias))

    return multiply


def packed(weight: Tensor) -> Weight:
    """Return a weight for oneDNN's product."""
    opaque = _reorder(weight.contiguous(), _PACK_ROWS)

    def multiply(x: Tensor, bias: Tensor | None = None, activation: str = "none") -> Tensor:
        post_op = _POST_OPS.get(activation) or _PostOp(activation)
        return _pointwise(x, opaque, bias, post_op.name, [], post_op.algorithm)

    return multiply


def packer(placement: Placement) -> Callable[[Tensor], Weight]:
    """Return what puts a weight on the device, from the dtype of the checkpoint, in its form."""
    form = packed if _can_pack(placement) else dense

    def pack(weight: Tensor) -> Weight:
        return form(weight.to(placement.device, placement.dtype))

    return pack


def _can_pack(placement: Placement) -> bool:
    """Whether oneDNN packs weights there."""
    if placement.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False

    if placement.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())

    return placement.dtype == torch.float32


def to_tensor(array: Array) -> Tensor:
    """Return a tensor in the memory of an array, or in a copy of an array that may not be written:
    torch knows no such tensors.
    """
    writeable = array if array.flags.writeable else array.copy()
    tensor = torch.from_numpy(writeable)
    if array.dtype == BFLOAT16:
        return tensor.view(torch.bfloat16)

    return tensor


def to_array(tensor: Tensor) -> Array:
    """Return an array in the memory of a tensor on the host."""
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.uint16)

    array: Array = tensor.numpy()
    return array


def load_pickled(file: Path) -> dict[str, Array]:
    """Return the tensors of a pickled file by name. None of the file's own code is run.

    Raises ValueError, or what torch raises.
    """
    content = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(content, dict):
        raise ValueError(_NO_TABLE)

    arrays: dict[str, Array] = {}
    for name, tensor in content.items():
        if not isinstance(tensor, Tensor):
            raise ValueError(_NO_TABLE)

        arrays[name] = to_array(tensor.detach().contiguous())

    return arrays
