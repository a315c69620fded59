"""What breaks a rule is refused before anything is read or written, with a line that names it."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from handlers.lmi_dist.arrays import Array
from handlers.lmi_dist.native.model import NativeModel
from handlers.lmi_dist.native.records import BF16, F32
from handlers.lmi_dist.native.step_lists import StepLists
from handlers.lmi_dist.plan import Chunk
from tests.handlers.lmi_dist.native.builds import exact_variants, library, variants
from tests.handlers.lmi_dist.native.models import llama, packed, run_step

KERNELS = library(variants()[0])
NUM_BLOCKS = 4
MAX_LENGTH = 200


def new_model() -> NativeModel:
    program = llama(max_length=MAX_LENGTH)
    return NativeModel(KERNELS, packed(KERNELS, program, F32), NUM_BLOCKS, num_threads=2)


MODEL = new_model()
numbers = st.one_of(st.integers(-3, 300), st.sampled_from([2**31 - 1, -(2**31), 2**31]))
columns = st.lists(numbers, max_size=8)


@settings(max_examples=500)
@given(ids=columns, starts=columns, lengths=columns, blocks=columns, wanted=columns)
def test_steps_of_any_numbers_run_or_are_refused(
    ids: list[int], starts: list[int], lengths: list[int], blocks: list[int], wanted: list[int]
) -> None:
    num_chunks = min(len(starts), len(lengths))
    try:
        MODEL._run_step(StepLists(ids, starts[:num_chunks], lengths[:num_chunks], blocks, wanted))
    except ValueError as error:
        assert str(error)


VALID: tuple[list[int], ...] = ([5, 6, 7, 8], [62, 0], [3, 1], [2, 0, 1], [2, 3])
"""Two chunks: three tokens over the border of two blocks, and one token."""


@settings(max_examples=500)
@given(st.data())
def test_a_step_with_one_wrong_number_runs_or_is_refused(data: st.DataObject) -> None:
    step = [list(column) for column in VALID]
    column = step[data.draw(st.integers(0, len(step) - 1))]
    column[data.draw(st.integers(0, len(column) - 1))] = data.draw(numbers)
    MODEL._reserve(4, 2)
    try:
        MODEL._run_step(StepLists(*step))
    except ValueError as error:
        assert str(error)


@pytest.mark.parametrize(
    ("chunk", "says"),
    [
        (Chunk(0, 0, [96], table=[0]), "a token id must be from 0 to 95, given 96"),
        (Chunk(0, 0, [-1], table=[0]), "a token id must be from 0 to 95, given -1"),
        (Chunk(0, 0, [1], table=[4]), "a block of a table must be from 0 to 3, given 4"),
        (Chunk(0, 0, [1], table=[-1]), "a block of a table must be from 0 to 3, given -1"),
        (
            Chunk(0, 64, [1], table=[0]),
            "the number of blocks must be what the chunks need, 2, given 1",
        ),
        (
            Chunk(0, 200, [1], table=[0, 1, 2, 3]),
            "start of a chunk must be from 0 to 199, given 200",
        ),
        (Chunk(0, -1, [1, 2], table=[0]), "start of a chunk must be from 0 to 198, given -1"),
        (Chunk(0, 0, [], table=[]), "num_rows must be from 1 to 2147483647, given 0"),
        (Chunk(0, 0, [1], 2, table=[0]), "num_wanted must be from 0 to 1, given 2"),
        (Chunk(0, 0, [2**31], table=[0]), "a number of the step does not fit in 32 bits"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_refusal_names_the_rule_and_the_value(chunk: Chunk, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        run_step(MODEL, [chunk])


def test_a_refused_step_leaves_no_trace() -> None:
    ids = list(range(60))
    whole = run_step(MODEL, [Chunk(0, 0, ids, 60, [0])])
    pool = MODEL.pool.copy()
    with pytest.raises(ValueError):
        run_step(MODEL, [Chunk(0, 0, [9, 9], 2, [0]), Chunk(0, 0, [96], 1, [1])])

    assert (MODEL.pool == pool).all()
    assert torch.equal(run_step(MODEL, [Chunk(0, 0, ids, 60, [0])]), whole)


# of llama()
EMBED = 0
NORM = 1
LINEAR = 2
ATTEND = 3
GATHER = 12
HEAD = -1
# Rows of another number
BAD_FIELDS: list[tuple[int, str, Any]] = [
    *(
        (op, field, value)
        for op in (NORM, LINEAR, ATTEND, GATHER)
        for field in ("input", "output")
        for value in (-1, 11)
    ),
    *((op, "kind", value) for op in (EMBED, LINEAR) for value in (-1, 6)),
    *((op, field, 5) for op in (NORM, LINEAR, ATTEND) for field in ("input", "output")),
    (EMBED, "output", 5),
    (EMBED, "table", None),
    (EMBED, "table_dtype", 2),
    (NORM, "norm", None),
    (NORM, "output", 2),  # of another width
    (LINEAR, "weight", None),
    (LINEAR, "activation", 5),
    (LINEAR, "activation", -1),
    (LINEAR, "output", 1),  # its input
    (LINEAR, "input", 4),
    (LINEAR, "output", 0),
    (ATTEND, "layer", 2),
    (ATTEND, "layer", -1),
    (ATTEND, "window", -1),
    (ATTEND, "num_pairs", 9),
    (ATTEND, "num_pairs", -1),
    (ATTEND, "rotations", None),
    (ATTEND, "is_wanted", 1),
    (ATTEND, "is_wanted", 2),
    (ATTEND, "output", 2),
    (ATTEND, "input", 1),
    (GATHER, "output", 1),
    (GATHER, "input", 5),
    (HEAD, "output", 9),
]


@pytest.mark.parametrize(("op", "field", "value"), BAD_FIELDS)
def test_a_wrong_field_of_an_operation_is_refused(op: int, field: str, value: Any) -> None:
    model = new_model()
    setattr(model._ops[op % len(model._ops)], field, value)
    with pytest.raises(ValueError):
        run_step(model, [Chunk(0, 0, [1, 2], 1, [0])])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(
            (field, 0)
            for field in (
                "num_ops",
                "num_buffers",
                "num_blocks",
                "num_layers",
                "num_heads",
                "num_kv_heads",
            )
        ),
        *(
            (field, 0)
            for field in (
                "head_dim",
                "vocab_size",
                "max_length",
                "ops",
                "buffers",
                "pool",
                "pool_bytes",
            )
        ),
        ("num_blocks", NUM_BLOCKS + 1),
        # More than the pool has
        ("num_layers", 3),
        ("num_heads", 3),
        ("num_heads", 8),
        ("num_kv_heads", 3),
        ("num_kv_heads", 4),
        ("head_dim", 513),
        ("head_dim", 17),
    ],
)
def test_a_wrong_field_of_a_model_is_refused(field: str, value: int) -> None:
    model = new_model()
    setattr(model._model, field, value or (None if field in ("ops", "buffers", "pool") else 0))
    with pytest.raises(ValueError):
        run_step(model, [Chunk(0, 0, [1, 2], 1, [0])])


@pytest.mark.parametrize(
    ("field", "value"), [("data", None), ("width", 0), ("is_wanted", 2), ("num_rows", 1)]
)
def test_a_wrong_buffer_is_refused(field: str, value: int | None) -> None:
    model = new_model()
    model._reserve(2, 2)
    setattr(model._buffers[0], field, value)
    with pytest.raises(ValueError):
        model._run_step(StepLists([1, 2], [0], [2], [0], [1]))


@pytest.mark.parametrize(
    "weight", [np.zeros(3, np.float32), np.zeros((0, 3), np.float32), np.zeros((3, 3))]
)
def test_only_matrices_of_floats_are_packed(weight: Array) -> None:
    with pytest.raises(ValueError, match="a weight must be a matrix of floats"):
        KERNELS.pack(weight, F32)


@contextmanager
def address_space(more_bytes: int) -> Iterator[None]:
    """Let this process take so much more, and no more."""
    before, hard = resource.getrlimit(resource.RLIMIT_AS)
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (num_pages * resource.getpagesize() + more_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, hard))


@pytest.mark.skipif(
    "LMI_NATIVE_LIBRARY" in os.environ, reason="a sanitizer ends a process without memory"
)
def test_a_step_that_finds_no_memory_is_refused_and_the_next_one_runs() -> None:
    model = new_model()
    num_chunks = 3 << 20
    step = [[5] * num_chunks, [0] * num_chunks, [1] * num_chunks, [0] * num_chunks, []]
    model._reserve(num_chunks, 2)
    # The arrays of the step take 50 MB
    with (
        address_space(55 << 20),
        pytest.raises(ValueError, match="bad_alloc"),
    ):
        model._run_step(StepLists(*step))

    model._run_step(StepLists(*VALID))


@pytest.mark.parametrize("kind", exact_variants())
def test_keys_and_values_in_bfloat16_need_a_cpu_that_multiplies_it(kind: str) -> None:
    kernels = library(kind)
    weights = packed(kernels, llama(max_length=MAX_LENGTH), BF16)
    model = NativeModel(kernels, weights, NUM_BLOCKS, num_threads=1, kv_format=BF16)
    with pytest.raises(ValueError, match="kv_format must be from 0 to 0, given 1"):
        model.run([Chunk(0, 0, [1], table=[0])])
