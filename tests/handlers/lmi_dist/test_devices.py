"""The device of a model is decided without torch where there is no GPU, and what is not there is
named.
"""

from __future__ import annotations

import pytest
import torch

from handlers.lmi_dist.backend import choose_device
from lmi.errors import BadConfiguration
from lmi.settings.config import EngineConfig


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_named() -> None:
    assert choose_device(EngineConfig()) == "cpu"
    with pytest.raises(BadConfiguration, match=r"option\.device=cuda"):
        choose_device(EngineConfig(device="cuda"))


def test_weights_are_quantised_only_on_a_cpu_and_only_to_4_and_8_bits() -> None:
    for method in ("int4", "int8"):
        assert choose_device(EngineConfig(device="cpu", quantize=method)) == "cpu"

    says = r"option\.quantize=int2 on cpu: only int4 and int8 on cpu"
    with pytest.raises(BadConfiguration, match=says):
        choose_device(EngineConfig(device="cpu", quantize="int2"))
