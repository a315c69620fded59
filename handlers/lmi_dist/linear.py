"""Matrix products with constant weights, in the form that is fastest on the device at hand.

On a CPU the weight is packed once by oneDNN: it is read at memory speed in every batch size, and row i of a product
has the same bits whatever the other rows are, from two rows on. An activation is part of the same call. Knows nothing
of layers. A packed weight is opaque: it cannot be sliced, saved or copied.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from handlers.lmi_dist.elementwise import ACTIVATIONS

_reorder = torch.ops.mkldnn._reorder_linear_weight
_pointwise: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default

_int8_product: Callable[..., Tensor] = torch.ops.quantized.linear_dynamic

# Our name -> oneDNN's name and algorithm.
_POST_OPS = {
    "none": ("none", ""),
    "silu": ("swish", ""),
    "relu": ("relu", ""),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
}
_PACK_ROWS = 64  # the batch size that oneDNN packs for; it serves every other as well
_MAX_DENSE_ELEMENTS = 1 << 18  # up to here the plain product of one row beats the call overhead of the packed one


class Linear(Protocol):
    """activation(x W^T + b). Every kind is built from a weight W (N, K) and a bias b (N,) or None."""

    def __call__(self, x: Tensor) -> Tensor:
        """(rows, K) to (rows, N)."""


class DenseLinear:
    """The plain product: CUDA, and dtypes that oneDNN does not pack."""

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: str = "none") -> None:
        self.weight, self.bias, self.activation = weight, bias, ACTIVATIONS[activation]

    def __call__(self, x: Tensor) -> Tensor:
        return self.activation(functional.linear(x, self.weight, self.bias))


class PackedLinear:
    """oneDNN's packed product. With fewer than two rows the bits may differ from those of a batch."""

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: str = "none") -> None:
        self.weight, self.bias = _reorder(weight.contiguous(), _PACK_ROWS), bias
        self.post_op, self.algorithm = _POST_OPS[activation]

    def __call__(self, x: Tensor) -> Tensor:
        return _pointwise(x, self.weight, self.bias, self.post_op, [], self.algorithm)


class SmallLinear:
    """Packed for batches, plain for a single row: faster for small weights, but a row's bits depend on the batch."""

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: str = "none") -> None:
        self.dense = DenseLinear(weight, bias, activation)
        self.packed = PackedLinear(weight, bias, activation)

    def __call__(self, x: Tensor) -> Tensor:
        return self.dense(x) if x.shape[0] == 1 else self.packed(x)


class Int8Linear:
    """Weights in 8 bits by output channel, activations quantised on the fly over the whole batch.

    The scale of the activations is shared by the rows of a call, so neighbours change each other's low bits. torch
    marks the Python side of this as deprecated, so the operators are called by name, here only.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: str = "none") -> None:
        scales = (weight.abs().amax(dim=1).clamp(min=1e-12) / 127).double()  # (N,)
        zeros = torch.zeros(len(weight), dtype=torch.int64)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.quantize_per_tensor", UserWarning)
            quantized = torch.quantize_per_channel(weight.float(), scales, zeros, 0, torch.qint8)
        self.weight = torch.ops.quantized.linear_prepack(quantized, None if bias is None else bias.float())
        self.activation = ACTIVATIONS[activation]
        # Without VNNI two products are added in 16 bits, which overflow unless activations keep to 7 bits.
        self.is_narrow = not torch.cpu._is_vnni_supported()

    def __call__(self, x: Tensor) -> Tensor:
        return self.activation(_int8_product(x, self.weight, self.is_narrow))


@dataclass(frozen=True, slots=True)
class LinearBuilder:
    """Chooses the kind of every Linear of one model, by its weight (N, K)."""

    device: torch.device
    dtype: torch.dtype
    quantize: str | None = None
    batch_invariant: bool = True

    def __call__(self, weight: Tensor, bias: Tensor | None = None, activation: str = "none") -> Linear:
        return self._kind(weight)(weight, bias, activation)

    def _kind(self, weight: Tensor) -> type[DenseLinear | PackedLinear | SmallLinear | Int8Linear]:
        if self.device.type != "cpu":
            return DenseLinear
        if self.quantize == "int8":
            return Int8Linear
        if not can_pack(self.dtype):
            return DenseLinear
        is_small = weight.numel() <= _MAX_DENSE_ELEMENTS
        return SmallLinear if is_small and not self.batch_invariant else PackedLinear


def can_pack(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32
