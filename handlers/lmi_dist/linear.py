"""Matrix products with constant weights, in the form that is fastest on the device.

On a CPU oneDNN packs the weight once. It is then read at memory speed in every batch size, and in products of two rows
and more the bits of a row do not depend on the others. The same call applies an activation. A packed weight is opaque:
it cannot be sliced, saved or copied. This module knows nothing of layers.
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

# The name of an activation -> oneDNN's name and algorithm.
_POST_OPS = {
    "none": ("none", ""),
    "silu": ("swish", ""),
    "relu": ("relu", ""),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
}
_PACK_ROWS = 64  # the batch size that oneDNN packs for; every other batch size works as well
_MAX_DENSE_ELEMENTS = 1 << 18  # up to this size the plain product of one row is faster than a call of the packed one


class Linear(Protocol):
    """activation(x W^T + b). Every kind is built from a weight W (N, K) and a bias b (N,) or None."""

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply (rows, K) to (rows, N)."""


class DenseLinear:
    """The plain product, for CUDA and for dtypes that oneDNN does not pack."""

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: str = "none") -> None:
        self.weight, self.bias, self.activation = weight, bias, ACTIVATIONS[activation]

    def __call__(self, x: Tensor) -> Tensor:
        return self.activation(functional.linear(x, self.weight, self.bias))


class PackedLinear:
    """oneDNN's packed product. The bits of a single row may differ from those in a batch."""

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
    """The 8-bit product. Weights are quantised by output channel, activations in each call over the whole batch.

    The rows of a call share the scale of the activations, so neighbours change each other's low bits. torch marks its
    Python functions for this as deprecated, so this class calls the operators by name.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: str = "none") -> None:
        scales = (weight.abs().amax(dim=1).clamp(min=1e-12) / 127).double()  # (N,)
        zeros = torch.zeros(len(weight), dtype=torch.int64)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.quantize_per_tensor", UserWarning)
            quantized = torch.quantize_per_channel(weight.float(), scales, zeros, 0, torch.qint8)
        self.weight = torch.ops.quantized.linear_prepack(quantized, None if bias is None else bias.float())
        self.activation = ACTIVATIONS[activation]
        # Without VNNI two products are added in 16 bits, which overflow unless activations use only 7 bits.
        self.is_narrow = not torch.cpu._is_vnni_supported()

    def __call__(self, x: Tensor) -> Tensor:
        return self.activation(_int8_product(x, self.weight, self.is_narrow))


@dataclass(frozen=True, slots=True)
class LinearBuilder:
    """A builder chooses the kind of each Linear of one model by the weight (N, K)."""

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
