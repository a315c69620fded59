"""Tests that run in several processes, which are forked when the tests have been collected."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.test_rerun import run

# Each test writes down in which process it is, and how often what its session shares was made.
NOTED = """
import json
import os
import pytest
import time
from pathlib import Path

@pytest.fixture(scope="session")
def shared():
    return [os.getpid()]

@pytest.mark.parametrize("number", range(3))
def test_notes(number, shared, tmp_path, capfd):
    print("said", os.getpid(), number)
    assert capfd.readouterr().out == f"said {os.getpid()} {number}\\n"
    note = {"pid": os.getpid(), "shared": shared, "folder": str(tmp_path.parent)}
    Path(__file__).with_name(f"note-{Path(__file__).stem}-{number}").write_text(json.dumps(note))
    time.sleep(0.1)
"""
CRASHES_AT_1 = """
import os
import pytest

@pytest.mark.parametrize("number", range(3))
def test_crashes_at_1(number):
    if number == 1:
        os.kill(os.getpid(), 9)
"""


def test_each_file_runs_in_one_process_and_all_run_once(tmp_path: Path) -> None:
    files = {f"file_{number}": NOTED for number in range(4)}
    status, lines = run(tmp_path, "--workers", "2", **files)
    assert status == 0 and "12 passed" in lines[-1], lines

    notes = {path.name: json.loads(path.read_text()) for path in tmp_path.glob("note-*")}
    assert len(notes) == 12
    for number in range(4):
        pids = {note["pid"] for name, note in notes.items() if f"file_{number}-" in name}
        assert len(pids) == 1

    # What a session shares is made once in a process, and lives for all of its files
    assert all(note["shared"] == [note["pid"]] for note in notes.values())
    assert len({note["pid"] for note in notes.values()}) == 2
    assert len({note["folder"] for note in notes.values()}) == 2


def test_a_test_whose_process_is_killed_has_failed_and_the_others_run(tmp_path: Path) -> None:
    status, lines = run(tmp_path, "--workers", "2", crashes=CRASHES_AT_1, noted=NOTED)
    assert status == 1 and any("1 failed, 5 passed" in line for line in lines), lines
    [reason] = [line for line in lines if line.startswith("test_crashes.py::")]
    assert "test_crashes_at_1[1] - worker" in reason and "ended with -9" in reason


@pytest.mark.parametrize("argument", ["--exitfirst", "--maxfail=2"])
def test_a_run_that_shall_stop_begins_no_further_part(tmp_path: Path, argument: str) -> None:
    fails = "def test_fails_0(): assert False\ndef test_fails_1(): assert False\n"
    files = {f"fails_{number}": fails for number in range(8)}
    status, lines = run(tmp_path, "--workers", "2", argument, **files)
    assert status == 1

    num_failed = Counter(line.split()[0] for line in lines if line.startswith("FAILED"))
    assert 1 <= num_failed["FAILED"] < 8, lines
