"""What all tests share: hypothesis without deadlines, since CI's cores are shared, and who may run beside whom.

vLLM compiles each model for half a minute, so compilation is off here unless a test removes the switch.
"""

import os
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from zlib import crc32

import pytest
from hypothesis import settings

from tests.machine import SERVERS, Lock, account

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
settings.register_profile("lmi", deadline=None)
settings.load_profile("lmi")

TESTS = Path(__file__).parent
# Several ranks of vLLM keep every core busy, so nothing that bounds time runs beside them.
RANKS = tuple(f"tests/system/test_vllm_{name}.py" for name in ("ranks", "ray", "scale"))
# These start no server and bound no time, so they hold no lock.
FREE = (
    "formatters",
    "handlers/lmi_dist",
    *(f"handlers/vllm/test_{name}.py" for name in ("outputs", "sampling")),
    "schemas",
    "settings",
    "text",
    "test_layout.py",
)
# A guide's process has a time to start in; torch with several threads takes ten times as long beside the ranks.
NOT_FREE = tuple(f"handlers/lmi_dist/test_{name}.py" for name in ("guides", "kernels_choice", "sampler"))
LOCK = Lock(Path(tempfile.gettempdir()) / f"lmi-tests-{crc32(bytes(TESTS))}.lock")  # of this checkout


def is_exclusive(item: pytest.Item | None) -> bool:
    return item is not None and item.nodeid.startswith(RANKS)


def is_free(item: pytest.Item) -> bool:
    return _is_below(item.path, FREE) and not _is_below(item.path, NOT_FREE)


def _is_below(path: Path, places: tuple[str, ...]) -> bool:
    return any(path.is_relative_to(TESTS / each) for each in places)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the tests that need the whole machine, and with those that may run beside them."""
    items.sort(key=lambda item: 0 if is_exclusive(item) else 1 if is_free(item) else 2)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Hand out the tests file by file, but those that need the whole machine to one worker: none waits for another.

    Those of the contract go to one worker too, which starts each executor once.
    """
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith(RANKS):
                return "ranks"
            return "contract" if nodeid.startswith("tests/conformance/") else super()._split_scope(nodeid)

    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(wrapper=True, tryfirst=True)  # outside of the timeout of a test, and before its fixtures
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Hold the machine while a test runs, and, if it needs the whole, until the last such test is over."""
    if not is_free(item) and not LOCK.is_held:
        LOCK.acquire(is_exclusive(item))
    try:
        return (yield)
    finally:
        if not (is_exclusive(item) and is_exclusive(nextitem)):
            LOCK.release()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[pytest.TestReport]:
    """Show in the report of a test that fails what its servers said."""
    report: pytest.TestReport = yield
    if report.failed and SERVERS:
        report.sections.append(("servers that run", account()))
    return report


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("vllm") and find_spec("vllm") is None:
        pytest.skip("vllm is not installed: scripts/install vllm")
