"""Each kind of operation against torch in float64, over shapes; what lies in free blocks is never
read.
"""

from __future__ import annotations

import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from handlers.lmi_dist.native.model import NativeModel
from handlers.lmi_dist.native.records import BF16, F32, INT8
from handlers.lmi_dist.operations import (
    Attend,
    Cap,
    Embed,
    Gather,
    Linear,
    Norm,
    Operation,
    Program,
)
from tests.handlers.lmi_dist.native.builds import kv_format_of, library, variants
from tests.handlers.lmi_dist.native.models import llama, num_blocks_of, packed, run_whole
from tests.handlers.lmi_dist.native.reference import logits_of

KERNELS = library(variants()[0])
NUM_IDS = 32
MAX_LENGTH = 256

widths = st.one_of(st.integers(1, 48), st.sampled_from([64, 65, 96, 127, 193, 400]))
tokens = st.lists(st.integers(0, NUM_IDS - 1), min_size=1, max_size=40)
seeds = st.integers(0, 1000)
few = settings(max_examples=40)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape)


def program_of(
    operations: list[Operation[Tensor]],
    widths: tuple[int, ...],
    wanted: set[int],
    num_heads: int = 1,
    num_kv_heads: int = 1,
    head_dim: int = 1,
) -> Program[Tensor]:
    """A program without a head: the last buffer has what is to be compared. Token ids are below
    NUM_IDS.
    """
    return Program(
        operations=tuple(operations),
        widths=widths,
        wanted=frozenset(wanted),
        num_layers=2,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=widths[-1],
        max_length=MAX_LENGTH,
    )


def table_for(ids: list[int]) -> list[int]:
    """Blocks in no order."""
    return torch.randperm(num_blocks_of(len(ids)) + 3)[: num_blocks_of(len(ids))].tolist()


def model_of(program: Program[Tensor], num_tokens: int, format: int = F32) -> NativeModel:
    """A model whose pool is full of NaN."""
    weights = packed(KERNELS, program, format)
    num_blocks = num_blocks_of(num_tokens) + 3
    kv_format = kv_format_of(KERNELS.kind, format)
    model = NativeModel(KERNELS, weights, num_blocks, num_threads=2, kv_format=kv_format)
    model.pool.fill(0xFF)
    return model


def check(program: Program[Tensor], ids: list[int], limit: float = 1e-5, format: int = F32) -> None:
    """The kernels compute what torch computes, in one step of one sequence."""
    ids = [token % program.vocab_size for token in ids]
    exact = logits_of(program, ids)
    our_logits = run_whole(model_of(program, len(ids), format), ids, table_for(ids))

    assert our_logits.shape == exact.shape
    assert float((our_logits - exact).abs().max()) <= limit * (1 + float(exact.abs().max()))


@few
@given(ids=tokens, width=widths, seed=seeds, is_bf16=st.booleans(), has_positions=st.booleans())
def test_embeddings_are_scaled_and_get_their_positions(
    ids: list[int], width: int, seed: int, is_bf16: bool, has_positions: bool
) -> None:
    torch.manual_seed(seed)
    table = normal(NUM_IDS, width).to(torch.bfloat16 if is_bf16 else torch.float32)
    positions = normal(MAX_LENGTH, width) if has_positions else None
    program = program_of([Embed(0, table, 1.7, positions), Gather(0, 1)], (width, width), {1})
    check(program, ids)


@few
@given(
    ids=tokens,
    width=widths,
    seed=seeds,
    is_centred=st.booleans(),
    has_bias=st.booleans(),
    way=st.sampled_from(["plain", "adds", "in place"]),
)
def test_norms(
    ids: list[int], width: int, seed: int, is_centred: bool, has_bias: bool, way: str
) -> None:
    torch.manual_seed(seed)
    table = 3 + normal(NUM_IDS, width)
    bias = normal(width) if has_bias else None
    output = 0 if way == "in place" else 1
    norm: Norm = Norm(0, output, normal(width), 1e-5, bias, is_centred, adds=way == "adds")
    operations: list[Operation[Tensor]] = [
        Embed(0, table),
        Embed(1, table.flip(0)),
        norm,
        Gather(output, 2),
    ]

    # A few numbers that are nearly equal lose up to their size / sqrt(eps) in float32 when their
    # mean is subtracted.
    check(
        program_of(operations, (width, width, width), {2}),
        ids,
        limit=1e-4 if is_centred and width < 8 else 1e-5,
    )


@few
@given(
    ids=tokens,
    num_in=widths,
    num_out=widths,
    seed=seeds,
    activation=st.sampled_from(["none", "silu", "relu", "gelu", "gelu_tanh"]),
    biases=st.booleans(),
    is_gated=st.booleans(),
    adds=st.booleans(),
)
def test_linears(
    ids: list[int],
    num_in: int,
    num_out: int,
    seed: int,
    activation: str,
    biases: bool,
    is_gated: bool,
    adds: bool,
) -> None:
    torch.manual_seed(seed)
    bias, gate_bias = (normal(num_out), normal(num_out)) if biases else (None, None)
    weight = normal(num_out, num_in)
    gate = normal(num_out, num_in)
    linear = Linear(
        0,
        1,
        weight,
        bias,
        gate if is_gated else None,
        gate_bias if is_gated else None,
        activation,
        adds,
    )

    operations: list[Operation[Tensor]] = [
        Embed(0, normal(NUM_IDS, num_in) / num_in**0.5),
        Embed(1, normal(NUM_IDS, num_out)),
        linear,
        Gather(1, 2),
    ]
    check(program_of(operations, (num_in, num_out, num_out), {2}), ids)


