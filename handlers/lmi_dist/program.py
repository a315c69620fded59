"""The program of a decoder: its operations and their weights, from a checkpoint and the name table of its family.

All tokens of a step are rows of the same buffers. Behind the attention of the last layer only the tokens whose logits
are wanted go on, in buffers of their own. Heads stay in the order of the checkpoint: the queries that share a key head
are neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Generic, TypeAlias

import numpy as np

from handlers.lmi_dist.about import LoraLimits
from handlers.lmi_dist.captured import HIDDEN_STATES, declared_names, hidden_names, layer_name
from handlers.lmi_dist.facts import ModelFacts
from handlers.lmi_dist.families import Architecture
from handlers.lmi_dist.operations import (
    Attend,
    Cap,
    Embed,
    Gather,
    Linear,
    Norm,
    Operation,
    Pack,
    Packed,
    Program,
    Shrink,
    Table,
)
from handlers.lmi_dist.weights import BFLOAT16, Array, Checkpoint, as_float32
from lmi.executor import Progress
from lmi.settings.config import EngineConfig

Place: TypeAlias = Callable[[Array], Table]
"""Gives the form in which a runner reads what is not packed: a norm or a bias in float32, or a table."""


def in_float32(array: Array) -> Array:
    """The form for the native kernels. A bfloat16 table stays as it is, mapped from its file."""
    return array if array.dtype == BFLOAT16 else np.ascontiguousarray(as_float32(array))


def load(
    facts: ModelFacts,
    config: EngineConfig,
    max_length: int,
    progress: Progress,
    pack: Pack[Packed],
    place: Place = in_float32,
) -> Program[Packed]:
    """The program of a checkpoint, with room for adapters where the options enable them."""
    assert facts.architecture is not None
    outputs = declared_names(config, hidden_names(facts.num_layers))
    checkpoint = Checkpoint(facts.path, allow_pickle=config.allow_pickle, progress=progress)  # refuses pickles
    has_head, limits = facts.pooling is None, LoraLimits.of(config.options)
    program = build(facts.architecture, checkpoint, pack, max_length, place, outputs, has_head=has_head)
    return program if limits is None else adapted(program, limits.max_rank)


@dataclass(frozen=True, slots=True)
class _Rows:
    """The buffers that have the same tokens as rows."""

    x: int  # the residual, (hidden_size,)
    h: int  # what a block reads, (hidden_size,)
    heads: int  # what attention gives, (num_heads * head_dim,)
    up: int  # the inside of the feed-forward, (intermediate_size,)


_ALL, _QKV, _WANTED, _GATHERED = _Rows(0, 1, 2, 3), 4, _Rows(5, 6, 7, 8), 9  # from _GATHERED on: outputs, then logits


def build(
    architecture: Architecture,
    checkpoint: Checkpoint,
    pack: Pack[Packed],
    max_length: int,
    place: Place = in_float32,
    outputs: Collection[str] = (),
    *,
    has_head: bool = True,
) -> Program[Packed]:
    """Read every tensor once, in the order of the operations, and pack or place it before the next one is read.

    `outputs` are the names of those that each step gives beside the logits; a hidden state that the layers write over
    is gathered for the wanted rows. Without a head the states behind the last norm stand in the place of the logits.
    """
    a = architecture
    kept = _buffers_of(a, outputs)
    logits = _GATHERED + sum(buffer >= _GATHERED for buffer in kept.values())
    reader = _WeightReader(a, checkpoint, pack, max_length, place)
    operations: list[Operation[Packed]] = [reader.embed(_ALL.x)]
    for layer in range(a.num_layers):
        operations += _layer(reader, layer)
        if (output := kept.get(layer_name(layer), _ALL.x)) >= _GATHERED:
            operations.append(Gather(_ALL.x, output))
    operations += _head(reader, logits) if has_head else [reader.norm("norm", _WANTED.x, logits)]
    row = (a.hidden_size, a.hidden_size, a.num_heads * a.head_dim, a.intermediate_size)
    return Program(
        operations=tuple(operations),
        widths=(
            *(*row, sum(_qkv_widths(a)), *row, *[a.hidden_size] * (logits - _GATHERED)),
            a.vocab_size if has_head else a.hidden_size,
        ),
        wanted=frozenset(range(_WANTED.x, logits + 1)),
        outputs=kept,
        num_layers=a.num_layers,
        num_heads=a.num_heads,
        num_kv_heads=a.num_kv_heads,
        head_dim=a.head_dim,
        vocab_size=a.vocab_size,
        max_length=max_length,
    )


def _buffers_of(a: Architecture, outputs: Collection[str]) -> dict[str, int]:
    """The buffer of each output: one that the last operations leave as it is, or one of its own."""
    left = {HIDDEN_STATES: _WANTED.h if "norm" in a.names else _WANTED.x, layer_name(a.num_layers - 1): _WANTED.x}
    gathered = [name for name in hidden_names(a.num_layers) if name in outputs and name not in left]
    return {name: buffer for name, buffer in left.items() if name in outputs} | {
        name: buffer for buffer, name in enumerate(gathered, start=_GATHERED)
    }


def _layer(reader: _WeightReader[Packed], layer: int) -> Iterator[Operation[Packed]]:
    """Attention of all tokens, and the feed-forward: in the last layer only of the wanted ones.

    x += output(heads); x += feed_forward(norm(x)), as in Llama. Phi feeds forward the h that attention has read. In the
    first transformers a norm follows each sum instead.
    """
    a, is_last = reader.architecture, layer == reader.architecture.num_layers - 1
    rows = _WANTED if is_last else _ALL
    if not a.is_post_norm:
        yield reader.norm("input_norm", _ALL.x, _ALL.h, layer)
    yield reader.qkv(layer, _ALL.x if a.is_post_norm else _ALL.h, _QKV)
    yield reader.attend(layer, _QKV, rows.heads, is_wanted=is_last)
    if is_last:
        yield Gather(_ALL.x, rows.x)
    if is_last and a.is_parallel:
        yield Gather(_ALL.h, rows.h)
    yield from _added(reader, "o", layer, rows.heads, rows, "post_attention_norm")
    if a.is_post_norm:
        yield reader.norm("input_norm", rows.x, rows.x, layer)
    elif not a.is_parallel:
        yield reader.norm("mlp_norm", rows.x, rows.h, layer)
    yield reader.up(layer, rows.x if a.is_post_norm else rows.h, rows.up)
    yield from _added(reader, "down", layer, rows.up, rows, "post_mlp_norm")
    if a.is_post_norm:
        yield reader.norm("mlp_norm", rows.x, rows.x, layer)


def _added(
    reader: _WeightReader[Packed], name: str, layer: int, input: int, rows: _Rows, norm: str
) -> Iterator[Operation[Packed]]:
    """x += linear(input), or x += norm(linear(input)) in a family with this norm, as Gemma 2."""
    if norm not in reader.architecture.names:
        yield reader.back(name, layer, input, rows.x, adds=True)
    else:
        yield reader.back(name, layer, input, rows.h)
        yield reader.norm(norm, rows.h, rows.x, layer, adds=True)


def _head(reader: _WeightReader[Packed], logits: int) -> Iterator[Operation[Packed]]:
    """The last norm, which not every family has, and the logits."""
    a = reader.architecture
    if "norm" in a.names:
        yield reader.norm("norm", _WANTED.x, _WANTED.h)
    yield reader.head(_WANTED.h if "norm" in a.names else _WANTED.x, logits)
    if a.final_softcap is not None:
        yield Cap(logits, a.final_softcap)


class _WeightReader(Generic[Packed]):
    """Reads tensors by the name table, and makes operations of them."""

    def __init__(
        self,
        architecture: Architecture,
        checkpoint: Checkpoint,
        pack: Pack[Packed],
        max_length: int,
        place: Place,
    ) -> None:
        a = self.architecture = architecture
        self._checkpoint, self._pack, self._max_length, self._place = checkpoint, pack, max_length, place
        name = a.names["embedding"] + ".weight"
        # A checkpoint of the model without its head lacks the first word of each name.
        self._has_prefix = name in checkpoint or name.partition(".")[2] not in checkpoint
        self._embedding = self._take("embedding", (a.vocab_size, a.embedding_size or a.hidden_size))
        self._rotations = {one: place(one.rotations(max_length)) for one in set(a.rotaries) if one is not None}

    def embed(self, output: int) -> Embed:
        """Narrow embeddings are projected to the hidden size here, not in every step."""
        a, table = self.architecture, self._embedding
        if "project_in" in a.names:
            table = as_float32(table) @ as_float32(self._take("project_in", (a.hidden_size, a.embedding_size))).T
        table, positions = self._place(table), None
        if "positions" in a.names:
            rows = self._take("positions", (a.context_length + a.position_offset, a.hidden_size))
            positions = self._placed(rows[a.position_offset :][: self._max_length])
        return Embed(output, table, a.embedding_scale, positions)

    def norm(self, name: str, input: int, output: int, layer: int | None = None, adds: bool = False) -> Norm:
        a, is_centred = self.architecture, self.architecture.norm == "layer"
        weight = self._take(name, (a.hidden_size,), layer)
        bias = self._take(name, (a.hidden_size,), layer, "bias") if is_centred else None
        return Norm(input, output, self._offset(weight), a.norm_eps, self._placed(bias), is_centred, adds)

    def qkv(self, layer: int, input: int, output: int) -> Linear[Packed]:
        """One linear for all queries, then all keys, then all values."""
        a, widths = self.architecture, _qkv_widths(self.architecture)
        if "qkv" in a.names:
            weight, bias = self._linear("qkv", layer, sum(widths), a.hidden_size)
        else:
            parts = [self._linear(name, layer, width, a.hidden_size) for name, width in zip("qkv", widths, strict=True)]
            weight = _joined([weight for weight, _ in parts])
            biases = [bias for _, bias in parts if bias is not None]
            bias = _joined(biases) if biases else None
        return Linear(input, output, self._pack(weight), self._placed(bias))

    def attend(self, layer: int, input: int, output: int, is_wanted: bool) -> Attend:
        a = self.architecture
        rotary = a.rotaries[layer]
        return Attend(
            input,
            output,
            layer,
            a.scale,
            softcap=a.softcap,
            window=a.windows[layer],
            rotations=None if rotary is None else self._rotations[rotary],
            query_norm=self._head_norm("q_norm", layer),
            key_norm=self._head_norm("k_norm", layer),
            norm_eps=a.norm_eps,
            is_wanted=is_wanted,
        )

    def _head_norm(self, name: str, layer: int) -> Table | None:
        a = self.architecture
        return self._offset(self._take(name, (a.head_dim,), layer)) if name in a.names else None

    def back(self, name: str, layer: int, input: int, output: int, adds: bool = False) -> Linear[Packed]:
        """The linear from heads, `o`, or from the inside of the feed-forward, `down`, to the hidden size."""
        a = self.architecture
        num_in = a.num_heads * a.head_dim if name == "o" else a.intermediate_size
        weight, bias = self._linear(name, layer, a.hidden_size, num_in)
        return Linear(input, output, self._pack(weight), self._placed(bias), adds=adds)

    def up(self, layer: int, input: int, output: int) -> Linear[Packed]:
        """The first linear of the feed-forward, with its activation and, in most families, its gate."""
        a = self.architecture
        shape = (a.intermediate_size, a.hidden_size)
        if "gate_up" in a.names:
            both, _ = self._linear("gate_up", layer, 2 * a.intermediate_size, a.hidden_size)
            gate, weight = both[: a.intermediate_size], both[a.intermediate_size :]
            return Linear(input, output, self._pack(weight), gate=self._pack(gate), activation=a.activation)
        weight, bias = self._linear("up", layer, *shape)
        linear = Linear(input, output, self._pack(weight), self._placed(bias), activation=a.activation)
        if "gate" not in a.names:
            return linear
        gate, gate_bias = self._linear("gate", layer, *shape)
        return replace(linear, gate=self._pack(gate), gate_bias=self._placed(gate_bias))

    def head(self, input: int, output: int) -> Linear[Packed]:
        """Narrow embeddings are projected from the hidden size here, not in every step."""
        a, weight = self.architecture, self._embedding
        if not a.is_tied:
            weight = self._take("head", weight.shape)
        if "project_out" in a.names:
            weight = as_float32(weight) @ as_float32(self._take("project_out", (a.embedding_size, a.hidden_size)))
        return Linear(input, output, self._pack(weight), self._placed(self._bias("head", None, a.vocab_size)))

    def _linear(self, name: str, layer: int, num_out: int, num_in: int) -> tuple[Array, Array | None]:
        """The weight (num_out, num_in) as the checkpoint has it, and the bias (num_out,) or None."""
        is_transposed = self.architecture.is_transposed
        weight = self._take(name, (num_in, num_out) if is_transposed else (num_out, num_in), layer)
        return weight.T if is_transposed else weight, self._bias(name, layer, num_out)

    def _bias(self, name: str, layer: int | None, size: int) -> Array | None:
        """The bias (size,), or None if this linear has none."""
        if name not in self.architecture.biases:
            return None
        return self._take(name, (size,), layer, "bias")

    def _take(self, name: str, shape: tuple[int, ...], layer: int | None = None, part: str = "weight") -> Array:
        path = self.architecture.names[name].format(layer)
        if not self._has_prefix and name != "head":
            path = path.partition(".")[2]
        return self._checkpoint.take(f"{path}.{part}", shape)

    def _offset(self, weight: Array) -> Table:
        """The weight of a norm, which a family may keep as a difference from 1."""
        return self._place(as_float32(weight) + np.float32(self.architecture.norm_offset))

    def _placed(self, array: Array | None) -> Table | None:
        return None if array is None else self._place(as_float32(array))


def _joined(arrays: list[Array]) -> Array:
    """One below the other, in their dtype if they have the same one."""
    return np.concatenate(arrays if len({one.dtype for one in arrays}) == 1 else list(map(as_float32, arrays)))


def _qkv_widths(a: Architecture) -> tuple[int, int, int]:
    """The channels of all queries, all keys and all values."""
    return a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim, a.num_kv_heads * a.head_dim


# Adapters. A program joins what transformers keeps apart: queries, keys and values, or the gate beside its linear. So a
# site is a linear of the program, in the order of these.

MAX_MODULES = 3  # of one site


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of a module that are rows of the site's weight, or of its gate."""

    first: int  # of the module
    num: int
    row: int  # of the site
    is_gate: bool = False


