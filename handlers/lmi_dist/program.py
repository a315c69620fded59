"""The program of a decoder: its operations and their weights, from a checkpoint and the name table
of its family.

All tokens of a step are rows of the same buffers. Behind the attention of the last layer only the
tokens whose logits are wanted go on, in buffers of their own. Heads stay in the order of the
checkpoint: the queries that share a key head are neighbours.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeAlias

import numpy as np

from handlers.lmi_dist.about import LoraLimits
from handlers.lmi_dist.arrays import BFLOAT16, Array, are_same_rows, as_float32
from handlers.lmi_dist.facts import ModelFacts
from handlers.lmi_dist.families import Architecture
from handlers.lmi_dist.gguf.block_rows import BlockRows
from handlers.lmi_dist.operations import (
    Attend,
    Cap,
    Embed,
    Gather,
    Linear,
    Norm,
    Operation,
    Pack,
    PackBlocks,
    Packed,
    Program,
    Shrink,
    Table,
)
from handlers.lmi_dist.output_names import HIDDEN_STATES, declared_names, hidden_names, layer_name
from handlers.lmi_dist.rotary import Rotary
from handlers.lmi_dist.unused_tensors import tell_unused
from handlers.lmi_dist.weights import Checkpoint
from lmi.executor import Progress
from lmi.settings.config import EngineConfig

log = logging.getLogger(__name__)

Weight: TypeAlias = "Array | BlockRows"
"""A weight (num_out, num_in) as the checkpoint has it."""

Place: TypeAlias = Callable[[Array], Table]
"""Gives the form in which a runner reads what is not packed: a norm or a bias in float32, or a
table.
"""


def in_float32(array: Array) -> Array:
    """The form for the native kernels. A bfloat16 table stays as it is, mapped from its file."""
    return array if array.dtype == BFLOAT16 else np.ascontiguousarray(as_float32(array))


@dataclass(frozen=True, slots=True)
class _Rows:
    """The buffers that have the same tokens as rows."""

    # The residual, (hidden_size,).
    x: int
    # What a block reads, (hidden_size,).
    h: int
    # What attention gives, (num_heads * head_dim,).
    heads: int
    # The inside of the feed-forward, (intermediate_size,).
    up: int


# From _GATHERED on there are outputs, then the logits.
_ALL = _Rows(0, 1, 2, 3)
_QKV = 4
_WANTED = _Rows(5, 6, 7, 8)
_GATHERED = 9


def load(
    facts: ModelFacts,
    config: EngineConfig,
    max_length: int,
    progress: Progress,
    pack: Pack[Packed],
    place: Place = in_float32,
    pack_blocks: PackBlocks[Packed] | None = None,
) -> Program[Packed]:
    """The program of a checkpoint, with room for adapters where the options enable them.

    With `pack_blocks` weights in blocks stay so, those of a GGUF file and most that are quantised
    already; else they become floats.
    Every tensor is read once, in the order of the operations, and packed or placed before the next
    one is read. A declared output that the layers write over is gathered for the wanted rows. An
    embedding model has no head: the states behind the last norm stand in the place of the logits.
    """
    assert facts.architecture is not None
    a = facts.architecture
    has_head = facts.pooling is None
    limits = LoraLimits.of(config.options)
    outputs = declared_names(config, hidden_names(a.num_layers))
    # It refuses pickles.
    checkpoint = Checkpoint(facts.path, allow_pickle=config.allow_pickle, progress=progress)
    reader = _Reader(a, checkpoint, pack, max_length, place, pack_blocks)
    # The last operations leave some outputs as they are. The others have buffers of their own.
    buffers = {
        HIDDEN_STATES: _WANTED.h if "norm" in a.names else _WANTED.x,
        layer_name(a.num_layers - 1): _WANTED.x,
    }
    gathered = [name for name in hidden_names(a.num_layers) if name in outputs]
    gathered = [name for name in gathered if name not in buffers]
    for buffer, name in enumerate(gathered, start=_GATHERED):
        buffers[name] = buffer

    logits = _GATHERED + len(gathered)
    operations: list[Operation[Packed]] = [reader.embed(_ALL.x)]
    for layer in range(a.num_layers):
        operations += _layer(reader, layer)
        if layer_name(layer) in gathered:
            operations.append(Gather(_ALL.x, buffers[layer_name(layer)]))

    if has_head:
        operations += _head(reader, logits)
    else:
        operations.append(reader.norm("norm", _WANTED.x, logits))

    tell_unused(facts.path, checkpoint.unused() - reader.on_purpose(has_head))
    checkpoint.release_pages()

    row = (a.hidden_size, a.hidden_size, a.num_heads * a.head_dim, a.intermediate_size)
    widths = (
        *row,
        sum(_qkv_widths(a)),
        *row,
        *[a.hidden_size] * len(gathered),
        a.vocab_size if has_head else a.hidden_size,
    )
    program = Program(
        operations=tuple(operations),
        widths=widths,
        wanted=frozenset(range(_WANTED.x, logits + 1)),
        outputs={name: buffers[name] for name in outputs},
        num_layers=a.num_layers,
        num_heads=a.num_heads,
        num_kv_heads=a.num_kv_heads,
        head_dim=a.head_dim,
        vocab_size=a.vocab_size,
        max_length=max_length,
    )

    if limits is None:
        return program

    return adapted(program, limits.max_rank)


def _layer(reader: _Reader[Packed], layer: int) -> Iterator[Operation[Packed]]:
    """Attention of all tokens, and the feed-forward: in the last layer only of the wanted ones.

    x += output(heads); x += feed_forward(norm(x)), as in Llama. Phi feeds forward the h that
    attention has read. In the first transformers a norm follows each sum instead.
    """
    a = reader.architecture
    is_last = layer == reader.architecture.num_layers - 1
    rows = _WANTED if is_last else _ALL
    qkv, o, up, down = _sites_of_layer(a, layer)
    if not a.is_post_norm:
        yield reader.norm("input_norm", _ALL.x, _ALL.h, layer)

    yield reader.linear(qkv, _ALL.x if a.is_post_norm else _ALL.h, _QKV)
    yield reader.attend(layer, _QKV, rows.heads, is_wanted=is_last)
    if is_last:
        yield Gather(_ALL.x, rows.x)

    if is_last and a.is_parallel:
        yield Gather(_ALL.h, rows.h)

    yield from _added(reader, o, rows.heads, rows, "post_attention_norm", layer)
    if a.is_post_norm:
        yield reader.norm("input_norm", rows.x, rows.x, layer)
    elif not a.is_parallel:
        yield reader.norm("mlp_norm", rows.x, rows.h, layer)

    yield reader.linear(up, rows.x if a.is_post_norm else rows.h, rows.up, activation=a.activation)
    yield from _added(reader, down, rows.up, rows, "post_mlp_norm", layer)
    if a.is_post_norm:
        yield reader.norm("mlp_norm", rows.x, rows.x, layer)


def _added(
    reader: _Reader[Packed], site: Site, input: int, rows: _Rows, norm: str, layer: int
) -> Iterator[Operation[Packed]]:
    """x += linear(input), or x += norm(linear(input)) in a family with this norm, as Gemma 2."""
    has_norm = norm in reader.architecture.names
    yield reader.linear(site, input, rows.h if has_norm else rows.x, adds=not has_norm)
    if has_norm:
        yield reader.norm(norm, rows.h, rows.x, layer, adds=True)


def _head(reader: _Reader[Packed], logits: int) -> Iterator[Operation[Packed]]:
    """The last norm, which not every family has, and the logits."""
    a = reader.architecture
    states = _WANTED.x
    if "norm" in a.names:
        states = _WANTED.h
        yield reader.norm("norm", _WANTED.x, states)

    yield reader.head(states, logits)
    if a.final_softcap is not None:
        yield Cap(logits, a.final_softcap)


class _Reader(Generic[Packed]):
    """Reads tensors by the name table, and makes operations of them."""

    def __init__(
        self,
        architecture: Architecture,
        checkpoint: Checkpoint,
        pack: Pack[Packed],
        max_length: int,
        place: Place,
        pack_blocks: PackBlocks[Packed] | None,
    ) -> None:
        a = architecture
        self.architecture = architecture
        self._checkpoint = checkpoint
        self._pack = pack
        self._pack_blocks = pack_blocks
        self._max_length = max_length
        self._place = place

        # A checkpoint of the model without its head lacks the first word of each name.
        path = a.names["embedding"]
        name = f"{path}.weight"
        short_name = name.partition(".")[2]
        self._has_prefix = name in checkpoint.files or short_name not in checkpoint.files
        self._embedding = self._take_weight(path, a.vocab_size, a.embedding_size or a.hidden_size)
        # What the table and a head that is tied to it share.
        self._packed_embedding: Packed | None = None

        self._rotations: dict[Rotary, Table] = {}
        for rotary in set(a.rotaries):
            if rotary is not None:
                self._rotations[rotary] = place(rotary.rotations(max_length))

    def embed(self, output: int) -> Embed:
        """Narrow embeddings are projected to the hidden size here, not in every step."""
        a = self.architecture
        positions = None
        table = self._table()
        positions_path = a.names.get("positions")
        if positions_path:
            rows = self._take(positions_path, a.context_length + a.position_offset, a.hidden_size)
            positions = self._placed(rows[a.position_offset :][: self._max_length])

        return Embed(output, table, a.embedding_scale, positions)

    def _table(self) -> Table:
        a = self.architecture
        embedding = self._embedding
        if isinstance(embedding, BlockRows):
            self._packed_embedding = self._packed([embedding])
            return self._packed_embedding

        projection_path = a.names.get("project_in")
        if projection_path:
            projection = self._take(projection_path, a.hidden_size, a.embedding_size)
            embedding = as_float32(embedding) @ as_float32(projection).T

        return self._place(embedding)

    def norm(
        self, name: str, input: int, output: int, layer: int | None = None, adds: bool = False
    ) -> Norm:
        a = self.architecture
        is_centred = self.architecture.norm == "layer"
        weight = self._norm_weight(name, a.hidden_size, layer)
        bias = None
        if is_centred:
            bias = self._take(a.names[name].format(layer), a.hidden_size, part="bias")

        return Norm(input, output, weight, a.norm_eps, self._placed(bias), is_centred, adds)

    def attend(self, layer: int, input: int, output: int, is_wanted: bool) -> Attend:
        a = self.architecture
        rotary = a.rotaries[layer]
        norms: dict[str, Table] = {}
        for field, name in (("query_norm", "q_norm"), ("key_norm", "k_norm")):
            if name in a.names:
                norms[field] = self._norm_weight(name, a.head_dim, layer)

        return Attend(
            input,
            output,
            layer,
            a.scale,
            softcap=a.softcap,
            window=a.windows[layer],
            rotations=None if rotary is None else self._rotations[rotary],
            norm_eps=a.norm_eps,
            is_wanted=is_wanted,
            **norms,
        )

    def linear(
        self, site: Site, input: int, output: int, *, activation: str = "none", adds: bool = False
    ) -> Linear[Packed]:
        """One linear for the modules of a site, one below the other, and beside it those that are
        its gate.
        """
        weights: list[Weight] = []
        biases: list[Array] = []
        gates: list[Weight] = []
        gate_biases: list[Array] = []
        for module in site.modules:
            weight, bias = self._weight_and_bias(module)
            for piece in module.pieces:
                rows = slice(piece.first, piece.first + piece.num)
                (gates if piece.is_gate else weights).append(weight[rows])
                if bias is not None:
                    (gate_biases if piece.is_gate else biases).append(bias[rows])

        packed = self._packed(weights)
        packed_gate = self._packed(gates) if gates else None

        return Linear(
            input,
            output,
            packed,
            self._placed(_joined(biases)),
            packed_gate,
            self._placed(_joined(gate_biases)),
            activation,
            adds,
        )

    def _packed(self, weights: Sequence[Weight]) -> Packed:
        """Pack weights, one below the other: as blocks if all are in blocks."""
        blocks = [weight for weight in weights if isinstance(weight, BlockRows)]
        if self._pack_blocks is not None and len(blocks) == len(weights):
            return self._pack_blocks(blocks)

        joined_weight = _joined([_floats(weight) for weight in weights])
        assert joined_weight is not None
        return self._pack(joined_weight)

    def _weight_and_bias(self, module: Module) -> tuple[Weight, Array | None]:
        is_transposed = self.architecture.is_transposed
        weight = self._take_weight(module.path, module.num_out, module.num_in, is_transposed)
        bias = None
        if module.has_bias:
            bias = self._take(module.path, module.num_out, part="bias")

        return weight, bias

    def head(self, input: int, output: int) -> Linear[Packed]:
        """Narrow embeddings are projected from the hidden size here, not in every step."""
        a = self.architecture
        packed = self._packed_head(self._head_weight())
        bias = None
        if "head" in a.biases:
            bias = self._take(a.names["head"], a.vocab_size, part="bias")

        return Linear(input, output, packed, self._placed(bias))

    def _packed_head(self, weight: Weight) -> Packed:
        if weight is self._embedding and self._packed_embedding is not None:
            return self._packed_embedding

        a = self.architecture
        path = a.names.get("project_out")
        if path and not isinstance(weight, BlockRows):
            projection = self._take(path, a.embedding_size, a.hidden_size)
            weight = as_float32(weight) @ as_float32(projection)

        return self._packed([weight])

    def _head_weight(self) -> Weight:
        """The head's own weight, or that of the embedding where both are the same.

        As in transformers and vLLM, a head in the file that differs counts more than what
        config.json says.
        """
        a = self.architecture
        embedding = self._embedding
        path = a.names["head"]
        name = f"{path}.weight"
        if a.is_tied and name not in self._checkpoint.files:
            return embedding

        head = self._take_weight(path, *embedding.shape)
        if not a.is_tied:
            return head

        if are_same_rows(_floats(head), _floats(embedding)):
            return embedding

        log.warning(
            "%s: %s is used although config.json says tie_word_embeddings: it is not the embedding",
            self._checkpoint.files[name],
            name,
        )
        return head

    def on_purpose(self, has_head: bool) -> set[str]:
        """The tensors that a program without a head does not read."""
        if has_head:
            return set()

        path = self.architecture.names["head"]
        return {f"{path}.weight", f"{path}.bias"}

    def _norm_weight(self, name: str, size: int, layer: int | None) -> Table:
        """The weight of a norm, which a family may keep as a difference from 1."""
        a = self.architecture
        weight = self._take(a.names[name].format(layer), size)
        return self._place(as_float32(weight) + np.float32(a.norm_offset))

    def _take_weight(
        self, path: str, num_out: int, num_in: int, is_transposed: bool = False
    ) -> Weight:
        """The weight (num_out, num_in) of a linear or a table, in blocks if it has any and they
        stay. Floats may be stored (num_in, num_out), if they are not quantised.
        """
        if self._pack_blocks is not None:
            name = self._name(path, "weight")
            blocks = self._checkpoint.take_blocks(name, (num_out, num_in))
            if blocks is not None:
                return blocks

        if is_transposed and self._name(path, "weight") not in self._checkpoint.quantised:
            return self._take(path, num_in, num_out).T

        return self._take(path, num_out, num_in)

    def _take(self, path: str, *shape: int, part: str = "weight") -> Array:
        return self._checkpoint.take(self._name(path, part), shape)

    def _name(self, path: str, part: str) -> str:
        """The name of a tensor in the checkpoint."""
        if not self._has_prefix and path != self.architecture.names["head"]:
            path = path.partition(".")[2]

        return f"{path}.{part}"

    def _placed(self, array: Array | None) -> Table | None:
        return None if array is None else self._place(as_float32(array))


def _floats(weight: Weight) -> Array:
    return weight.floats() if isinstance(weight, BlockRows) else weight


def _joined(arrays: list[Array]) -> Array | None:
    """The rows of all arrays, in float32 if they differ in their dtype. None: there is none."""
    if not arrays:
        return None

    if len(arrays) == 1:
        return arrays[0]

    if len({array.dtype for array in arrays}) > 1:
        arrays = list(map(as_float32, arrays))

    return np.concatenate(arrays)


def _qkv_widths(a: Architecture) -> tuple[int, int, int]:
    """The channels of all queries, all keys and all values."""
    return a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim, a.num_kv_heads * a.head_dim


# A program joins what transformers keeps apart: queries, keys and values, or the gate beside its
# linear. A site is a linear of the program, in the order of these.

# The most modules of one site.
MAX_MODULES = 3


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of a module that are rows of the site's weight, or of its gate."""

    # In the module.
    first: int
    num: int
    # In the site.
    row: int
    is_gate: bool = False


