"""The double of TensorRT-LLM, of each of its lines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.handlers.trtllm.double import loaded
from tests.handlers.trtllm.facts import PROFILES


@pytest.fixture(scope="module", params=PROFILES)
def line(request: pytest.FixtureRequest) -> Iterator[str]:
    """A line whose double is the package `tensorrt_llm` now."""
    with loaded(request.param):
        yield request.param
