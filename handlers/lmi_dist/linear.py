"""Matrix products with constant weights, in the form that is fastest on the device.

On a CPU oneDNN packs the weight once. It is then read at memory speed in every batch size, and the same call applies an
activation. A packed weight is opaque: it cannot be sliced, saved or copied. This module knows nothing of layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from handlers.lmi_dist.placement import Placement

_reorder = torch.ops.mkldnn._reorder_linear_weight
_pointwise: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "silu": functional.silu,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}
# The name of an activation -> oneDNN's name and algorithm.
_POST_OPS = {
    "none": ("none", ""),
    "silu": ("swish", ""),
    "relu": ("relu", ""),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
}
_PACK_ROWS = 64  # the batch size that oneDNN packs for; every other batch size works as well


class Weight(Protocol):
    """A weight (N, K) in the form that its product needs."""

    def __call__(self, x: Tensor, bias: Tensor | None = None, activation: str = "none") -> Tensor:
        """activation(x W^T + bias), from (rows, K) to (rows, N)."""


class DenseWeight:
    """The plain product, for CUDA and for dtypes that oneDNN does not pack."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def __call__(self, x: Tensor, bias: Tensor | None = None, activation: str = "none") -> Tensor:
        return ACTIVATIONS[activation](functional.linear(x, self._weight, bias))


class PackedWeight:
    """oneDNN's packed product."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = _reorder(weight.contiguous(), _PACK_ROWS)

    def __call__(self, x: Tensor, bias: Tensor | None = None, activation: str = "none") -> Tensor:
        post_op, algorithm = _POST_OPS[activation]
        return _pointwise(x, self._weight, bias, post_op, [], algorithm)


def packer(placement: Placement) -> Callable[[Tensor], Weight]:
    """The function that takes a weight in the dtype of the checkpoint and gives its form on the device."""
    kind = PackedWeight if placement.device.type == "cpu" and _can_pack(placement.dtype) else DenseWeight
    return lambda weight: kind(weight.to(placement.device, placement.dtype))


def _can_pack(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


class PackedLinear(nn.Module):
    """A linear with a packed weight, as the module that transformers expects."""

    def __init__(self, linear: nn.Linear, pack: Callable[[Tensor], Weight]) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._weight, self._bias = pack(linear.weight.detach()), linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """(…, in_features) to (…, out_features)."""
        return self._weight(x.reshape(-1, self.in_features), self._bias).view(*x.shape[:-1], self.out_features)


def pack_linears(model: nn.Module, pack: Callable[[Tensor], Weight]) -> None:
    """Put a PackedLinear in the place of each linear."""
    for name, child in model.named_children():
        if type(child) is nn.Linear:
            setattr(model, name, PackedLinear(child, pack))
        else:
            pack_linears(child, pack)