def test_a_long_prompt_has_many_items_of_a_linear() -> None:
    ids = [i % NUM_IDS for i in range(MAX_LENGTH)]
    for num_in in (40, 1500, 30000):
        linear = Linear(0, 1, normal(70, num_in) / num_in**0.5)
        operations: list[Operation[Tensor]] = [
            Embed(0, normal(NUM_IDS, num_in)),
            linear,
            Gather(1, 2),
        ]
        check(program_of(operations, (num_in, 70, 70), {2}), ids)


@few
@given(ids=tokens, width=widths, cap=st.floats(0.1, 50.0), seed=seeds)
def test_caps(ids: list[int], width: int, cap: float, seed: int) -> None:
    torch.manual_seed(seed)
    table = normal(NUM_IDS, width) * torch.logspace(-6, 3, width)
    check(program_of([Embed(0, table), Gather(0, 1), Cap(1, cap)], (width, width), {1}), ids)


@settings(max_examples=60)
@given(
    num_tokens=st.one_of(st.integers(1, 200), st.sampled_from([63, 64, 65, 128, 129])),
    head_dim=st.one_of(st.integers(1, 40), st.sampled_from([64, 80, 128, 256, 512])),
    num_kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 4, 7, 16, 50]),
    window=st.one_of(st.none(), st.integers(1, 150)),
    softcap=st.one_of(st.none(), st.floats(0.5, 30.0)),
    rotates=st.floats(0.0, 1.0),
    has_norms=st.booleans(),
    is_wanted=st.booleans(),
    seed=seeds,
)
def test_attention(
    num_tokens: int,
    head_dim: int,
    num_kv_heads: int,
    group: int,
    window: int | None,
    softcap: float | None,
    rotates: float,
    has_norms: bool,
    is_wanted: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    num_heads = group * num_kv_heads
    num_pairs = int(rotates * (head_dim // 2))
    angles = torch.rand(MAX_LENGTH, num_pairs) * 6
    attend = Attend(
        0,
        1,
        layer=1,
        scale=head_dim**-0.5,
        softcap=softcap,
        window=window,
        rotations=torch.stack((angles.cos(), angles.sin()), dim=1) if num_pairs else None,
        query_norm=normal(head_dim) if has_norms else None,
        key_norm=normal(head_dim) if has_norms else None,
        norm_eps=1e-6,
        is_wanted=is_wanted,
    )
    table = normal(NUM_IDS, (num_heads + 2 * num_kv_heads) * head_dim)
    gather: list[Operation[Tensor]] = [] if is_wanted else [Gather(1, 2)]
    widths = (table.shape[1], num_heads * head_dim, num_heads * head_dim)[: 2 if is_wanted else 3]
    shape = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    program = program_of([Embed(0, table), attend, *gather], widths, {len(widths) - 1}, **shape)
    check(program, torch.randint(0, NUM_IDS, (num_tokens,)).tolist())


@few
@given(
    num_tokens=st.one_of(st.integers(1, 200), st.sampled_from([63, 64, 65, 128, 129])),
    head_dim=st.one_of(st.integers(1, 40), st.sampled_from([64, 80, 128, 511, 512])),
    num_kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 3, 16, 50]),
    window=st.one_of(st.none(), st.integers(1, 150)),
    seed=seeds,
)
def test_attention_over_keys_and_values_in_bfloat16_errs_by_the_rounding_of_its_weights(
    num_tokens: int, head_dim: int, num_kv_heads: int, group: int, window: int | None, seed: int
) -> None:
    torch.manual_seed(seed)
    num_heads = group * num_kv_heads
    attend = Attend(0, 1, layer=1, scale=head_dim**-0.5, window=window, is_wanted=True)
    table = normal(NUM_IDS, (num_heads + 2 * num_kv_heads) * head_dim).bfloat16()
    widths = (table.shape[1], num_heads * head_dim)
    shape = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    program = program_of([Embed(0, table), attend], widths, {1}, **shape)
    check(program, torch.randint(0, NUM_IDS, (num_tokens,)).tolist(), limit=2**-8, format=BF16)


@settings(max_examples=20)
@given(
    num_tokens=st.integers(1, 200),
    num_heads=st.sampled_from([2, 6]),
    head_dim=st.sampled_from([16, 24, 64]),
    window=st.sampled_from([None, 40]),
    seed=seeds,
)
def test_whole_decoders(
    num_tokens: int, num_heads: int, head_dim: int, window: int | None, seed: int
) -> None:
    program = llama(num_heads=num_heads, head_dim=head_dim, window=window, seed=seed)
    check(program, torch.randint(0, program.vocab_size, (num_tokens,)).tolist())


def test_reduced_weights_are_close() -> None:
    program = llama(hidden=192, num_heads=6, intermediate=200)
    ids = torch.randint(0, program.vocab_size, (100,)).tolist()
    exact = logits_of(program, ids)
    for format, limit in ((F32, 1e-6), (BF16, 0.01), (INT8, 0.02)):
        logits = run_whole(model_of(program, len(ids), format), ids, table_for(ids))
        assert 1e-9 < float((logits - exact).square().mean().sqrt() / exact.std()) < limit
