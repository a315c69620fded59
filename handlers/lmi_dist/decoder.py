"""The generic decoder: one layer with switches, built from a checkpoint by the name table of its family.

Projections of query, key and value are fused, and weights are packed. Heads are stored as (group, kv_head), so that the
queries of one key head fold into one attention call without a copy. All tokens of a step, decodes and prompt chunks, go
through one matrix of rows. The decoder knows nothing of requests or scheduling.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from handlers.lmi_dist.attention import Attention
from handlers.lmi_dist.elementwise import ACTIVATIONS, gate, rotate
from handlers.lmi_dist.families import Architecture
from handlers.lmi_dist.linear import Linear, LinearBuilder
from handlers.lmi_dist.model import StepTensors
from handlers.lmi_dist.rotary import Rotary
from handlers.lmi_dist.weights import Checkpoint

Norm = Callable[[Tensor], Tensor]


class Decoder:
    """A whole model. Call it with a StepTensors for the logits of the wanted rows, (num_wanted, vocab_size)."""

    def __init__(
        self,
        architecture: Architecture,
        checkpoint: Checkpoint,
        build: LinearBuilder,
        attention: Attention,
        max_length: int,
    ) -> None:
        reader = _Reader(architecture, checkpoint, build)
        self.architecture = architecture
        self.embedding, head = reader.embedding_and_head()
        self.positions = reader.positions()
        self.rotations = {
            rotary: rotary.table(max_length, architecture.head_dim, build.device)[:, None, None]
            for rotary in set(architecture.rotaries)
            if rotary is not None
        }
        self.layers = [Layer(reader, index, attention) for index in range(architecture.num_layers)]
        self.norm = reader.norm("norm")
        self.head = build(head, reader.head_bias())

    def kinds(self) -> list[Layer]:
        """One layer of each kind. Layers of one kind differ only in their weights."""
        return list({(layer.window, layer.rotary): layer for layer in reversed(self.layers)}.values())

    def __call__(self, step: StepTensors, layers: list[Layer] | None = None) -> Tensor:
        """Logits after all layers, or after a few of them."""
        x = self.embedding.index_select(0, step.token_ids)  # (rows, hidden_size)
        if self.architecture.embedding_scale != 1.0:
            x = x * self.architecture.embedding_scale
        if self.positions is not None:
            x = x + self.positions.index_select(0, step.positions)
        rotations = {rotary: table.index_select(0, step.positions) for rotary, table in self.rotations.items()}
        for layer in layers or self.layers:
            x = layer(x, step, rotations)
        logits = self.head(self.norm(x.index_select(0, step.wanted))).float()  # (num_wanted, vocab_size)
        cap = self.architecture.final_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


class RmsNorm:
    """x / root-mean-square(x) * weight over the last dimension.

    torch computes it in a chain of a dozen small calls, a tenth of a small model's step. In float32 five calls are
    enough: the division by n is done beforehand, with sqrt(n) in the weight and n in eps.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        """`weight` is (num_channels,), or (group + 1, 1, head_dim) for the norms of heads."""
        num_channels = weight.shape[-1]
        self.weight, self.eps = weight, eps
        self._scaled_weight, self._sum_eps = weight * num_channels**0.5, eps * num_channels

    def __call__(self, x: Tensor) -> Tensor:
        """(…, num_channels) to the same shape."""
        if x.dtype != torch.float32:
            return functional.rms_norm(x, x.shape[-1:], None, self.eps) * self.weight
        scale = (x * x).sum(-1, keepdim=True).add_(self._sum_eps).rsqrt_()
        return (x * scale).mul_(self._scaled_weight)


