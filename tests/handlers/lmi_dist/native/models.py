"""Random programs, packed or not, and sequences that run in steps of any cut."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from msgspec.structs import asdict, replace
from torch import Tensor

from handlers.lmi_dist.arrays import Array
from handlers.lmi_dist.native.library import Library
from handlers.lmi_dist.native.model import NativeModel
from handlers.lmi_dist.native.records import TOKENS_PER_BLOCK, Panels
from handlers.lmi_dist.operations import Attend, Embed, Gather, Linear, Norm, Operation, Program
from handlers.lmi_dist.placement import to_array
from handlers.lmi_dist.plan import Chunk


def packed(library: Library, program: Program[Tensor], format: int) -> Program[Panels]:
    """The same program with packed weights and tables of numpy."""

    def form(operation: Operation[Tensor], name: str, tensor: Tensor) -> Panels | Array:
        is_packed = isinstance(operation, Linear) and name in ("weight", "gate")
        return library.pack(to_array(tensor), format) if is_packed else to_array(tensor)

    operations = []
    for packed_operation in program.operations:
        forms = {
            name: form(packed_operation, name, value)
            for name, value in asdict(packed_operation).items()
            if isinstance(value, Tensor)
        }
        operations.append(replace(packed_operation, **forms))

    return replace(program, operations=tuple(operations))


def llama(
    *,
    vocab_size: int = 96,
    hidden: int = 64,
    intermediate: int = 80,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    max_length: int = 512,
    window: int | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Program[Tensor]:
    """A whole decoder of the Llama family with random weights."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).to(dtype)

    def norm() -> Tensor:
        return 1 + 0.1 * torch.randn(hidden, generator=generator)

    angles = torch.arange(max_length)[:, None] / 10000.0 ** (
        torch.arange(head_dim // 2) * 2 / head_dim
    )
    rotations = torch.stack((angles.cos(), angles.sin()), dim=1)
    heads = (num_heads + 2 * num_kv_heads) * head_dim
    # buffers: 0 residual, 1 normalised, 2 heads, 3 attention, 4 feed-forward; 5 to 9 the same of
    # wanted rows; logits
    embedding = torch.randn(vocab_size, hidden, generator=generator).to(dtype)
    operations: list[Operation[Tensor]] = [Embed(0, embedding)]
    for layer in range(num_layers):
        is_last = layer == num_layers - 1
        x, normed, attended, inner = (5, 6, 8, 9) if is_last else (0, 1, 3, 4)
        operations += [
            Norm(0, 1, norm(), 1e-5),
            Linear(1, 2, random(heads, hidden)),
            Attend(
                2,
                attended,
                layer,
                head_dim**-0.5,
                window=window,
                rotations=rotations,
                is_wanted=is_last,
            ),
            *([Gather(0, 5)] if is_last else []),
            Linear(attended, x, random(hidden, num_heads * head_dim), adds=True),
            Norm(x, normed, norm(), 1e-5),
            Linear(
                normed,
                inner,
                random(intermediate, hidden),
                gate=random(intermediate, hidden),
                activation="silu",
            ),
            Linear(inner, x, random(hidden, intermediate), adds=True),
        ]

    operations += [Norm(5, 6, norm(), 1e-5), Linear(6, 10, random(vocab_size, hidden))]
    widths = (hidden, hidden, heads, num_heads * head_dim, intermediate)
    return Program(
        operations=tuple(operations),
        widths=(*widths, *widths, vocab_size),
        wanted=frozenset(range(5, 11)),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        max_length=max_length,
    )


def chunk(
    ids: list[int], start: int, end: int, table: list[int], num_logits: int | None = None
) -> Chunk:
    """Tokens start ... end of a sequence, whose logits are all wanted unless `num_logits` says how
    many.
    """
    num_logits = end - start if num_logits is None else num_logits
    return Chunk(slot=0, start=start, token_ids=ids[start:end], num_logits=num_logits, table=table)


def num_blocks_of(num_tokens: int) -> int:
    return -(-num_tokens // TOKENS_PER_BLOCK)


def run_whole(model: NativeModel, ids: list[int], table: list[int]) -> Tensor:
    """Logits of all tokens of a sequence, computed in one step by itself."""
    return run_step(model, [chunk(ids, 0, len(ids), table)])


def run_step(model: NativeModel, chunks: Sequence[Chunk]) -> Tensor:
    """The logits of a step, which no later step overwrites."""
    return torch.from_numpy(model.run(chunks)).clone()
