"""A token's bits depend only on the tokens before it: not on the batch, the cut of its prompt or
threads; in float32 and int8 also not on the CPU.
"""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from handlers.lmi_dist.native.model import NativeModel
from handlers.lmi_dist.native.records import BF16, F32, INT8
from handlers.lmi_dist.operations import Program
from handlers.lmi_dist.plan import Chunk
from tests.handlers.lmi_dist.native.builds import exact_variants, kv_format_of, library, variants
from tests.handlers.lmi_dist.native.models import (
    chunk,
    llama,
    num_blocks_of,
    packed,
    run_step,
    run_whole,
)

MAX_TOKENS = 150
NUM_SEQUENCES = 9
PROGRAMS = {
    "plain": llama(),
    "window": llama(head_dim=24, num_heads=6, num_kv_heads=3, window=40, intermediate=200),
    "wide": llama(
        hidden=200, head_dim=80, num_heads=3, num_kv_heads=1, num_layers=3, vocab_size=65
    ),
}


def model_of(
    program: Program[Tensor], format: int, num_threads: int = 2, kind: str | None = None
) -> NativeModel:
    kind = kind or variants()[0]
    kernels = library(kind)
    num_blocks = NUM_SEQUENCES * num_blocks_of(MAX_TOKENS)
    weights = packed(kernels, program, format)
    model = NativeModel(kernels, weights, num_blocks, num_threads, kv_format_of(kind, format))
    model.pool.fill(0xFF)  # NaN
    return model


def random_ids(program: Program[Tensor], dice: random.Random, num_tokens: int) -> list[int]:
    return [dice.randrange(program.vocab_size) for _ in range(num_tokens)]


def run_in_pieces(
    model: NativeModel, sequences: list[list[int]], dice: random.Random
) -> list[Tensor]:
    """Logits of all tokens of each sequence. Each step has a random piece of some of them, in any
    order.
    """
    blocks = list(range(NUM_SEQUENCES * num_blocks_of(MAX_TOKENS)))
    dice.shuffle(blocks)
    tables = [[blocks.pop() for _ in range(num_blocks_of(len(ids)))] for ids in sequences]
    logits: list[list[Tensor]] = [[] for _ in sequences]
    done = [0] * len(sequences)
    while unfinished := [i for i, ids in enumerate(sequences) if done[i] < len(ids)]:
        drawn = dice.sample(unfinished, dice.randint(1, len(unfinished)))
        chunks: list[Chunk] = []
        for i in drawn:
            end = min(done[i] + dice.choice([1, 1, 1, 2, 5, 17, 64, 130]), len(sequences[i]))
            chunks.append(chunk(sequences[i], done[i], end, tables[i]))

        result = iter(run_step(model, chunks).split([len(piece.token_ids) for piece in chunks]))
        for i, piece in zip(drawn, chunks, strict=True):
            logits[i].append(next(result))
            done[i] = piece.end

    return [torch.cat(pieces) for pieces in logits]


@pytest.mark.parametrize("format", [F32, BF16, INT8], ids=["f32", "bf16", "int8"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_pieces_neighbours_and_threads_change_no_bit(name: str, format: int) -> None:
    dice = random.Random(name)
    program = PROGRAMS[name]
    sequences = [
        random_ids(program, dice, dice.randint(1, MAX_TOKENS)) for _ in range(NUM_SEQUENCES)
    ]
    alone = model_of(program, format, num_threads=1)
    table = list(range(num_blocks_of(MAX_TOKENS)))
    expected = [run_whole(alone, ids, table[::-1]) for ids in sequences]
    for num_threads in (1, 2, 3):
        results_in_pieces = run_in_pieces(model_of(program, format, num_threads), sequences, dice)
        assert [torch.equal(a, b) for a, b in zip(results_in_pieces, expected, strict=True)] == [
            True
        ] * NUM_SEQUENCES


@pytest.mark.parametrize("format", [F32, BF16, INT8], ids=["f32", "bf16", "int8"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_library_that_this_cpu_can_run_gives_the_same_bits(name: str, format: int) -> None:
    program = PROGRAMS[name]
    ids = random_ids(program, random.Random(1), MAX_TOKENS)
    table = list(range(num_blocks_of(MAX_TOKENS)))
    kinds = exact_variants() if format == BF16 else variants()
    logits = [run_whole(model_of(program, format, kind=kind), ids, table) for kind in kinds]

    assert all(torch.equal(sequence_logits, logits[0]) for sequence_logits in logits)


def test_bfloat16_weights_give_the_bits_of_float32_where_no_activation_is_rounded() -> None:
    program = llama(dtype=torch.bfloat16)
    ids = random_ids(program, random.Random(2), MAX_TOKENS)
    table = list(range(num_blocks_of(MAX_TOKENS)))
    for kind in exact_variants():
        exact, widened = (
            run_whole(model_of(program, format, kind=kind), ids, table) for format in (F32, BF16)
        )
        assert torch.equal(exact, widened)


@settings(max_examples=20)
@given(num_tokens=st.integers(2, MAX_TOKENS), num_logits=st.integers(0, 5))
def test_wanted_rows_have_the_bits_that_they_have_among_all(
    num_tokens: int, num_logits: int
) -> None:
    program = PROGRAMS["plain"]
    dice = random.Random(num_tokens)
    ids = random_ids(program, dice, num_tokens)
    table = list(range(num_blocks_of(num_tokens)))
    model, num_logits = model_of(program, F32), min(num_logits, num_tokens)
    whole = run_whole(model, ids, table)
    step_logits = run_step(model, [chunk(ids, 0, num_tokens, table, num_logits)])
    assert torch.equal(step_logits, whole[num_tokens - num_logits :])


@pytest.mark.parametrize("format", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("start", [80, 81])
def test_a_copied_block_continues_with_the_same_bits(start: int, format: int) -> None:
    program = PROGRAMS["plain"]
    ids = random_ids(program, random.Random(3), 100)
    model = model_of(PROGRAMS["plain"], format)
    whole = run_whole(model, ids, [0, 1])
    model.copy(1, 5)
    assert torch.equal(run_step(model, [chunk(ids, start, 100, [0, 5])]), whole[start:])


@pytest.mark.parametrize("format", [F32, BF16], ids=["f32", "bf16"])
def test_a_broken_sequence_hurts_no_neighbour(format: int) -> None:
    """Token 7 overflows to infinity and NaN; another sequence of the step keeps its bits."""
    program = llama()
    embedding = program.operations[0]
    embedding.table[7] = float("inf")  # type: ignore[union-attr]
    sound = [token for token in range(60) if token != 7]
    model = model_of(program, format)
    expected = run_whole(model, sound, [0])
    broken = [7] * 70
    both = run_step(
        model,
        [chunk(broken, 0, 70, [1, 2]), chunk(sound, 0, 59, [3]), chunk(broken, 0, 70, [4, 5])],
    )

    assert not both[:70].isfinite().any()
    assert torch.equal(both[70:129], expected)