@dataclass(frozen=True, slots=True)
class Module:
    """A linear of transformers."""

    path: str
    num_in: int
    num_out: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Site:
    num_in: int
    num_out: int
    modules: tuple[Module, ...]  # none: no adapter can change it


def sites_of(architecture: Architecture) -> tuple[Site, ...]:
    a = architecture
    path, shape = a.names["head"], (a.hidden_size, a.vocab_size)
    # The head cannot be changed where its weight is joined with a projection.
    head = Site(*shape, () if "project_out" in a.names else (Module(path, *shape, (Piece(0, a.vocab_size, 0),)),))
    return (*(site for layer in range(a.num_layers) for site in _sites_of_layer(a, layer)), head)


def adapted(program: Program[Packed], max_rank: int) -> Program[Packed]:
    """The same program for batches in which rows may have adapters of at most this rank.

    A Shrink stands before each linear, and what it writes in two buffers before the last: of all and of wanted rows.
    """
    logits, width = len(program.widths) - 1, MAX_MODULES * max_rank
    operations: list[Operation[Packed]] = []
    num_sites = 0
    for operation in program.operations:
        if isinstance(operation, Linear):
            low = logits + (operation.output in program.wanted)
            operations.append(Shrink(operation.input, low, num_sites))
            output = logits + 2 if operation.output == logits else operation.output
            operation = replace(operation, output=output, site=num_sites, low=low)
            num_sites += 1
        elif isinstance(operation, Cap):
            operation = replace(operation, buffer=logits + 2)
        operations.append(operation)
    return replace(
        program,
        operations=tuple(operations),
        widths=(*program.widths[:-1], width, width, program.widths[-1]),
        wanted=program.wanted - {logits} | {logits + 1, logits + 2},
        num_sites=num_sites,
    )


