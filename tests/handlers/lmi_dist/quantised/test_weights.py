"""The numbers of a quantised weight, and the blocks that hold it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from msgspec.structs import replace

from handlers.lmi_dist.quantised.blocks import blocks_of, type_of
from handlers.lmi_dist.quantised.scheme import Layout, Scheme
from handlers.lmi_dist.quantised.tensors import QuantisedTensors
from handlers.lmi_dist.quantised.weight import QuantisedWeight

NUM_OUT = 24
NUM_IN = 128


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


def assert_blocks_hold(weight: QuantisedWeight, kind: str) -> None:
    """In blocks of this type, to the bit."""
    found = type_of(weight)
    assert found is not None and found.name == kind
    blocks = blocks_of(weight)
    assert blocks is not None and blocks.type is found and blocks.shape == weight.shape
    assert np.array_equal(blocks.floats(), weight.floats(), equal_nan=True)


def test_numbers_scales_and_zero_points_make_floats() -> None:
    weight = weight_of(4)
    floats = weight.floats()
    codes = weight.read_codes()
    for row, column in ((0, 0), (3, 31), (3, 32), (NUM_OUT - 1, NUM_IN - 1)):
        group = column // 32
        step = int(codes[row, column]) - int(weight.zero_points[row, group])

        assert floats[row, column] == np.float32(step) * weight.scales[row, group]


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize(("num_bits", "kind"), [(4, "ZERO4"), (8, "ZERO8")])
def test_blocks_hold_the_numbers_of_a_weight(num_bits: int, kind: str, group_size: int) -> None:
    assert_blocks_hold(weight_of(num_bits, group_size=group_size), kind)


@pytest.mark.parametrize("num_bits", [4, 8])
def test_blocks_hold_the_smallest_and_the_largest_zero_point(num_bits: int) -> None:
    for zero_point in (0, 2 ** (num_bits - 1), 2**num_bits - 1):
        assert_blocks_hold(weight_of(num_bits, zero_point), f"ZERO{num_bits}")


@pytest.mark.parametrize("scale", [0, 2.0**-24, 1e-30, 1e5, -1e5, 1e30, np.inf, np.nan])
def test_blocks_hold_any_scale(scale: float) -> None:
    """Makers write the smallest float16 for a group of zeros."""
    weight = weight_of(4)
    scales = weight.scales.copy()
    scales[5] = scale
    with np.errstate(invalid="ignore"):
        assert_blocks_hold(with_scales(weight, scales), "ZERO4")


def test_groups_that_share_a_block_keep_floats() -> None:
    mixed = replace(weight_of(4), groups=np.arange(NUM_IN) % 4)
    for weight in (weight_of(4, group_size=16), mixed):
        assert type_of(weight) is None
        assert blocks_of(weight) is None

    assert_blocks_hold(replace(weight_of(4), groups=np.arange(NUM_IN)[::-1] // 32), "ZERO4")


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