@dataclass(frozen=True, slots=True)
class Module:
    """A linear of transformers."""

    path: str
    num_in: int
    pieces: tuple[Piece, ...]
    has_bias: bool = False

    @property
    def num_out(self) -> int:
        return sum(piece.num for piece in self.pieces)

    @property
    def weight_name(self) -> str:
        """The name of its weight in a whole checkpoint."""
        return f"{self.path}.weight"


@dataclass(frozen=True, slots=True)
class Site:
    num_in: int
    num_out: int
    # Empty where no adapter can change it.
    modules: tuple[Module, ...]


def sites_of(architecture: Architecture) -> tuple[Site, ...]:
    a = architecture
    sites: list[Site] = []
    for layer in range(a.num_layers):
        sites += _sites_of_layer(a, layer)

    # The head cannot be changed where its weight is joined with a projection.
    modules: tuple[Module, ...] = ()
    if "project_out" not in a.names:
        piece = Piece(0, a.vocab_size, 0)
        modules = (Module(a.names["head"], a.hidden_size, (piece,)),)

    sites.append(Site(a.hidden_size, a.vocab_size, modules))
    return tuple(sites)


def _sites_of_layer(a: Architecture, layer: int) -> tuple[Site, Site, Site, Site]:
    """What attention reads, and what reads it; what the inside of the feed-forward is, and what
    reads that.
    """
    q, k, v = _qkv_widths(a)
    inner = a.intermediate_size
    size = a.hidden_size

    def site(num_in: int, num_out: int, **pieces: list[Piece]) -> Site:
        modules: list[Module] = []
        for name, pieces_of_module in pieces.items():
            if name in a.names:
                path = a.names[name].format(layer)
                has_bias = name in a.biases
                modules.append(Module(path, num_in, tuple(pieces_of_module), has_bias))

        return Site(num_in, num_out, tuple(modules))

    qkv = {
        "q": [Piece(0, q, 0)],
        "k": [Piece(0, k, q)],
        "v": [Piece(0, v, q + k)],
        "qkv": [Piece(0, q + k + v, 0)],
    }
    gate = Piece(0, inner, 0, is_gate=True)

    return (
        site(size, q + k + v, **qkv),
        site(q, size, o=[Piece(0, size, 0)]),
        site(
            size,
            inner,
            up=[Piece(0, inner, 0)],
            gate=[gate],
            gate_up=[gate, Piece(inner, inner, 0)],
        ),
        site(inner, size, down=[Piece(0, size, 0)]),
    )


def adapted(program: Program[Packed], max_rank: int) -> Program[Packed]:
    """The same program for batches in which rows may have adapters of at most this rank.

    A Shrink stands before each linear, and what it writes in two buffers before the last: of all
    and of wanted rows.
    """
    logits = len(program.widths) - 1
    width = MAX_MODULES * max_rank
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
