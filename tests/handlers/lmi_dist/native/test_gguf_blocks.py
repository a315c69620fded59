"""Weights in GGUF's blocks: the products are those of the numbers in them.

A row's bits depend on that row only, in every type and in every library that this CPU can run.
"""

from __future__ import annotations

import numpy as np
import pytest

from handlers.lmi_dist.arrays import Array
from handlers.lmi_dist.gguf.block_rows import BlockRows
from handlers.lmi_dist.gguf.blocks import DEQUANTISE, ZERO4, ZERO8
from handlers.lmi_dist.native.library import Library
from handlers.lmi_dist.native.model import NativeModel
from handlers.lmi_dist.native.records import F32, Panels
from handlers.lmi_dist.operations import Embed, Gather, Linear, Program
from handlers.lmi_dist.plan import Chunk
from lmi.shared.gguf_file import TENSOR_TYPES, TensorType
from tests.handlers.lmi_dist.native.builds import library, variants

OF_FILES = [kind for kind in TENSOR_TYPES.values() if kind.name in DEQUANTISE]
WITH_BLOCKS = [*OF_FILES, ZERO4, ZERO8]
KIND_OF = {kind.name: kind for kind in WITH_BLOCKS}
# Of a product: of sums in float32, and of scales in two levels that become float16.
MAX_ERROR = 1e-5
MAX_ERROR_OF_TWO_LEVELS = 1e-3
# Of scales in float32 that lose 8 bits.
MAX_ERROR_OF_SCALES = 2e-5
# The inputs that share a scale, and the largest of its integers.
GROUP = 32
LARGEST = 32767
NUM_IDS = 90
NUM_IN = 512
MAX_LENGTH = 128


def random_rows(kind: TensorType, num_rows: int, num_in: int = NUM_IN, seed: int = 0) -> BlockRows:
    """Random blocks whose scales are of usual sizes."""
    dice = np.random.default_rng(seed)
    num_bytes = num_in // kind.num_elements * kind.num_bytes
    blocks = dice.integers(0, 256, (num_rows, num_bytes), np.uint8).reshape(-1, kind.num_bytes)
    places = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
    if kind in (ZERO4, ZERO8):
        scales = dice.uniform(0.001, 0.02, (len(blocks), 1)).astype(np.float32)
        blocks[:, 0:4] = scales.view(np.uint8)
        if kind is ZERO4:
            blocks[:, 4] %= 16

        return BlockRows(kind, blocks.reshape(num_rows, num_bytes))

    for place in places.get(kind.name, (0,)):
        halves = dice.uniform(0.001, 0.02, (len(blocks), 1)).astype(np.float16)
        blocks[:, place : place + 2] = halves.view(np.uint8)

    return BlockRows(kind, blocks.reshape(num_rows, num_bytes))


def model_of(
    kernels: Library,
    table: Array | BlockRows | Panels,
    weights: list[BlockRows],
    num_threads: int = 2,
) -> NativeModel:
    """Logits are the rows of the table by the weight."""
    num_out = sum(len(rows) for rows in weights)
    packed_table = kernels.pack_blocks([table]) if isinstance(table, BlockRows) else table
    program = Program(
        operations=(
            Embed(0, packed_table),
            Gather(0, 1),
            Linear(1, 2, kernels.pack_blocks(weights)),
        ),
        widths=(NUM_IN, NUM_IN, num_out),
        wanted=frozenset({1, 2}),
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=1,
        vocab_size=NUM_IDS,
        max_length=MAX_LENGTH,
    )
    return NativeModel(kernels, program, 4, num_threads)


def products(model: NativeModel, ids: list[int]) -> Array:
    return model.run([Chunk(0, 0, ids, len(ids), [0, 1])]).copy()


def random_table(seed: int = 5) -> Array:
    """Rows of very different sizes, and of inputs that are far from each other."""
    dice = np.random.default_rng(seed)
    sizes = 10.0 ** dice.integers(-3, 4, (NUM_IDS, 1))
    numbers = dice.standard_normal((NUM_IDS, NUM_IN)) * sizes
    numbers[:, 100] *= 300
    return numbers.astype(np.float32)


def rounding_of(inputs: Array) -> Array:
    """What an input loses at most as a whole number of 16 bits, (num_rows, num_in)."""
    largest = np.abs(inputs).reshape(len(inputs), -1, GROUP).max(axis=2)
    return np.repeat(largest / LARGEST * 0.51, GROUP, axis=1)


