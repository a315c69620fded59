"""A reference for programs: it runs one over a whole sequence at once, without a cache, in any
floating dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from handlers.lmi_dist.arrays import as_float32
from handlers.lmi_dist.facts import read_facts
from handlers.lmi_dist.operations import Attend, Cap, Embed, Gather, Linear, Norm, Program
from handlers.lmi_dist.placement import to_tensor
from handlers.lmi_dist.program import load
from lmi.settings.config import EngineConfig

ACTIVATIONS = {
    "none": lambda x: x,
    "silu": functional.silu,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


def read_program(path: str, max_length: int) -> Program[Tensor]:
    """The program of a folder, its weights as they are in the file."""
    config = EngineConfig()
    return load(
        read_facts(path),
        config,
        max_length,
        lambda *_: None,
        to_tensor,
        lambda array: to_tensor(as_float32(array)),
    )


def run(
    program: Program[Tensor], ids: list[int], wanted: list[int], dtype: torch.dtype = torch.float32
) -> Tensor:
    """Logits (num_wanted, vocab_size) of the tokens at the positions `wanted`."""
    return _WholeSequence(program, ids, wanted, dtype).run()


class _WholeSequence:
    def __init__(
        self, program: Program[Tensor], ids: list[int], wanted: list[int], dtype: torch.dtype
    ) -> None:
        self.program = program
        self.ids = torch.tensor(ids)
        self.wanted = wanted
        self.dtype = dtype
        self.buffers = [
            torch.full(
                (len(wanted if index in program.wanted else ids), width), torch.nan, dtype=dtype
            )
            for index, width in enumerate(program.widths)
        ]

    def run(self) -> Tensor:
        for operation in self.program.operations:
            match operation:
                case Embed():
                    self.embed(operation)
                case Norm():
                    self.norm(operation)
                case Linear():
                    self.linear(operation)
                case Attend():
                    self.attend(operation)
                case Gather():
                    self.buffers[operation.output].copy_(self.buffers[operation.input][self.wanted])
                case Cap():
                    buffer = self.buffers[operation.buffer]
                    buffer.copy_(operation.cap * torch.tanh(buffer / operation.cap))

        return self.buffers[-1]

    def cast(self, tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(self.dtype)

    def store(self, output: int, x: Tensor, adds: bool) -> None:
        self.buffers[output].copy_(self.buffers[output] + x if adds else x)

    def embed(self, operation: Embed) -> None:
        x = operation.table[self.ids].to(self.dtype) * operation.scale
        if operation.positions is not None:
            x = x + operation.positions[: len(x)].to(self.dtype)

        self.store(operation.output, x, adds=False)

    def norm(self, operation: Norm) -> None:
        x = self.buffers[operation.input]
        weight = self.cast(operation.weight)
        bias = self.cast(operation.bias)
        if operation.is_centred:
            y = functional.layer_norm(x, x.shape[-1:], weight, bias, operation.eps)
        else:
            assert bias is None
            y = functional.rms_norm(x, x.shape[-1:], weight, operation.eps)

        self.store(operation.output, y, operation.adds)

    def linear(self, operation: Linear[Tensor]) -> None:
        x = self.buffers[operation.input]
        activation = ACTIVATIONS[operation.activation]
        y = functional.linear(x, operation.weight.to(self.dtype), self.cast(operation.bias))
        if operation.gate is None:
            y = activation(y)
        else:
            gate = functional.linear(
                x, operation.gate.to(self.dtype), self.cast(operation.gate_bias)
            )
            y = activation(gate) * y

        self.store(operation.output, y, operation.adds)

    def attend(self, operation: Attend) -> None:
        p = self.program
        num_rows = len(self.ids)
        counts = (p.num_heads, p.num_kv_heads, p.num_kv_heads)
        heads = (
            self.buffers[operation.input].view(num_rows, sum(counts), p.head_dim).transpose(0, 1)
        )
        q, k, v = heads.split(counts)  # (heads, rows, head_dim)
        q = self.rotate(operation, self.norm_heads(operation, q, operation.query_norm))
        k = self.rotate(operation, self.norm_heads(operation, k, operation.key_norm))
        group = p.num_heads // p.num_kv_heads
        k, v = k.repeat_interleave(group, dim=0), v.repeat_interleave(group, dim=0)
        scores = q @ k.transpose(1, 2) * operation.scale  # (heads, rows, rows)
        if operation.softcap is not None:
            scores = operation.softcap * torch.tanh(scores / operation.softcap)

        distance = torch.arange(num_rows)[:, None] - torch.arange(num_rows)
        is_hidden = (distance < 0) | (distance >= (operation.window or num_rows))
        answer = scores.masked_fill(is_hidden, -torch.inf).softmax(-1) @ v
        rows = answer.transpose(0, 1).reshape(num_rows, -1)
        self.store(operation.output, rows[self.wanted] if operation.is_wanted else rows, adds=False)

    def norm_heads(self, operation: Attend, heads: Tensor, weight: Tensor | None) -> Tensor:
        if weight is None:
            return heads

        return functional.rms_norm(heads, heads.shape[-1:], self.cast(weight), operation.norm_eps)

    def rotate(self, operation: Attend, heads: Tensor) -> Tensor:
        if operation.rotations is None:
            return heads

        cosines, sines = (
            operation.rotations[: len(self.ids)].to(self.dtype).unbind(1)
        )  # (rows, num_pairs)
        num_pairs = cosines.shape[1]
        first, second, unturned = heads.split(
            (num_pairs, num_pairs, heads.shape[-1] - 2 * num_pairs), dim=-1
        )
        rotated = (first * cosines - second * sines, second * cosines + first * sines, unturned)
        return torch.cat(rotated, dim=-1)
