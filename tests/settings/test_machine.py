"""Cores, GPUs, and how many replicas fit."""

from __future__ import annotations

import pytest

from lmi.settings.handler import Machine, num_engines


@pytest.mark.parametrize(
    ("num_gpus", "gpus_each", "low", "high", "wanted"),
    [(8, 2, None, None, 4), (8, 2, 2, 3, 3), (7, 2, None, None, 3), (8, 8, None, None, 1), (0, 1, None, None, 1)],
)
def test_replicas_share_the_gpus(num_gpus: int, gpus_each: int, low: int, high: int, wanted: int) -> None:
    assert num_engines(num_gpus, gpus_each, low, high) == wanted


def test_the_machine_has_cores_and_obeys_the_list_of_visible_gpus() -> None:
    assert Machine.here({}).num_cores >= 1
    assert Machine.here({"CUDA_VISIBLE_DEVICES": ""}).gpus == ()
