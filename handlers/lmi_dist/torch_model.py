"""A decoder's program, run with torch: on CUDA, and on a CPU that the native kernels do not know.

All tokens of a step, decodes and prompt chunks, are rows of the same buffers. A model small enough for a CPU spends
much of a step between the calls of torch, so norms and rotations take few of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from handlers.lmi_dist.attention import Attention
from handlers.lmi_dist.operations import Adapter, Attend, Cap, Embed, Gather, Linear, LowRank, Norm, Program, Shrink
from handlers.lmi_dist.placement import ACTIVATIONS, Weight


@dataclass(frozen=True, slots=True)
class AdaptedRows:
    """The rows of one adapter."""

    adapter: int
    rows: Tensor  # (num_rows,)
    wanted: Tensor  # (num_wanted,): places among the wanted rows


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The rows of one step are the tokens of all its chunks."""

    token_ids: Tensor  # (rows,)
    positions: Tensor  # (rows,)
    wanted: Tensor  # (num_wanted,): rows whose logits are asked for
    attention: Attention
    adapted: tuple[AdaptedRows, ...] = ()


class TorchModel:
    """Call it with a StepInputs for the logits of the wanted rows, float32 (num_wanted, vocab_size)."""

    def __init__(self, program: Program[Weight], dtype: torch.dtype) -> None:
        """`dtype` is that of the activations."""
        self._program, self._dtype = program, dtype
        self._logits = len(program.widths) - 1
        self._outputs: dict[str, Tensor] = {}
        tables = [one.rotations for one in program.operations if isinstance(one, Attend) and one.rotations is not None]
        self._rotations: dict[int, Tensor] = {}  # (max_length, 2, 1, channels): of each and of its partner in its pair
        for table in tables:
            cosines, sines = table.unbind(1)
            factors = torch.stack((torch.cat((cosines, cosines), 1), torch.cat((-sines, sines), 1)), 1)
            self._rotations[id(table)] = factors[:, :, None].to(dtype)
        self._adapters: dict[int, Adapter[Tensor]] = {}

    def put_adapter(self, number: int, adapter: Adapter[Tensor]) -> None:
        self._adapters[number] = adapter

    def drop_adapter(self, number: int) -> None:
        self._adapters.pop(number, None)

    def __call__(self, step: StepInputs) -> Tensor:
        buffers: dict[int, Tensor] = {}
        rotations = {table: rows.index_select(0, step.positions) for table, rows in self._rotations.items()}
        for operation in self._program.operations:
            match operation:
                case Embed(output=output, positions=positions):
                    x = operation.table.index_select(0, step.token_ids).to(self._dtype)
                    x = x if operation.scale == 1.0 else x * operation.scale
                    buffers[output] = x if positions is None else x + positions.index_select(0, step.positions)
                case Norm(output=output) | Linear(output=output):
                    x = buffers[operation.input]
                    if isinstance(operation, Linear):
                        y = self._multiply(operation, x, step)
                    elif operation.is_centred:
                        y = functional.layer_norm(x, x.shape[1:], operation.weight, operation.bias, operation.eps)
                    else:
                        y = functional.rms_norm(x, x.shape[1:], operation.weight, operation.eps)
                    buffers[output] = buffers[output].add_(y) if operation.adds else y
                case Attend():
                    heads = buffers[operation.input].unflatten(1, (-1, self._program.head_dim))
                    buffers[operation.output] = self._attend(operation, heads, rotations, step)
                case Gather():
                    buffers[operation.output] = buffers[operation.input].index_select(0, step.wanted)
                case Cap():
                    logits = buffers[operation.buffer].float()
                    buffers[operation.buffer] = logits.div_(operation.cap).tanh_().mul_(operation.cap)
                case Shrink():
                    pass  # its Linear does it
        self._outputs = {name: buffers[index] for name, index in self._program.outputs.items()}
        return buffers[self._logits].float()

    def output(self, name: str) -> Tensor:
        """The wanted rows of a declared output in the last step, (num_wanted, hidden_size)."""
        return self._outputs[name]

    def _multiply(self, operation: Linear[Weight], x: Tensor, step: StepInputs) -> Tensor:
        """(rows, width of input) to (rows, width of output)."""
        if step.adapted and operation.site is not None:
            is_wanted, site = operation.output in self._program.wanted, operation.site
            low = [(one.wanted if is_wanted else one.rows, self._adapters[one.adapter][site]) for one in step.adapted]
            if some := [(rows, weights) for rows, weights in low if weights is not None and len(rows)]:
                return _multiply_adapted(operation, x, some)
        if operation.gate is None:
            return operation.weight(x, operation.bias, operation.activation)
        return operation.gate(x, operation.gate_bias, operation.activation).mul_(operation.weight(x, operation.bias))

    def _attend(self, operation: Attend, heads: Tensor, rotations: dict[int, Tensor], step: StepInputs) -> Tensor:
        """Normalise and rotate in place, store keys and values, and attend.

        (rows, heads of queries, keys and values, head_dim) to (rows, width).
        """
        num_heads, num_rotated = self._program.num_heads, self._program.num_heads + self._program.num_kv_heads
        if operation.query_norm is not None:
            queries, keys = heads[:, :num_heads], heads[:, num_heads:num_rotated]
            for part, weight in ((queries, operation.query_norm), (keys, operation.key_norm)):
                part.copy_(functional.rms_norm(part, part.shape[-1:], weight, operation.norm_eps))
        if operation.rotations is not None:
            cosines, sines = rotations[id(operation.rotations)].unbind(1)  # (rows, 1, channels) each
            rotated = heads[:, :num_rotated, : cosines.shape[-1]]
            swapped = rotated.roll(cosines.shape[-1] // 2, dims=2)
            rotated.mul_(cosines).addcmul_(swapped, sines)
        queries, keys_values = heads[:, :num_heads], heads[:, num_heads:]
        step.attention.write(operation.layer, keys_values)
        if operation.is_wanted:
            queries = queries.index_select(0, step.wanted)
        scale, softcap, window = operation.scale, operation.softcap, operation.window
        return step.attention(operation.layer, queries, scale, softcap, window, operation.is_wanted)


def _multiply_adapted(operation: Linear[Weight], x: Tensor, low: list[tuple[Tensor, LowRank[Tensor]]]) -> Tensor:
    """What adapters add to some rows is added before the activation."""
    y, activate = operation.weight(x, operation.bias), ACTIVATIONS[operation.activation]
    gate = None if operation.gate is None else operation.gate(x, operation.gate_bias)
    for rows, weights in low:
        shrunk = functional.linear(x.index_select(0, rows), weights.down)
        for grown, by in ((y, weights.up), (gate, weights.gate)):
            if grown is not None and by is not None:
                grown.index_add_(0, rows, functional.linear(shrunk, by))
    return activate(y) if gate is None else activate(gate).mul_(y)
