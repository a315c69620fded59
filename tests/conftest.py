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

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
# Else its import gives each log line of this process a field
os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")
USUAL = gc.get_threshold()
gc.set_threshold(50_000)
settings.register_profile("lmi", deadline=None)
settings.load_profile("lmi")

# What runs in one process, one after the other, because it shares servers or engines; all else goes
# file by file.
SHARING = {
    "vllm": ("tests/system/test_vllm_life.py", "tests/system/test_vllm_scale.py"),
    "doors of vllm": ("tests/system/test_vllm_openai.py", "tests/system/test_vllm_parameters.py"),
    "contract": ("tests/conformance/",),
    "tiny": tuple(
        f"tests/system/test_{name}.py" for name in ("apis", "equality", "faults", "serving")
    ),
}
# The parts of a run that take longest, the longest first: whoever begins one late keeps the others
# waiting at the end.
FIRST = (
    "vllm",
    "tests/system/test_vllm_nodes.py",
    "contract",
    "tests/handlers/vllm/test_compiling.py",
    "tests/test_docs.py",
    "tests/system/test_processes.py",
    "tests/system/sagemaker/test_adapters.py",
    "tests/clients/test_gateway_clients.py",
    "tests/system/test_vllm_images.py",
    "tests/clients/test_agents.py",
    "tests/system/test_overload.py",
    "tests/system/test_vllm_ranks.py",
    "tests/clients/test_pages.py",
    "tests/system/sagemaker/test_models.py",
    "tests/clients/test_clients.py",
    "tiny",
    "tests/system/test_real_model.py",
    "doors of vllm",
    "tests/system/test_trtllm_life.py",
    "tests/scripts/test_serve.py",
    "tests/clients/test_schemathesis.py",
    "tests/gateway/test_gateway.py",
    "tests/system/sagemaker/test_adapter_sources.py",
    "tests/system/test_start.py",
    "tests/handlers/lmi_dist/test_guides.py",
    "tests/handlers/vllm/test_arguments.py",
    "tests/scripts/test_overload.py",
    "tests/test_rerun.py",
    "tests/scripts/test_peers.py",
    "tests/system/test_guides.py",
    "tests/system/test_user_code.py",
)


def part_of(nodeid: str) -> str:
    """What a test runs together with: a name in SHARING, or its file."""
    return next(
        (name for name, places in SHARING.items() if nodeid.startswith(places)),
        nodeid.split("::", 1)[0],
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {part: place for place, part in enumerate(FIRST)}
    items.sort(key=lambda item: places.get(part_of(item.nodeid), len(FIRST)))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(*USUAL)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return part_of(nodeid)

    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


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
