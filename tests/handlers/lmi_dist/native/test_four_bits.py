"""Floats that are rounded to 4 bits: close to what they were, and the same on every CPU."""

from __future__ import annotations

import numpy as np
import pytest

from handlers.lmi_dist.arrays import BFLOAT16, Array
from handlers.lmi_dist.native.library import Library
from handlers.lmi_dist.native.records import BITS4
from tests.handlers.lmi_dist.native.builds import library, variants
from tests.handlers.lmi_dist.native.test_gguf_blocks import (
    KIND_OF,
    NUM_IDS,
    NUM_IN,
    model_of,
    products,
    random_rows,
)

GROUP = 32
# A scale and a minimum are rounded to float16, so a weight may lie a little beyond half a step.
SLACK = 1.01


def random_weight() -> Array:
    """Groups of very different sizes, of one sign or two, and some of equal numbers."""
    dice = np.random.default_rng(4)
    groups = dice.standard_normal((NUM_IDS, NUM_IN // GROUP, GROUP))
    groups *= 10.0 ** dice.integers(-3, 2, (NUM_IDS, NUM_IN // GROUP, 1))
    groups[::5] = np.abs(groups[::5])
    groups[::7, 3] = 0.25
    groups[::11, 5] = 0
    return groups.reshape(NUM_IDS, NUM_IN).astype(np.float32)


def rows_of(kernels: Library, weight: Array) -> Array:
    """The numbers that a weight is rounded to, as an embedding reads them."""
    packed = kernels.pack(weight, BITS4)
    model = model_of(kernels, packed, [random_rows(KIND_OF["Q8_0"], 32)])
    products(model, list(range(NUM_IDS)))
    return model.buffer(1)[:NUM_IDS].copy()


@pytest.mark.parametrize("variant", variants())
def test_weights_lie_within_half_a_step_of_what_they_were(variant: str) -> None:
    weight = random_weight()
    found = rows_of(library(variant), weight)

    groups = weight.reshape(NUM_IDS, -1, GROUP)
    errors = (found - weight).reshape(groups.shape)
    steps = np.ptp(groups, axis=2, keepdims=True) / 15
    plain = np.round((groups - groups.min(axis=2, keepdims=True)) / np.maximum(steps, 1e-30))
    plain_errors = groups.min(axis=2, keepdims=True) + plain * steps - groups

    # A range may be cut, where that leaves smaller errors
    assert (np.abs(errors) <= SLACK * steps + 1e-3 * np.abs(groups) + 1e-7).all()

    share = np.square(errors).sum() / np.square(plain_errors).sum()
    print(f"the squares of errors are {share:.3f} of those of plain rounding")

    assert share < 0.95
    assert np.abs(errors[::7, 3]).max() <= 1e-3 * 0.25


def test_every_library_rounds_to_the_same_numbers() -> None:
    weight = random_weight()
    rows = [rows_of(library(kind), weight) for kind in variants()]
    for others in rows[1:]:
        assert np.array_equal(rows[0], others)


def test_the_same_numbers_in_bfloat16_are_rounded_to_the_same() -> None:
    kernels = library(variants()[0])
    bits = (random_weight().view(np.uint32) >> 16).astype(BFLOAT16)
    floats = (bits.astype(np.uint32) << 16).view(np.float32)
    in_bfloat16 = rows_of(kernels, bits)

    assert np.array_equal(in_bfloat16, rows_of(kernels, floats))


def test_a_weight_that_is_no_number_makes_its_group_none() -> None:
    weight = random_weight()
    weight[3, 40] = np.nan
    weight[4, 70] = np.inf
    for kind in variants():
        found = rows_of(library(kind), weight)
        is_finite = np.isfinite(found)
        assert not is_finite[3, 32:64].any() and not is_finite[4, 64:96].any()
        assert is_finite.sum() == found.size - 2 * GROUP
