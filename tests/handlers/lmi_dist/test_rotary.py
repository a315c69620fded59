"""Frequencies and rotations against those that transformers computes with torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from handlers.lmi_dist.rotary import Rotary, rotaries_of

RULES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 3.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn with scales": {
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 1.0,
        "beta_fast": 24,
        "beta_slow": 2,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
    "yarn with its factor of attention": {
        "factor": 4.0,
        "attention_factor": 1.25,
        "original_max_position_embeddings": 32768,
    },
    "longrope": {"original_max_position_embeddings": 4096},
    "longrope by a factor": {
        "original_max_position_embeddings": 4096,
        "factor": 16.0,
        "partial_rotary_factor": 0.75,
    },
}


@pytest.mark.parametrize("theta", [10_000.0, 500_000, 1e6])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("name", RULES)
def test_frequencies_are_those_of_transformers_but_for_the_last_bits_of_few(
    name: str, head_dim: int, theta: float
) -> None:
    parameters = {"rope_type": name.split()[0], "rope_theta": theta} | RULES[name]
    if parameters["rope_type"] == "longrope":
        num_pairs = int(head_dim * parameters.get("partial_rotary_factor", 1.0)) // 2
        parameters |= {
            "short_factor": [1 + 0.1 * i for i in range(num_pairs)],
            "long_factor": [9.0] * num_pairs,
        }

    config = LlamaConfig(
        head_dim=head_dim, max_position_embeddings=131072, rope_parameters=parameters
    )
    expected, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))
    [rotary] = rotaries_of(config, ["full_attention"], head_dim) or ()
    frequencies = np.array(rotary.frequencies, np.float32)

    assert rotary.factor == factor
    assert frequencies.shape == expected.shape

    # Where torch's power is off by its last bit
    np.testing.assert_array_max_ulp(frequencies, expected.numpy(), 2)

    assert np.sum(frequencies != expected.numpy()) <= 4


def test_a_rule_that_is_not_known_has_no_rotaries() -> None:
    parameters = {"rope_type": "proportional", "rope_theta": 1e4}
    assert rotaries_of(LlamaConfig(rope_parameters=parameters), ["full_attention"], 64) is None


def test_rotations_are_exact_sines_and_cosines_rounded_once() -> None:
    frequencies = tuple((1.0 / 1e4 ** (torch.arange(0, 128, 2).float() / 128)).tolist())
    table = Rotary(frequencies).rotations(4096)
    angles = torch.arange(4096).float()[:, None] * torch.tensor(frequencies)
    exact = torch.stack((angles.double().cos(), angles.double().sin()), dim=1).float()

    assert table.dtype == np.float32 and table.shape == (4096, 2, 64)
    assert np.mean(table != exact.numpy()) < 1e-6
    assert np.abs(table - torch.stack((angles.cos(), angles.sin()), dim=1).numpy()).max() < 1.2e-7
    assert np.array_equal(Rotary(frequencies, 1.25).rotations(4096), table * np.float32(1.25))
