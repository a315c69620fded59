"""The promise of the native kernels: the bits of a token's logits depend only on the tokens before
it.

Sequences run in random batches, cut at random, on one to three threads, with beginnings that
earlier sequences have computed. Every row of logits is compared with that of the same token in a
prompt that ran whole and by itself. LMI_BIT_COMPARISONS is the number of rows over all tests.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from handlers.lmi_dist.native_runner import NativeRunner
from handlers.lmi_dist.plan import BlockCopy, Chunk, Plan
from lmi.settings.config import EngineConfig
from tests.handlers.lmi_dist.play import forward, load_native
from tests.tiny_models import VOCAB_SIZE, tiny_model

SETTINGS: dict[str, dict[str, str]] = {
    "f32": {"dtype": "fp32"},
    "bf16": {"dtype": "bf16"},
    "int8": {"quantize": "int8"},
    "int4": {"quantize": "int4"},
    # Keys and values are bfloat16 where the CPU multiplies it.
    "int8_bf16": {"quantize": "int8", "dtype": "bf16"},
}
CASES = [(family, kind) for family in ("llama", "gemma2", "phi") for kind in SETTINGS] + [
    (family, "f32") for family in ("mistral", "qwen3", "gemma3", "gpt2", "opt_post_norm")
]
NUM_COMPARISONS = int(os.environ.get("LMI_BIT_COMPARISONS", "6000"))
MAX_LENGTH = 200
PIECES = (1, 1, 1, 2, 5, 17, 64, 130)
NUM_BLOCKS = 128


@dataclass
class Cached:
    """A sequence whose first `end` tokens have keys and values in the blocks of `table`."""

    # Among the sequences of a test
    index: int
    ids: list[int]
    table: list[int] = field(default_factory=list)
    end: int = 0


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_no_batch_no_cut_no_thread_and_no_reuse_changes_a_bit(family: str, kind: str) -> None:
    draw = random.Random(f"{family} {kind}")
    runners = [load(family, kind, num_threads) for num_threads in (1, 2, 3)]
    sequences = list(related_sequences(draw))
    expected = [whole(runners[0], ids) for ids in sequences]
    states: list[list[Cached]] = [[] for _ in runners]
    num_compared = num_reused = 0
    while num_compared < NUM_COMPARISONS / len(CASES) or num_reused < 8:
        number = draw.randrange(len(runners))
        batch = [
            Cached(index, sequences[index])
            for index in draw.choices(range(len(sequences)), k=draw.randint(1, 9))
        ]
        copies = seat(draw, batch, states[number])
        num_reused += sum(sequence.end > 0 for sequence in batch)
        num_compared += check_round(draw, runners[number], batch, copies, expected)
        states[number] = batch

    print(
        f"{family} {kind}: {num_compared} rows compared, {num_reused} sequences reused a beginning"
    )


def load(family: str, kind: str, num_threads: int) -> NativeRunner:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", str(num_threads))
        return load_native(
            tiny_model(family), EngineConfig(**SETTINGS[kind]), max_length=MAX_LENGTH
        )  # type: ignore[arg-type]


def related_sequences(draw: random.Random) -> Iterator[list[int]]:
    """Sequences that often begin like another one."""
    roots = [draw.choices(range(3, VOCAB_SIZE), k=MAX_LENGTH) for _ in range(4)]
    for root in roots:
        yield root
        for _ in range(3):
            shared = draw.randint(0, MAX_LENGTH - 1)
            length = draw.randint(1, MAX_LENGTH)
            yield (root[:shared] + draw.choices(range(3, VOCAB_SIZE), k=MAX_LENGTH - shared))[
                :length
            ]


def whole(runner: NativeRunner, ids: list[int]) -> Tensor:
    """The logits of every token, computed in one chunk."""
    return forward(runner, Plan([], [Chunk(0, 0, ids, len(ids), [7, 3, 9, 1])]))


def seat(draw: random.Random, batch: list[Cached], before: list[Cached]) -> list[BlockCopy]:
    """Give every sequence its blocks, with a beginning that an earlier sequence has left. Returns
    blocks to copy.
    """
    taken_blocks = {block for sequence in before for block in sequence.table}
    free = [block for block in range(NUM_BLOCKS) if block not in taken_blocks]
    draw.shuffle(free)
    copies: list[BlockCopy] = []
    for sequence in batch:
        source = max(before, key=lambda other: common(sequence.ids, other.ids), default=None)
        if source is not None and draw.random() < 0.7:
            sequence.end = draw.randint(
                0, min(common(sequence.ids, source.ids), len(sequence.ids) - 1)
            )
            sequence.table = source.table[: sequence.end // 64]
            if sequence.end % 64:
                copies.append(BlockCopy(source.table[sequence.end // 64], free[-1]))

        while len(sequence.table) * 64 < len(sequence.ids):
            sequence.table.append(free.pop())

    return copies


def common(one: list[int], other: list[int]) -> int:
    """How many tokens two sequences have in common at their beginnings."""
    pairs = zip(one, other, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def check_round(
    draw: random.Random,
    runner: NativeRunner,
    batch: list[Cached],
    copies: list[BlockCopy],
    expected: list[Tensor],
) -> int:
    """Run a batch to its end and compare all logits that were asked for. Returns their number."""
    num_compared = 0
    while unfinished := [sequence for sequence in batch if sequence.end < len(sequence.ids)]:
        chunks = []
        rows = []
        for sequence in draw.sample(unfinished, draw.randint(1, len(unfinished))):
            ids = sequence.ids[sequence.end : sequence.end + draw.choice(PIECES)]
            start, sequence.end = sequence.end, sequence.end + len(ids)
            num_logits = draw.choice([0, 1, len(ids), len(ids)])
            chunks.append(Chunk(0, start, ids, num_logits, sequence.table))
            rows.append(expected[sequence.index][sequence.end - num_logits : sequence.end])

        logits = forward(runner, Plan([], chunks, copies))
        expected_logits = torch.cat(rows)
        assert logits.shape == expected_logits.shape
        assert torch.equal(logits.view(torch.int32), expected_logits.view(torch.int32))
        num_compared, copies = num_compared + len(expected_logits), []

    return num_compared
