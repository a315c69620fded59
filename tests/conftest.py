"""What all tests share: hypothesis without a clock, since CI's cores are shared, and what needs vLLM.

vLLM compiles each model for half a minute, so here it does only where a test takes the switch away again.
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