class Layer:
    """One block: attention and feed-forward, in sequence or in parallel, with the norms of its family."""

    def __init__(self, reader: _Reader, index: int, attention: Attention) -> None:
        a = reader.architecture
        self.index, self.attention = index, attention
        self.rotary, self.window = a.rotaries[index], a.windows[index]
        self.scale, self.softcap = a.scale, a.softcap
        self.num_kv_heads, self.head_dim, self.group = a.num_kv_heads, a.head_dim, a.num_heads // a.num_kv_heads
        self.is_parallel, self.is_post_norm = a.is_parallel, a.is_post_norm
        self.qkv = reader.qkv(index)
        self.head_norms = reader.head_norms(index)
        self.o = reader.output(index)
        self.is_gated, self.activation = a.is_gated, ACTIVATIONS[a.activation]
        self.up, self.down = reader.feed_forward(index)
        self.input_norm = reader.norm("input_norm", index)
        self.post_attention_norm = reader.norm("post_attention_norm", index)
        self.mlp_norm = reader.norm("mlp_norm", index)
        self.post_mlp_norm = reader.norm("post_mlp_norm", index)

    def __call__(self, x: Tensor, step: StepTensors, rotations: Mapping[Rotary, Tensor]) -> Tensor:
        """(rows, hidden_size) to the same shape; each of `rotations` is (rows, 1, 1, head_dim / 2)."""
        if self.is_parallel:
            h = self.input_norm(x)
            return self.o(self._attend(h, step, rotations)).add_(self.down(self._expand(h))).add_(x)
        if self.is_post_norm:
            x = self.input_norm(self.o(self._attend(x, step, rotations)).add_(x))
            return self.mlp_norm(self.down(self._expand(x)).add_(x))
        h = self.o(self._attend(self.input_norm(x), step, rotations))
        x = self.post_attention_norm(h).add_(x)
        h = self.down(self._expand(self.mlp_norm(x)))
        return self.post_mlp_norm(h).add_(x)

    def _expand(self, h: Tensor) -> Tensor:
        """(rows, hidden_size) to (rows, intermediate_size)."""
        h = self.up(h)
        return gate(h, self.activation) if self.is_gated else h

    def _attend(self, h: Tensor, step: StepTensors, rotations: Mapping[Rotary, Tensor]) -> Tensor:
        """(rows, hidden_size) to (rows, num_heads * head_dim)."""
        group, num_kv_heads, head_dim = self.group, self.num_kv_heads, self.head_dim
        heads = self.qkv(h).view(len(h), group + 2, num_kv_heads, head_dim)  # queries, then keys, then values
        rotated, values = heads[:, : group + 1], heads[:, group + 1 :]
        if self.head_norms is not None:
            rotated = self.head_norms(rotated)
        if self.rotary is not None:
            rotated = rotate(rotated, rotations[self.rotary])
        if rotated.data_ptr() == heads.data_ptr():
            keys_values = heads[: step.num_tokens, group:]
        else:
            keys_values = torch.cat((rotated[: step.num_tokens, group:], values[: step.num_tokens]), dim=1)
        self.attention.kv.write(self.index, step.cells, keys_values.reshape(-1, head_dim))
        queries = rotated[:, :group]
        if step.queries is not None:
            step.queries[:, :group] = queries
            queries = step.queries
        return self.attention(self.index, queries, step.views[self.window], self.scale, self.softcap)


