"""Element-wise functions whose bits do not depend on how many rows are computed together.

From some number of elements on, torch divides an element-wise call between threads in equal shares, which may end in
the middle of a row or a vector. It computes the last elements of a share one by one, and they round differently from
those of a vector (the exponential, the complex product). So this module cuts larger calls between rows. Each element of
a row then goes through the same code, since none of these tensors is contiguous over rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional

_GRAIN = 1 << 14  # torch divides gelu from here on, and other functions from twice as many elements on

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "silu": functional.silu,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


def gate(x: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """activation(gate) * value, from (rows, 2 n), gate and value side by side, to (rows, n)."""
    width = x.shape[1] // 2
    if not _must_be_cut(x, width):
        return activation(x[:, :width]).mul_(x[:, width:])
    output = x.new_empty(len(x), width)
    for rows in _slices(x, width):
        torch.mul(activation(x[rows, :width]), x[rows, width:], out=output[rows])
    return output


def rotate(x: Tensor, rotations: Tensor) -> Tensor:
    """Rotate neighbouring pairs of channels of (rows, heads, kv_heads, head_dim), in place for float32.

    `rotations` are complex numbers (rows, 1, 1, head_dim / 2).
    """
    if x.dtype != torch.float32:
        pairs = torch.view_as_complex(x.float().view(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * rotations).flatten(-2).to(x.dtype)
    pairs = torch.view_as_complex(x.view(*x.shape[:-1], -1, 2))
    width = pairs[0].numel()
    if _must_be_cut(x, width):
        num_rows = max(1, (_GRAIN - 1) // width)
        for part, part_rotations in zip(pairs.split(num_rows), rotations.split(num_rows), strict=True):
            part *= part_rotations
    else:
        pairs *= rotations
    return x


def _must_be_cut(x: Tensor, width: int) -> bool:
    """Whether torch would divide `x` (rows, …), with `width` elements a row, between threads."""
    return len(x) * width >= _GRAIN and x.device.type == "cpu" and torch.get_num_threads() > 1


def _slices(x: Tensor, width: int) -> Iterator[slice]:
    """Cut the rows of `x` (rows, …) into equal slices. The last one may overlap the one before.

    A single row left over would be contiguous, which torch computes with other code.
    """
    num_rows = max(1, (_GRAIN - 1) // width)
    for first in range(0, len(x), num_rows):
        first = min(first, max(0, len(x) - num_rows))
        yield slice(first, first + num_rows)
