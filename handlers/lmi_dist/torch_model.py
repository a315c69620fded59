"""A program of operations that torch runs.

A model small enough for a CPU spends much of a step between the calls of torch, so norms and
rotations take few of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from handlers.lmi_dist.operations import (
    Adapter,
    Attend,
    Cap,
    Embed,
    Gather,
    Linear,
    LowRank,
    Norm,
    Program,
    Shrink,
)
from handlers.lmi_dist.placement import ACTIVATIONS, Weight
from handlers.lmi_dist.step_inputs import StepInputs


@dataclass(frozen=True, slots=True)
class _LowRankOfRows:
    """Rows, (num_rows,), and the weights that their adapter has for a linear."""

    rows: Tensor
    weights: LowRank[Tensor]


class TorchModel:
    """A program with its weights as tensors.

    Call it with a StepInputs for the logits of the wanted rows, float32 (num_wanted, vocab_size).
    """

    def __init__(self, program: Program[Weight], dtype: torch.dtype) -> None:
        """`dtype` is that of the activations."""
        self._program = program
        self._dtype = dtype
        self._logits = len(program.widths) - 1
        self._outputs: dict[str, Tensor] = {}

        # By the id of an operation's table: (max_length, 2, 1, channels), the factor of each
        # channel, and that of its partner in its pair.
        self._rotations: dict[int, Tensor] = {}
        for operation in program.operations:
            if isinstance(operation, Attend) and operation.rotations is not None:
                table = operation.rotations
                cosines, sines = table.unbind(1)
                of_channel = torch.cat((cosines, cosines), 1)
                of_partner = torch.cat((-sines, sines), 1)
                factors = torch.stack((of_channel, of_partner), 1)
                self._rotations[id(table)] = factors[:, :, None].to(dtype)

        self._adapters: dict[int, Adapter[Tensor]] = {}

    def put_adapter(self, number: int, adapter: Adapter[Tensor]) -> None:
        """Let rows use an adapter by its number, which is not 0."""
        self._adapters[number] = adapter

    def drop_adapter(self, number: int) -> None:
        """Forget an adapter, if there is one of this number."""
        self._adapters.pop(number, None)

    def __call__(self, step: StepInputs) -> Tensor:
        buffers: dict[int, Tensor] = {}
        positions = step.positions
        rotations = {
            table: rows.index_select(0, positions) for table, rows in self._rotations.items()
        }
        for operation in self._program.operations:
            match operation:
                case Embed():
                    buffers[operation.output] = self._embed(operation, step)
                case Norm(output=output):
                    y = _normalise(operation, buffers[operation.input])
                    buffers[output] = buffers[output].add_(y) if operation.adds else y
                case Linear(output=output):
                    y = self._multiply(operation, buffers[operation.input], step)
                    buffers[output] = buffers[output].add_(y) if operation.adds else y
                case Attend():
                    heads = buffers[operation.input].unflatten(1, (-1, self._program.head_dim))
                    buffers[operation.output] = self._attend(operation, heads, rotations, step)
                case Gather():
                    x = buffers[operation.input]
                    buffers[operation.output] = x.index_select(0, step.wanted)
                case Cap():
                    logits = buffers[operation.buffer].float()
                    capped = logits.div_(operation.cap).tanh_().mul_(operation.cap)
                    buffers[operation.buffer] = capped
                case Shrink():
                    # Its Linear does it.
                    pass

        self._outputs = {name: buffers[index] for name, index in self._program.outputs.items()}
        return buffers[self._logits].float()

    def output(self, name: str) -> Tensor:
        """Return the wanted rows of a declared output in the last step, (num_wanted,
        hidden_size).
        """
        return self._outputs[name]

    def _embed(self, operation: Embed, step: StepInputs) -> Tensor:
        """Return the embeddings of the rows, (rows, width)."""
        x: Tensor = operation.table.index_select(0, step.token_ids).to(self._dtype)
        if operation.scale != 1.0:
            x = x * operation.scale

        if operation.positions is not None:
            x = x + operation.positions.index_select(0, step.positions)

        return x

    def _multiply(self, operation: Linear[Weight], x: Tensor, step: StepInputs) -> Tensor:
        """(rows, width of input) to (rows, width of output)."""
        if step.adapted and operation.site is not None:
            is_wanted = operation.output in self._program.wanted
            low: list[_LowRankOfRows] = []
            for adapted in step.adapted:
                rows = adapted.wanted if is_wanted else adapted.rows
                weights = self._adapters[adapted.adapter][operation.site]
                if weights is not None and len(rows):
                    low.append(_LowRankOfRows(rows, weights))

            if low:
                return _multiply_adapted(operation, x, low)

        if operation.gate is None:
            return operation.weight(x, operation.bias, operation.activation)

        gate = operation.gate(x, operation.gate_bias, operation.activation)
        return gate.mul_(operation.weight(x, operation.bias))

    def _attend(
        self, operation: Attend, heads: Tensor, rotations: dict[int, Tensor], step: StepInputs
    ) -> Tensor:
        """Normalise and rotate in place, store keys and values, and attend.

        (rows, heads of queries, keys and values, head_dim) to (rows, width).
        """
        num_heads = self._program.num_heads
        num_rotated = self._program.num_heads + self._program.num_kv_heads
        if operation.query_norm is not None:
            queries = heads[:, :num_heads]
            keys = heads[:, num_heads:num_rotated]
            for part, weight in ((queries, operation.query_norm), (keys, operation.key_norm)):
                part.copy_(functional.rms_norm(part, part.shape[-1:], weight, operation.norm_eps))

        if operation.rotations is not None:
            # (rows, 1, channels) each
            cosines, sines = rotations[id(operation.rotations)].unbind(1)
            rotated = heads[:, :num_rotated, : cosines.shape[-1]]
            swapped = rotated.roll(cosines.shape[-1] // 2, dims=2)
            rotated.mul_(cosines).addcmul_(swapped, sines)

        queries = heads[:, :num_heads]
        keys_values = heads[:, num_heads:]
        step.attention.write(operation.layer, keys_values)
        if operation.is_wanted:
            queries = queries.index_select(0, step.wanted)

        return step.attention(queries, operation)


def _normalise(operation: Norm, x: Tensor) -> Tensor:
    """(rows, width) to (rows, width)."""
    if operation.is_centred:
        return functional.layer_norm(
            x, x.shape[1:], operation.weight, operation.bias, operation.eps
        )

    return functional.rms_norm(x, x.shape[1:], operation.weight, operation.eps)


def _multiply_adapted(operation: Linear[Weight], x: Tensor, low: list[_LowRankOfRows]) -> Tensor:
    """(rows, width of input) to (rows, width of output).

    What adapters add to some rows is added before the activation.
    """
    y = operation.weight(x, operation.bias)
    gate: Tensor | None = None
    if operation.gate is not None:
        gate = operation.gate(x, operation.gate_bias)

    for adapted in low:
        rows = adapted.rows
        weights = adapted.weights
        shrunk = functional.linear(x.index_select(0, rows), weights.down)
        if weights.up is not None:
            y.index_add_(0, rows, functional.linear(shrunk, weights.up))

        if gate is not None and weights.gate is not None:
            gate.index_add_(0, rows, functional.linear(shrunk, weights.gate))

    activate = ACTIVATIONS[operation.activation]
    if gate is None:
        return activate(y)

    return activate(gate).mul_(y)
