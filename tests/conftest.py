"""What all tests share: hypothesis without deadlines, since CI's cores are shared, and skipped tests without vLLM.

vLLM compiles each model for half a minute, so compilation is off here unless a test removes the switch.
"""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
settings.register_profile("lmi", deadline=None)
settings.load_profile("lmi")


@pytest.fixture
def machine() -> Iterator[None]:
    """Hold the machine. Of the tests that hold it, which measure time while a real engine is busy, one runs at once."""
    with (Path(tempfile.gettempdir()) / "lmi-tests-machine.lock").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        yield


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("vllm") and find_spec("vllm") is None:
        pytest.skip("vllm is not installed: scripts/install vllm")