def bound_of(kind: TensorType, usual: float) -> float:
    """The relative error of a number, `usual` where its type keeps scales as they are."""
    if kind in (ZERO4, ZERO8):
        return MAX_ERROR_OF_SCALES

    return MAX_ERROR_OF_TWO_LEVELS if kind.name.endswith("_K") else usual


@pytest.mark.parametrize("kind", WITH_BLOCKS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("num_out", [1, 33, 100])
@pytest.mark.parametrize("variant", variants())
def test_products_are_those_of_the_numbers_in_the_blocks(
    variant: str, kind: TensorType, num_out: int
) -> None:
    table = random_table()
    weight = random_rows(kind, num_out)
    numbers = weight.floats().astype(np.float64)
    bound = bound_of(kind, MAX_ERROR)
    model = model_of(library(variant), table, [weight])
    for num_rows in (1, 2, 5, 7, 40, 90):
        ids = [(7 * i + num_rows) % NUM_IDS for i in range(num_rows)]
        inputs = table[ids].astype(np.float64)
        limit = (bound * np.abs(inputs) + rounding_of(inputs)) @ np.abs(numbers).T

        assert (np.abs(products(model, ids) - inputs @ numbers.T) <= limit).all()


@pytest.mark.parametrize("kind", WITH_BLOCKS, ids=lambda kind: kind.name)
def test_a_row_has_the_same_bits_alone_in_any_batch_on_any_thread_and_in_every_library(
    kind: TensorType,
) -> None:
    table = random_table()
    weight = random_rows(kind, 100)
    first = model_of(library(variants()[0]), table, [weight], num_threads=1)
    expected = np.concatenate([products(first, [token]) for token in range(NUM_IDS)])
    for variant in variants():
        for num_threads in (1, 3):
            model = model_of(library(variant), table, [weight], num_threads)
            for num_rows in (1, 2, 3, 6, 7, 13, 64, 90):
                ids = list(range(NUM_IDS - num_rows, NUM_IDS))
                found = products(model, ids).view(np.uint32)
                assert np.array_equal(found, expected[ids].view(np.uint32))


@pytest.mark.parametrize("kind", WITH_BLOCKS, ids=lambda kind: kind.name)
def test_a_row_of_an_embedding_has_the_numbers_in_its_blocks(kind: TensorType) -> None:
    table = random_rows(kind, NUM_IDS)
    numbers = table.floats()
    for variant in variants():
        model = model_of(library(variant), table, [random_rows(KIND_OF["Q8_0"], 32)])
        products(model, list(range(NUM_IDS)))
        found = model.buffer(1)[:NUM_IDS]
        limit = bound_of(kind, 1e-6)
        assert np.abs(found - numbers).max() <= limit * np.abs(numbers).max()


@pytest.mark.parametrize("num_first", [64, 50])
def test_a_weight_may_have_rows_of_several_types(num_first: int) -> None:
    """Where two types meet within a panel it is in float32."""
    table = random_table()
    kinds = ("Q4_K", "Q6_K", "Q8_0")
    sizes = (num_first, 32, 40)
    weights = [random_rows(KIND_OF[kind], size) for kind, size in zip(kinds, sizes, strict=True)]
    for variant in variants():
        kernels = library(variant)
        assert (kernels.pack_blocks(weights).format == F32) == (num_first == 50)

        model = model_of(kernels, table, weights)
        for ids in ([3], list(range(40))):
            apart = [products(model_of(kernels, table, [rows]), ids) for rows in weights]
            together = products(model, ids)
            if num_first == 64:
                assert np.array_equal(together, np.concatenate(apart, axis=1))
            else:
                limit = 2e-3 * np.abs(together).max()
                assert np.abs(together - np.concatenate(apart, axis=1)).max() <= limit


def test_inputs_that_are_not_finite_stay_in_their_row() -> None:
    table = random_table()
    table[7, 3] = np.inf
    table[8, 200] = np.nan
    for variant in variants():
        model = model_of(library(variant), table, [random_rows(KIND_OF["Q4_1"], 40)])
        found = products(model, [6, 7, 8, 9])
        assert np.isfinite(found[[0, 3]]).all()
        assert not np.isfinite(found[[1, 2]]).any()
