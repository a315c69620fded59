"""The engines of this folder: importing vLLM is the slow part, and every test file asks the same ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from handlers.lmi_vllm.masking import hide_foreign_builds
from lmi.executor import Executor
from tests.handlers.vllm.asking import start


@pytest.fixture(scope="session")
def shared() -> Iterator[Executor]:
    hide_foreign_builds()
    with start() as executor:
        yield executor


@pytest.fixture
def engine(shared: Executor) -> Executor:
    """vLLM with a cache that four long requests do not fit into together."""
    shared.await_responses(timeout_s=0)
    shared.get_latest_iteration_stats()
    return shared