class _Reader:
    """A reader takes tensors by the name table, fuses and reorders them, and builds linears and norms."""

    def __init__(self, architecture: Architecture, checkpoint: Checkpoint, build: LinearBuilder) -> None:
        self.architecture, self._checkpoint, self._build = architecture, checkpoint, build
        embedding = architecture.names["embedding"] + ".weight"
        # A checkpoint of the model without its head lacks the first word of each name.
        self._has_prefix = embedding in checkpoint or embedding.partition(".")[2] not in checkpoint

    def embedding_and_head(self) -> tuple[Tensor, Tensor]:
        """The lookup table (vocab_size, hidden_size) and the weight of the head, which may be the same tensor."""
        a = self.architecture
        if "project_in" not in a.names:
            table = self._matrix("embedding", (a.vocab_size, a.hidden_size))
            return table, table if a.is_tied else self._matrix("head", (a.vocab_size, a.hidden_size))
        # Fold the projections to and from narrow embeddings into the two tables.
        into = self._matrix("project_in", (a.hidden_size, a.embedding_size))
        out = self._matrix("project_out", (a.embedding_size, a.hidden_size))
        table = self._matrix("embedding", (a.vocab_size, a.embedding_size))
        head = table if a.is_tied else self._matrix("head", tuple(table.shape))
        return table @ into.t(), head @ out

    def head_bias(self) -> Tensor | None:
        """The bias of the head, (vocab_size,), or None."""
        return self._bias("head", None, self.architecture.vocab_size)

    def positions(self) -> Tensor | None:
        """The table of learned positions, (context_length, hidden_size), or None if the family has none."""
        a = self.architecture
        if "positions" not in a.names:
            return None
        return self._matrix("positions", (a.context_length + a.position_offset, a.hidden_size))[a.position_offset :]

    def qkv(self, layer: int) -> Linear:
        """One linear for queries in order (group, kv_head), then keys, then values in order of kv_head."""
        a = self.architecture
        widths = (a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim, a.num_kv_heads * a.head_dim)
        if "qkv" in a.names:
            weight, bias = self._linear("qkv", layer, sum(widths), a.hidden_size)
            biases = (None,) * 3 if bias is None else bias.split(widths)
            parts = list(zip(weight.split(widths), biases, strict=True))
        else:
            parts = [self._linear(name, layer, width, a.hidden_size) for name, width in zip("qkv", widths, strict=True)]
        ordered = [
            (self._order(weight, index, layer), None if bias is None else self._order(bias, index, layer))
            for index, (weight, bias) in enumerate(parts)
        ]
        return self._build(*_join(ordered))

    def _order(self, part: Tensor, index: int, layer: int) -> Tensor:
        """The rows of the query (0), key (1) or value (2) projection, in the order that the step needs.

        `part` is a weight (heads * head_dim, hidden_size) or a bias (heads * head_dim,).
        """
        a, rest = self.architecture, part.shape[1:]
        heads = part.view(a.num_kv_heads, -1, a.head_dim, *rest).transpose(0, 1)  # (group, kv_head, channel, ...)
        if index < 2 and (rotary := a.rotaries[layer]) is not None:
            heads = heads.index_select(2, rotary.interleave(a.head_dim).to(part.device))
        return heads.reshape(-1, *rest)

    def head_norms(self, layer: int) -> Norm | None:
        """One norm for all heads of query and key, or None if the family has none."""
        a = self.architecture
        if "q_norm" not in a.names:
            return None
        weights = []
        for name in ("q_norm", "k_norm"):
            weight = self._vector(name, layer, a.head_dim) + a.norm_offset
            rotary = a.rotaries[layer]
            weights.append(weight if rotary is None else weight[rotary.interleave(a.head_dim).to(weight.device)])
        of_heads = torch.stack([weights[0]] * (a.num_heads // a.num_kv_heads) + [weights[1]])
        return RmsNorm(of_heads[:, None], a.norm_eps)  # (group + 1, 1, head_dim)

    def output(self, layer: int) -> Linear:
        """The output projection, with its columns in the order of attention's output."""
        a = self.architecture
        weight, bias = self._linear("o", layer, a.hidden_size, a.num_heads * a.head_dim)
        columns = weight.view(a.hidden_size, a.num_kv_heads, -1, a.head_dim).transpose(1, 2)
        return self._build(columns.reshape(a.hidden_size, -1), bias)

    def feed_forward(self, layer: int) -> tuple[Linear, Linear]:
        """The linears up and down. Up gives gate and value side by side; without a gate it applies the activation."""
        a = self.architecture
        if "gate_up" in a.names:
            up = self._build(*self._linear("gate_up", layer, 2 * a.intermediate_size, a.hidden_size))
        elif a.is_gated:
            parts = [self._linear(name, layer, a.intermediate_size, a.hidden_size) for name in ("gate", "up")]
            up = self._build(*_join(parts))
        else:
            up = self._build(*self._linear("up", layer, a.intermediate_size, a.hidden_size), a.activation)
        return up, self._build(*self._linear("down", layer, a.hidden_size, a.intermediate_size))

    def norm(self, name: str, layer: int | None = None) -> Norm:
        """The norm `name`. In a family without it, it leaves the tensor as it is."""
        if name not in self.architecture.names:
            return _unchanged
        a, shape = self.architecture, (self.architecture.hidden_size,)
        weight = self._vector(name, layer, *shape) + a.norm_offset
        if a.norm == "rms":
            return RmsNorm(weight, a.norm_eps)
        bias = self._take(self._path(name, layer) + ".bias", shape)
        return lambda x: functional.layer_norm(x, shape, weight, bias, a.norm_eps)

    def _linear(self, name: str, layer: int, num_out: int, num_in: int) -> tuple[Tensor, Tensor | None]:
        """The weight (num_out, num_in), and the bias (num_out,) or None."""
        is_transposed = self.architecture.is_transposed
        weight = self._matrix(name, (num_in, num_out) if is_transposed else (num_out, num_in), layer)
        return weight.t() if is_transposed else weight, self._bias(name, layer, num_out)

    def _bias(self, name: str, layer: int | None, size: int) -> Tensor | None:
        """The bias (size,), or None if this linear has none."""
        if name not in self.architecture.biases:
            return None
        return self._take(self._path(name, layer) + ".bias", (size,))

    def _vector(self, name: str, layer: int | None, size: int) -> Tensor:
        """The weight (size,)."""
        return self._take(self._path(name, layer) + ".weight", (size,))

    def _matrix(self, name: str, shape: tuple[int, ...], layer: int | None = None) -> Tensor:
        """The weight, whose shape must be `shape`."""
        return self._take(self._path(name, layer) + ".weight", shape)

    def _path(self, name: str, layer: int | None) -> str:
        path = self.architecture.names[name].format(layer)
        return path if self._has_prefix or name == "head" else path.partition(".")[2]

    def _take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._checkpoint.take(name, shape, self._build.dtype).to(self._build.device)


def _unchanged(x: Tensor) -> Tensor:
    """Any shape."""
    return x


def _join(parts: Sequence[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
    """Several linears of the same input as one: weights (sum of num_out, num_in), biases (sum of num_out,)."""
    weights, biases = zip(*parts, strict=True)
    return torch.cat(weights), None if biases[0] is None else torch.cat(biases)
