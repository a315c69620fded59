"""What all tests share: hypothesis without deadlines, since CI's cores are shared, and the order of
the files.

vLLM compiles each model for half a minute, so compilation is off here unless a test removes the
switch. While tests are collected garbage is looked for less often: eleven thousand of them, and
what they import, is none.
"""

import gc
import os
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
from hypothesis import settings

from tests.machine import SERVERS, account
from tests.parts import FIRST, part_of

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
# Else its import gives each log line of this process a field
os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")
USUAL = gc.get_threshold()
gc.set_threshold(50_000)
settings.register_profile("lmi", deadline=None)
settings.load_profile("lmi")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("workers", 0) and find_spec("torch") is not None:
        import torch

        # What is computed while tests are collected starts no thread: none survives the fork
        torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {part: place for place, part in enumerate(FIRST)}
    items.sort(key=lambda item: places.get(part_of(item.nodeid), len(FIRST)))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(*USUAL)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Iterator[pytest.TestReport]:
    """Show in the report of a test that fails what its servers said."""
    report: pytest.TestReport = yield
    if report.failed and SERVERS:
        report.sections.append(("servers that run", account()))

    return report


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("vllm") and find_spec("vllm") is None:
        pytest.skip("vllm is not installed: scripts/install vllm")
