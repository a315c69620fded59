"""Linears that the makers' libraries have quantised are read as these libraries read them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from handlers.lmi_dist.quantised.blocks import blocks_of, type_of
from handlers.lmi_dist.quantised.scheme import read_scheme
from handlers.lmi_dist.quantised.tensors import QuantisedTensors
from tests.handlers.lmi_dist.quantised.make_samples import (
    NUM_IN,
    NUM_OUT,
    ROW_STEP,
    SAMPLES,
)

# By the type of the blocks that hold them
TYPES = {
    "awq": "ZERO4",
    "gptq_4": "ZERO4",
    "gptq_8": "ZERO8",
    "gptq_4_order": None,
    "gptq_v2_4": "ZERO4",
    "gptq_v2_8": "ZERO8",
    "gptq_v2_4_order": None,
    "packed_4": "ZERO4",
    "packed_4_order": None,
    "packed_8": "ZERO8",
    "packed_8_zeros": "ZERO8",
    "integers": "ZERO8",
    "integers_zeros": "ZERO8",
}


@pytest.mark.parametrize("name", TYPES)
def test_a_linear_of_the_makers_has_their_floats(name: str) -> None:
    with safe_open(SAMPLES, "np") as file:
        config = {"quantization_config": json.loads(file.metadata()[name])}
        expected = file.get_tensor(f"{name}.floats")
        names = [key for key in file.keys() if key.startswith(f"{name}.")]  # noqa: SIM118
        scheme = read_scheme(Path("config.json"), config)
        assert scheme is not None
        weight = QuantisedTensors(scheme, names, file.get_tensor)[f"{name}.weight"]
        floats = weight.floats()

    assert weight.shape == (NUM_OUT, NUM_IN)
    assert np.array_equal(floats[::ROW_STEP].astype(np.float16), expected)

    kind = type_of(weight)
    assert (kind and kind.name) == TYPES[name]
    if kind is not None:
        blocks = blocks_of(weight)
        assert blocks is not None
        assert np.array_equal(blocks.floats(), floats)


def test_every_sample_is_tested() -> None:
    with safe_open(SAMPLES, "np") as file:
        assert file.metadata().keys() == TYPES.keys()


def test_the_first_format_of_gptq_has_zero_points_of_zero_among_its_samples() -> None:
    """Where a word of zero points has borrowed."""
    with safe_open(SAMPLES, "np") as file:
        zeros = {name: file.get_tensor(f"{name}.qzeros") for name in ("gptq_4", "gptq_v2_4")}

    nibbles = zeros["gptq_v2_4"].view(np.uint8)
    assert ((nibbles & 15) == 0).any() or ((nibbles >> 4) == 0).any()
    assert not np.array_equal(zeros["gptq_4"], zeros["gptq_v2_4"])
