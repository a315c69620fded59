"""The numbers of a quantised weight, and the blocks that hold it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from handlers.lmi_dist.quantised.blocks import MAX_ZERO_POINT, blocks_of, type_of
from handlers.lmi_dist.quantised.scheme import Layout, Scheme
from handlers.lmi_dist.quantised.tensors import QuantisedTensors
from handlers.lmi_dist.quantised.weight import QuantisedWeight

NUM_OUT = 24
NUM_IN = 128
# What a weight moves at most, in the largest steps of its row
MAX_MOVE_OF_FOUR_BITS = 30 / 2048
MAX_MOVE_OF_EIGHT_BITS = 128 / 2048


def weight_of(
    num_bits: int, zero_points: int | None = None, group_size: int = 32, seed: int = 0
) -> QuantisedWeight:
    """Random numbers, with scales in float32 that no float16 holds."""
    dice = np.random.default_rng(seed)
    top = 2**num_bits
    codes = dice.integers(0, top, (NUM_OUT, NUM_IN)).astype(np.uint8)
    groups = np.arange(NUM_IN) // group_size
    shape = (NUM_OUT, int(groups.max()) + 1)
    zeros = dice.integers(0, top, shape) if zero_points is None else np.full(shape, zero_points)
    return QuantisedWeight(
        shape=codes.shape,
        num_bits=num_bits,
        read_codes=lambda: codes,
        scales=dice.uniform(1e-4, 1e-2, shape).astype(np.float32),
        zero_points=zeros,
        groups=groups,
    )


def with_scales(weight: QuantisedWeight, scales: npt.NDArray[np.float32]) -> QuantisedWeight:
    return replace(weight, scales=scales)


def moves(weight: QuantisedWeight) -> npt.NDArray[np.float64]:
    """How far the weights in blocks lie from those of float32, in the largest steps of a row."""
    blocks = blocks_of(weight)
    assert blocks is not None and blocks.shape == weight.shape
    largest = np.abs(weight.scales).max(axis=1, keepdims=True)
    exact = weight.floats().astype(np.float64)
    return np.abs(blocks.floats().astype(np.float64) - exact) / largest


def test_numbers_scales_and_zero_points_make_floats() -> None:
    weight = weight_of(4)
    floats = weight.floats()
    codes = weight.read_codes()
    for row, column in ((0, 0), (3, 31), (3, 32), (NUM_OUT - 1, NUM_IN - 1)):
        group = column // 32
        step = int(codes[row, column]) - int(weight.zero_points[row, group])
        assert floats[row, column] == np.float32(step) * weight.scales[row, group]


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_four_bits_stay_four_bits_and_move_by_less_than_their_bound(group_size: int) -> None:
    weight = weight_of(4, group_size=group_size)
    kind = type_of(weight)
    assert kind is not None and kind.name == "Q4_1"
    found = moves(weight)
    print(f"moved by {found.max():.5f}")
    assert 0 < found.max() <= MAX_MOVE_OF_FOUR_BITS


def test_eight_bits_stay_eight_bits_and_move_by_less_than_their_bound() -> None:
    weight = weight_of(8, zero_points=128)
    kind = type_of(weight)
    assert kind is not None and kind.name == "Q8_0"
    assert 0 < moves(weight).max() <= MAX_MOVE_OF_EIGHT_BITS


@pytest.mark.parametrize(("num_bits", "zero_points"), [(4, 8), (4, 0), (8, 128)])
def test_blocks_of_scales_in_float16_hold_the_same_numbers(num_bits: int, zero_points: int) -> None:
    weight = weight_of(num_bits, zero_points)
    halves = weight.scales.astype(np.float16).astype(np.float32)
    assert moves(with_scales(weight, halves)).max() == 0


def test_the_smallest_float16_is_a_scale_of_blocks() -> None:
    """Makers write such a scale for a group of zeros."""
    weight = weight_of(8, zero_points=128)
    scales = np.full_like(weight.scales, 2.0**-24)
    scales[:, 1] = 0
    assert moves(with_scales(weight, scales[:, :])).max() == 0


@pytest.mark.parametrize("scale", [1e-7, 1e5, -1e5, np.inf, np.nan])
def test_a_scale_that_no_float16_is_near_keeps_floats(scale: float) -> None:
    weight = weight_of(4)
    scales = weight.scales.copy()
    scales[5] = scale
    assert type_of(with_scales(weight, scales)) is None
    assert blocks_of(with_scales(weight, scales)) is None


def test_a_minimum_that_is_too_large_keeps_floats() -> None:
    weight = weight_of(4, zero_points=MAX_ZERO_POINT)
    large = np.full_like(weight.scales, 65504 / MAX_ZERO_POINT * 1.01)
    assert type_of(with_scales(weight, large)) is None
    assert type_of(with_scales(weight, large / 2)) is not None


def test_groups_that_share_a_block_keep_floats() -> None:
    assert type_of(weight_of(4, group_size=16)) is None
    mixed = replace(weight_of(4), groups=np.arange(NUM_IN) % 4)
    assert type_of(mixed) is None

    moved = replace(weight_of(4), groups=np.arange(NUM_IN)[::-1] // 32)
    assert moves(moved).max() <= MAX_MOVE_OF_FOUR_BITS


def test_eight_bits_with_zero_points_keep_floats() -> None:
    assert type_of(weight_of(8)) is None
    assert type_of(weight_of(8, zero_points=127)) is None


def test_zero_points_of_the_first_format_of_gptq_may_be_zero() -> None:
    """It keeps them less 1, and a 0 borrows from its neighbour in the word."""
    zeros = np.array([[0, 0, 1, 15, 8, 0, 7, 3]], np.uint32)
    word = sum(int(zero) << 4 * place for place, zero in enumerate(zeros[0]))
    stored = np.array([[word - 0x11111111 & 0xFFFFFFFF]], np.uint32).view(np.int32)
    tensors = {
        "linear.qweight": np.zeros((4, 8), np.int32),
        "linear.qzeros": stored,
        "linear.scales": np.ones((1, 8), np.float16),
    }
    scheme = Scheme(Layout.GPTQ, num_bits=4, group_size=32)
    weight = QuantisedTensors(scheme, tensors, tensors.__getitem__)["linear.weight"]
    assert np.array_equal(weight.zero_points.T, zeros)
    assert np.array_equal(weight.floats()[:, 0], -zeros[0].astype(np.float32))


def test_tensors_that_are_not_quantised_are_no_parts() -> None:
    names = ["a.qweight", "a.scales", "a.qzeros", "a.bias", "norm.weight", "b.weight"]
    scheme = Scheme(Layout.AWQ, num_bits=4, group_size=32)
    tensors = QuantisedTensors(scheme, names, {}.__getitem__)
    assert list(tensors) == ["a.weight"]
    assert set(tensors.parts_of("a.weight")) == {"a.qweight", "a.scales", "a.qzeros"}
    assert set(tensors.parts_of("b.weight")) == set()
