"""The operations of a program in float64, one whole sequence at a time, as plainly as torch can say
them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from handlers.lmi_dist.operations import Attend, Cap, Embed, Gather, Linear, Norm, Program

_ACTIVATIONS = {
    "none": lambda x: x,
    "silu": functional.silu,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


def logits_of(program: Program[Tensor], ids: list[int]) -> Tensor:
    """What the last operation leaves for every token of the sequence, (len(ids), vocab_size),
    float64.
    """
    buffers = [torch.zeros(len(ids), width, dtype=torch.float64) for width in program.widths]
    tokens = torch.tensor(ids)
    for operation in program.operations:
        match operation:
            case Embed():
                x = operation.table[tokens].double() * operation.scale
                positions = operation.positions
                result = x if positions is None else x + positions[: len(ids)].double()
            case Norm():
                result = _norm(buffers[operation.input], operation)
            case Linear():
                result = _linear(buffers[operation.input], operation)
            case Attend():
                result = _attend(buffers[operation.input], operation, program)
            case Gather():
                result = buffers[operation.input]
            case Cap():
                result = operation.cap * torch.tanh(buffers[operation.buffer] / operation.cap)

        output = operation.buffer if isinstance(operation, Cap) else operation.output
        adds = isinstance(operation, Norm | Linear) and operation.adds
        buffers[output] = buffers[output] + result if adds else result

    return buffers[-1]


def _norm(x: Tensor, norm: Norm) -> Tensor:
    if norm.is_centred:
        x = x - x.mean(dim=-1, keepdim=True)

    x = _rms_norm(x, norm.weight, norm.eps)
    return x if norm.bias is None else x + norm.bias.double()


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight.double()


def _linear(x: Tensor, linear: Linear[Tensor]) -> Tensor:
    activation = _ACTIVATIONS[linear.activation]
    value = functional.linear(x, linear.weight.double(), _double(linear.bias))
    if linear.gate is None:
        return activation(value)

    return activation(functional.linear(x, linear.gate.double(), _double(linear.gate_bias))) * value


def _attend(x: Tensor, attend: Attend, program: Program[Tensor]) -> Tensor:
    num_tokens = len(x)
    num_kv_heads = program.num_kv_heads
    head_dim = program.head_dim
    heads = x.view(num_tokens, -1, head_dim).transpose(0, 1)
    queries, keys, values = heads.split((program.num_heads, num_kv_heads, num_kv_heads))
    if attend.query_norm is not None:
        queries = _rms_norm(queries, attend.query_norm, attend.norm_eps)

    if attend.key_norm is not None:
        keys = _rms_norm(keys, attend.key_norm, attend.norm_eps)

    if attend.rotations is not None:
        queries, keys = _rotate(queries, attend.rotations), _rotate(keys, attend.rotations)

    group = program.num_heads // num_kv_heads
    scores = queries @ keys.repeat_interleave(group, dim=0).transpose(1, 2) * attend.scale
    if attend.softcap is not None:
        scores = attend.softcap * torch.tanh(scores / attend.softcap)

    distance = torch.arange(num_tokens)[:, None] - torch.arange(num_tokens)
    is_hidden = (distance < 0) | (distance >= (attend.window or num_tokens))
    weights = torch.softmax(scores.masked_fill(is_hidden, float("-inf")), dim=-1)
    return (
        (weights @ values.repeat_interleave(group, dim=0)).transpose(0, 1).reshape(num_tokens, -1)
    )


def _rotate(heads: Tensor, rotations: Tensor) -> Tensor:
    cosines, sines = rotations[: heads.shape[1]].double().unbind(1)  # (tokens, num_pairs)
    num_pairs = cosines.shape[1]
    low, high, unturned = heads.split((num_pairs, num_pairs, heads.shape[2] - 2 * num_pairs), dim=2)
    return torch.cat((low * cosines - high * sines, high * cosines + low * sines, unturned), dim=2)


def _double(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.double()
