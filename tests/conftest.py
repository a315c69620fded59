"""What all tests share: hypothesis without deadlines, since CI's cores are shared, and skipped tests without vLLM.

vLLM compiles each model for half a minute, so compilation is off here unless a test removes the switch.
"""

import os
from importlib.util import find_spec

import pytest
from hypothesis import settings

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
settings.register_profile("lmi", deadline=None)
settings.load_profile("lmi")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("vllm") and find_spec("vllm") is None:
        pytest.skip("vllm is not installed: scripts/install vllm")
