"""Reads the tensors that an operation of a program needs from a checkpoint, by the names that the
model's family gives them.

`program.py` decides which operations a model has, and asks an `OperationReader` for each.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Generic, TypeAlias

import numpy as np
from msgspec import Struct, field

from handlers.lmi_dist.arrays import BFLOAT16, Array, are_same_rows, as_float32
from handlers.lmi_dist.families import Architecture
from handlers.lmi_dist.gguf.block_rows import BlockRows
from handlers.lmi_dist.linear_sites import Module, Site
from handlers.lmi_dist.operations import (
    Attend,
    Embed,
    Linear,
    Norm,
    Pack,
    PackBlocks,
    Packed,
    Table,
)
from handlers.lmi_dist.rotary import Rotary
from handlers.lmi_dist.weights import Checkpoint

log = logging.getLogger(__name__)

Weight: TypeAlias = "Array | BlockRows"
"""A weight (num_out, num_in) as the checkpoint has it."""

Place: TypeAlias = Callable[[Array], Table]
"""Takes what is not packed, a norm or a bias in float32 or a table, and gives the form in which a
runner reads it.
"""


def place_for_kernels(array: Array) -> Array:
    """Return an array as the native kernels read it: a bfloat16 table as it is, mapped from its
    file, all else in float32.
    """
    if array.dtype == BFLOAT16:
        return array

    return np.ascontiguousarray(as_float32(array))


class _LinearParts(Struct):
    """The rows that the modules of a site give to one linear, or to its gate."""

    weights: list[Weight] = field(default_factory=list)
    biases: list[Array] = field(default_factory=list)


class OperationReader(Generic[Packed]):
    """Makes operations, whose tensors it packs or places for a runner. Each is read once."""

    def __init__(
        self,
        architecture: Architecture,
        checkpoint: Checkpoint,
        pack: Pack[Packed],
        max_length: int,
        place: Place,
        pack_blocks: PackBlocks[Packed] | None,
    ) -> None:
        """Without `pack_blocks`, weights in blocks become floats. Raises ModelUnusable."""
        self.architecture = architecture
        self._checkpoint = checkpoint
        self._pack = pack
        self._pack_blocks = pack_blocks
        self._max_length = max_length
        self._place = place

        # The names of a checkpoint that was saved without a head lack their first word: `model.` of
        # `model.embed_tokens.weight`.
        path = architecture.names["embedding"]
        name = f"{path}.weight"
        short_name = name.partition(".")[2]
        self._has_prefix = name in checkpoint.files or short_name not in checkpoint.files

        embedding_size = architecture.embedding_size or architecture.hidden_size
        self._embedding = self._take_weight(path, architecture.vocab_size, embedding_size)
        # The embedding in blocks, which a head that is tied to it shares.
        self._packed_embedding: Packed | None = None

        self._rotations: dict[Rotary, Table] = {}
        for rotary in set(architecture.rotaries):
            if rotary is not None:
                self._rotations[rotary] = place(rotary.rotations(max_length))

    # The operations.

    def embed(self, output: int) -> Embed:
        """Read the table of tokens, and that of positions if the family has one."""
        architecture = self.architecture
        table = self._token_table()
        positions = None
        path = architecture.names.get("positions")
        if path:
            offset = architecture.position_offset
            num_rows = architecture.context_length + offset
            rows = self._take(path, num_rows, architecture.hidden_size)
            positions = self._placed(rows[offset : offset + self._max_length])

        return Embed(output, table, architecture.embedding_scale, positions)

    def norm(
        self, name: str, input: int, output: int, layer: int | None = None, adds: bool = False
    ) -> Norm:
        """Read a norm, of a layer if it has one, by its name in the family's table."""
        architecture = self.architecture
        is_centred = architecture.norm == "layer"
        weight = self._norm_weight(name, architecture.hidden_size, layer)
        bias = None
        if is_centred:
            path = architecture.names[name].format(layer)
            bias = self._take(path, architecture.hidden_size, part="bias")

        return Norm(
            input,
            output,
            weight,
            architecture.norm_eps,
            bias=self._placed(bias),
            is_centred=is_centred,
            adds=adds,
        )

    def attend(self, layer: int, input: int, output: int, is_wanted: bool) -> Attend:
        """Describe the attention of a layer. Norms of queries and keys are read if it has them."""
        architecture = self.architecture
        rotary = architecture.rotaries[layer]
        rotations = None if rotary is None else self._rotations[rotary]
        query_norm = None
        if "q_norm" in architecture.names:
            query_norm = self._norm_weight("q_norm", architecture.head_dim, layer)

        key_norm = None
        if "k_norm" in architecture.names:
            key_norm = self._norm_weight("k_norm", architecture.head_dim, layer)

        return Attend(
            input,
            output,
            layer,
            scale=architecture.scale,
            softcap=architecture.softcap,
            window=architecture.windows[layer],
            rotations=rotations,
            query_norm=query_norm,
            key_norm=key_norm,
            norm_eps=architecture.norm_eps,
            is_wanted=is_wanted,
        )

    def linear(
        self, site: Site, input: int, output: int, *, activation: str = "none", adds: bool = False
    ) -> Linear[Packed]:
        """Read the modules of a site. The rows of their pieces, one below the other, make a weight
        and its gate.
        """
        plain = _LinearParts()
        gate = _LinearParts()
        for module in site.modules:
            weight = self._module_weight(module)
            bias = self._module_bias(module)
            for piece in module.pieces:
                parts = gate if piece.is_gate else plain
                rows = slice(piece.first, piece.first + piece.num)
                parts.weights.append(weight[rows])
                if bias is not None:
                    parts.biases.append(bias[rows])

        return Linear(
            input,
            output,
            weight=self._packed(plain.weights),
            bias=self._placed(_joined(plain.biases)),
            gate=self._packed(gate.weights) if gate.weights else None,
            gate_bias=self._placed(_joined(gate.biases)),
            activation=activation,
            adds=adds,
        )

    def head(self, input: int, output: int) -> Linear[Packed]:
        """Read the head, which may be the embedding."""
        architecture = self.architecture
        packed = self._packed_head(self._head_weight())
        bias = None
        if "head" in architecture.biases:
            path = architecture.names["head"]
            bias = self._take(path, architecture.vocab_size, part="bias")

        return Linear(input, output, packed, self._placed(bias))

    def names_without_use(self, has_head: bool) -> set[str]:
        """Return the names of the tensors that a program does not read: those of a head that it
        does not have.
        """
        if has_head:
            return set()

        path = self.architecture.names["head"]
        return {f"{path}.weight", f"{path}.bias"}

    # Embedding and head.

    def _token_table(self) -> Table:
        """Return the embedding as a table whose rows have the hidden size.

        Narrower rows are projected to it here, once, and not in every step.
        """
        embedding = self._embedding
        if isinstance(embedding, BlockRows):
            self._packed_embedding = self._packed([embedding])
            return self._packed_embedding

        architecture = self.architecture
        path = architecture.names.get("project_in")
        if path:
            projection = self._take(path, architecture.hidden_size, architecture.embedding_size)
            embedding = as_float32(embedding) @ as_float32(projection).T

        return self._place(embedding)

    def _head_weight(self) -> Weight:
        """Return the weight of the head, which is the embedding itself if both have the same rows.

        Where config.json ties both but the checkpoint has a head with other rows, the head counts,
        as in transformers and vLLM.
        """
        architecture = self.architecture
        embedding = self._embedding
        path = architecture.names["head"]
        name = f"{path}.weight"
        if architecture.is_tied and name not in self._checkpoint.files:
            return embedding

        head = self._take_weight(path, *embedding.shape)
        if not architecture.is_tied:
            return head

        if are_same_rows(_floats(head), _floats(embedding)):
            return embedding

        log.warning(
            "%s: %s is used although config.json says tie_word_embeddings: it is not the embedding",
            self._checkpoint.files[name],
            name,
        )
        return head

    def _packed_head(self, weight: Weight) -> Packed:
        """Pack the head.

        Rows that are narrower than hidden states are projected to these here, once, and not the
        hidden states to them in every step.
        """
        if weight is self._embedding and self._packed_embedding is not None:
            return self._packed_embedding

        architecture = self.architecture
        path = architecture.names.get("project_out")
        if path and not isinstance(weight, BlockRows):
            projection = self._take(path, architecture.embedding_size, architecture.hidden_size)
            weight = as_float32(weight) @ as_float32(projection)

        return self._packed([weight])

    # Tensors.

    def _packed(self, weights: Sequence[Weight]) -> Packed:
        """Pack weights, one below the other. If all are in blocks, they stay so."""
        blocks = [weight for weight in weights if isinstance(weight, BlockRows)]
        if self._pack_blocks is not None and len(blocks) == len(weights):
            return self._pack_blocks(blocks)

        joined_weight = _joined([_floats(weight) for weight in weights])
        assert joined_weight is not None
        return self._pack(joined_weight)

    def _placed(self, array: Array | None) -> Table | None:
        if array is None:
            return None

        return self._place(as_float32(array))

    def _module_weight(self, module: Module) -> Weight:
        is_transposed = self.architecture.is_transposed
        return self._take_weight(module.path, module.num_out, module.num_in, is_transposed)

    def _module_bias(self, module: Module) -> Array | None:
        if not module.has_bias:
            return None

        return self._take(module.path, module.num_out, part="bias")

    def _norm_weight(self, name: str, size: int, layer: int | None) -> Table:
        """Return the weight of a norm. Some families store its difference from 1."""
        architecture = self.architecture
        weight = self._take(architecture.names[name].format(layer), size)
        return self._place(as_float32(weight) + np.float32(architecture.norm_offset))

    def _take_weight(
        self, path: str, num_out: int, num_in: int, is_transposed: bool = False
    ) -> Weight:
        """Return the weight (num_out, num_in) of a linear or a table, in blocks if the checkpoint
        has them and the runner packs them.

        `is_transposed`: the checkpoint has it as (num_in, num_out), unless it is quantised.
        """
        name = self._name(path, "weight")
        if self._pack_blocks is not None:
            blocks = self._checkpoint.take_blocks(name, (num_out, num_in))
            if blocks is not None:
                return blocks

        if is_transposed and name not in self._checkpoint.quantised:
            return self._take(path, num_in, num_out).T

        return self._take(path, num_out, num_in)

    def _take(self, path: str, *shape: int, part: str = "weight") -> Array:
        return self._checkpoint.take(self._name(path, part), shape)

    def _name(self, path: str, part: str) -> str:
        """Return the name of a tensor in the checkpoint."""
        if not self._has_prefix and path != self.architecture.names["head"]:
            path = path.partition(".")[2]

        return f"{path}.{part}"


def _floats(weight: Weight) -> Array:
    if isinstance(weight, BlockRows):
        return weight.floats()

    return weight


def _joined(arrays: list[Array]) -> Array | None:
    """Return the rows of all arrays, in float32 if their dtypes differ, or None without arrays."""
    if not arrays:
        return None

    if len(arrays) == 1:
        return arrays[0]

    if len({array.dtype for array in arrays}) > 1:
        arrays = [as_float32(array) for array in arrays]

    return np.concatenate(arrays)