def _sites_of_layer(a: Architecture, layer: int) -> Iterator[Site]:
    def module(name: str, num_in: int, *pieces: Piece) -> Module:
        return Module(a.names[name].format(layer), num_in, sum(piece.num for piece in pieces), pieces)

    num_heads, num_keys, inner = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim, a.intermediate_size
    width = num_heads + 2 * num_keys
    qkv = {"q": (num_heads, 0), "k": (num_keys, num_heads), "v": (num_keys, num_heads + num_keys), "qkv": (width, 0)}
    feed_forward = {
        "up": (Piece(0, inner, 0),),
        "gate": (Piece(0, inner, 0, is_gate=True),),
        "gate_up": (Piece(0, inner, 0, is_gate=True), Piece(inner, inner, 0)),
    }
    heads = [module(name, a.hidden_size, Piece(0, num, row)) for name, (num, row) in qkv.items() if name in a.names]
    first = [module(name, a.hidden_size, *pieces) for name, pieces in feed_forward.items() if name in a.names]
    yield Site(a.hidden_size, width, tuple(heads))
    yield Site(num_heads, a.hidden_size, (module("o", num_heads, Piece(0, a.hidden_size, 0)),))
    yield Site(a.hidden_size, inner, tuple(first))
    yield Site(inner, a.hidden_size, (module("down", inner, Piece(0, a.hidden_size, 0)),))
