"""A test that fails is run once more by itself, and is named in the last lines either way."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import takewhile
from pathlib import Path

import pytest

from tests.rerun import MAX_LUCK
from tests.system.container import ROOT

PASSES = "def test_passes(): pass\n"
FAILS = "def test_fails(): assert False\n"
# It fails unless a test ran before in another process, and says which process it is in.
FLAKY = """
import os
from pathlib import Path

NOTE = Path(__file__).with_name("note")

def test_flaky():
    before = NOTE.read_text() if NOTE.exists() else ""
    NOTE.write_text(str(os.getpid()))
    assert before not in ("", str(os.getpid()))
"""
MANY = (
    "import pytest\n@pytest.mark.parametrize('number', range({}))\ndef test_fails(number): "
    "assert False\n"
)


def run(folder: Path, *arguments: str, **files: str) -> tuple[int, list[str]]:
    """Run files of tests as scripts/test does. Returns the exit status and the lines of
    the output.
    """
    (folder / "pytest.ini").write_text("[pytest]\n")
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)

    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    # The other plugins take longer to import than these tests to run.
    environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.workers",
        "-p",
        "tests.rerun",
        *arguments,
    ]
    done = subprocess.run(
        command,
        cwd=folder,
        env=environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout.splitlines()


def listed(lines: list[str], heading: str) -> list[str]:
    """The tests below the last heading of this name; behind each stands why it failed."""
    [*_, at] = [number for number, line in enumerate(lines) if line.strip("= ").startswith(heading)]
    reasons = dict(
        line.split(" - ") for line in takewhile(lambda line: line[0] != "=", lines[at + 1 :])
    )
    assert all("assert" in reason for reason in reasons.values()), reasons
    return list(reasons)


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_test_that_passes_the_second_time_is_flaky_and_the_run_is_good(
    tmp_path: Path, workers: str
) -> None:
    status, lines = run(tmp_path, "--workers", workers, passes=PASSES, flaky=FLAKY)
    assert status == 0, lines
    assert listed(lines, "flaky: ") == ["test_flaky.py::test_flaky"]
    assert any("1 passed, 1 flaky in" in line for line in lines), lines


def test_a_test_that_fails_twice_has_failed_beside_one_that_is_flaky(tmp_path: Path) -> None:
    status, lines = run(tmp_path, "--workers", "2", fails=FAILS, flaky=FLAKY)
    assert status == 1
    assert listed(lines, "flaky: ") == ["test_flaky.py::test_flaky"]
    assert listed(lines, "failed") == ["test_fails.py::test_fails"] and lines[-1].startswith(
        "test_fails.py::test_fails - assert False"
    )


def test_only_what_was_chosen_is_run_again(tmp_path: Path) -> None:
    status, lines = run(tmp_path, "-k", "flaky", fails=FAILS, flaky=FLAKY)
    assert status == 0 and not any("test_fails" in line for line in lines), lines


def test_many_failures_are_no_luck(tmp_path: Path) -> None:
    status, lines = run(tmp_path, many=MANY.format(MAX_LUCK), flaky=FLAKY)
    assert status == 1 and not any("once more" in line for line in lines)
    assert "test_flaky.py::test_flaky" in listed(lines, "failed")


@pytest.mark.parametrize(
    ("arguments", "culprit"),
    [
        (["--workers", "2"], "import os\ndef test_crashes(): os._exit(1)\n"),
        (["--workers", "2"], "import no_such_module\n"),
        (["--exitfirst"], "def test_is_not_reached(): pass\n"),
    ],
    ids=["a crash", "a file that cannot be collected", "a run that was stopped"],
)
def test_what_is_no_failed_test_fails_the_run(
    tmp_path: Path, arguments: list[str], culprit: str
) -> None:
    status, lines = run(tmp_path, *arguments, a_flaky=FLAKY, culprit=culprit)
    assert status in (1, 2) and not any("once more" in line for line in lines), lines
