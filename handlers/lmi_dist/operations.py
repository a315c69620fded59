"""The operations of a decoder's step, which `program` lists once, at load.

They read and write numbered buffers. Each row of a buffer is one token of the step; some buffers
have rows only for the tokens whose logits are wanted. A runner gives `program` two functions that
say in which form it reads weights: `pack` for what is multiplied, `place` for all else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

from msgspec import Struct, field

from handlers.lmi_dist.arrays import Array
from handlers.lmi_dist.gguf.block_rows import BlockRows

Table: TypeAlias = Any
"""What `place` gives: an array of numpy, or a tensor of torch."""

Packed = TypeVar("Packed")
"""What `pack` gives."""

Pack = Callable[[Array], Packed]
"""Takes a weight (num_out, num_in), in the dtype of the checkpoint, and gives the form that the
kernels multiply by.
"""

PackBlocks = Callable[[Sequence[BlockRows]], Packed]
"""Takes the rows of a weight (num_out, num_in) in the blocks of a GGUF file, and gives the same."""


class Embed(Struct, frozen=True):
    """output = table[token id] * scale + positions[position]"""

    output: int
    # (vocab_size, width), float32 or bfloat16, or in the form of `pack_blocks`.
    table: Table
    scale: float = 1.0
    # (max_length, width), float32
    positions: Table | None = None


class Norm(Struct, frozen=True):
    """output = normalised input * weight + bias, or output += that.

    `input` and `output` may be one buffer if it does not add.
    """

    input: int
    output: int
    # (width,), float32
    weight: Table
    eps: float
    # (width,), float32
    bias: Table | None = None
    # True for LayerNorm, where the mean is subtracted first. Otherwise it is RMSNorm.
    is_centred: bool = False
    adds: bool = False


class Linear(Struct, Generic[Packed], frozen=True):
    """output = activation(input weight^T + bias), or output += that.

    With a gate: output = activation(input gate^T + gate_bias) * (input weight^T + bias)
    """

    input: int
    output: int
    # Packed from (width of output, width of input).
    weight: Packed
    # (width of output,), float32
    bias: Table | None = None
    gate: Packed | None = None
    gate_bias: Table | None = None
    # One of none, silu, relu, gelu and gelu_tanh.
    activation: str = "none"
    adds: bool = False
    # By which adapters know it. What they have is added before the activation: low up^T to the
    # product with `weight`, low gate^T to that with `gate`.
    site: int | None = None
    # The buffer that the Shrink before it wrote, if it has a site.
    low: int = 0


class Shrink(Struct, frozen=True):
    """output = input down^T, for the rows whose adapter has such a weight for the next Linear.

    Other rows are left out.
    """

    input: int
    output: int
    site: int


class LowRank(Struct, Generic[Packed], frozen=True):
    """What an adapter has for one site. `up` and `gate` include the adapter's scale."""

    # Packed from (rank, width of input).
    down: Packed
    # Packed from (width of output, rank), as is the gate.
    up: Packed | None = None
    gate: Packed | None = None


Adapter: TypeAlias = "tuple[LowRank[Packed] | None, ...]"
"""What an adapter has, by site."""


class Attend(Struct, frozen=True):
    """Normalise and rotate the heads of queries and keys, store keys and values in the cache, and
    attend.

    A row of `input` has all queries, then all keys, then all values, by head. A row of `output` has
    the answers of all heads. With `is_wanted` it has rows only for the tokens whose logits are
    wanted.
    """

    input: int
    output: int
    layer: int
    # The factor of the products of query and key.
    scale: float
    softcap: float | None = None
    # How many positions back a query sees, itself included.
    window: int | None = None
    # (max_length, 2, num_pairs), float32: cosines and sines. Channel i rotates with channel
    # num_pairs + i; channels from 2 * num_pairs on do not rotate.
    rotations: Table | None = None
    # (head_dim,), float32: the weights of an RMSNorm of each head before it is rotated.
    query_norm: Table | None = None
    key_norm: Table | None = None
    norm_eps: float = 0.0
    is_wanted: bool = False


class Gather(Struct, frozen=True):
    """output = the wanted rows of input"""

    input: int
    output: int


class Cap(Struct, frozen=True):
    """buffer = cap * tanh(buffer / cap), of the logits"""

    buffer: int
    cap: float


Operation: TypeAlias = "Embed | Norm | Linear[Packed] | Attend | Gather | Cap | Shrink"


class Program(Struct, Generic[Packed], frozen=True, kw_only=True):
    """The operations of a whole decoder.

    The last one leaves the logits of the wanted rows in the last buffer; an embedding model has
    hidden states there.
    """

    operations: tuple[Operation[Packed], ...]
    # The number of floats in a row, by buffer.
    widths: tuple[int, ...]
    # The buffers that have rows only for the tokens whose logits are wanted.
    wanted: frozenset[int]
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    # Positions count from 0.
    max_length: int
    # The number of sites, where adapters are enabled.
    num_sites: int = 0
    # The buffer of each declared output.
    outputs: Mapping[str, int] = field(default_factory=dict)
