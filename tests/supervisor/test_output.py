"""The output of children, as lines of lmi's log."""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from lmi.shared import linux, log
from lmi.supervisor.output import (
    BURST_LINES,
    CALM_S,
    LAST_LINES,
    MAX_LINE_BYTES,
    ChildOutput,
    level_of,
)
from tests import machine

ROOT = Path(__file__).parents[2]


@pytest.fixture
def dropped() -> SimpleNamespace:
    """What counts the lines that were dropped."""
    record = SimpleNamespace(num_log_lines_dropped=0)
    log.count_dropped_in(record)
    # Without those of other tests
    record.num_log_lines_dropped = 0
    return record


@pytest.fixture
def output(dropped: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> ChildOutput:
    caplog.set_level(logging.INFO)
    return ChildOutput("libraries", "engine 3")


def test_each_line_is_logged_once_it_is_whole(
    output: ChildOutput, caplog: pytest.LogCaptureFixture
) -> None:
    for piece in (b"one\ntw", b"o\r10 %\r\n", "thr\xe9".encode("latin-1")):
        os.write(output.writer, piece)
        output.read()

    assert caplog.messages == ["one", "two", "10 %"]
    output.read_last()
    assert caplog.messages[3:] == ["thr\\xe9"]


def test_a_line_names_the_process_that_printed_it(
    output: ChildOutput, capfd: pytest.CaptureFixture[str]
) -> None:
    handler = log.LineHandler(log.LineFormatter("supervisor", log.as_text))
    logging.getLogger("libraries").addHandler(handler)
    os.write(output.writer, b"hello \x1b[2J\n")
    output.belongs_to(7)
    output.read()
    logging.getLogger("libraries").removeHandler(handler)

    assert (
        capfd.readouterr()
        .err.rstrip("\n")
        .endswith(" INFO engine 3[7] libraries: hello \\u001b[2J")
    )


def test_a_long_line_is_cut_however_it_comes(
    output: ChildOutput, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(10):
        os.write(output.writer, b"x" * 3000)
        output.read()

    os.write(output.writer, b"\nnext\n")
    output.read()
    assert caplog.messages == ["x" * MAX_LINE_BYTES + "…", "next"]


def test_lines_above_the_limit_are_counted_and_the_last_words_are_logged(
    output: ChildOutput, dropped: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    # 60 KB: some hosts make no larger pipes than 64 KB
    num_lines = 6 * BURST_LINES
    os.write(output.writer, b"y\n" * num_lines)
    output.read()

    assert len(caplog.messages) == BURST_LINES
    assert dropped.num_log_lines_dropped == num_lines - BURST_LINES

    os.write(output.writer, b"z\n" * num_lines + b"last words")
    caplog.clear()
    output.read_last()
    first, *lines = caplog.messages

    assert len(lines) == LAST_LINES and lines[-1] == "last words"
    assert f"{dropped.num_log_lines_dropped} lines were dropped here" in first


def test_a_child_that_ends_after_too_many_lines_has_its_loss_in_the_log(
    output: ChildOutput, caplog: pytest.LogCaptureFixture, dropped: SimpleNamespace
) -> None:
    os.write(output.writer, b"x\n" * (BURST_LINES + 9))
    output.read()
    output.read_last()
    assert (
        caplog.messages[-1] == "9 lines were dropped here: too many at once"
        and dropped.num_log_lines_dropped == 9
    )


def test_a_full_pipe_makes_nobody_wait_and_is_read_in_one_turn(
    output: ChildOutput, dropped: SimpleNamespace
) -> None:
    num_bytes = 0
    with pytest.raises(BlockingIOError):
        while True:
            num_bytes += os.write(output.writer, b"y\n" * 1000)

    started_s = machine.own_s()
    output.read()
    assert machine.own_s() - started_s < 5.0
    assert dropped.num_log_lines_dropped == num_bytes // 2 - BURST_LINES


def test_a_reader_wakes_for_the_first_line_and_not_for_each(output: ChildOutput) -> None:
    now = time.monotonic()
    assert output.may_wake(now)
    output.read()
    assert output.may_wake(now), "nothing had come"
    os.write(output.writer, b"no line end")
    before_s = time.monotonic()
    output.read()
    assert not output.may_wake(before_s + 0.9 * CALM_S) and output.may_wake(
        time.monotonic() + CALM_S
    )


def test_an_output_is_over_when_nobody_can_write_to_it(output: ChildOutput) -> None:
    output.belongs_to(7)
    output.read()
    assert not output.is_open
    output.read_last()
    output.close()


NAMES_ITS_LOG = """
import os
from lmi.shared import linux
fd = linux.log_fd()
print(fd > 2, os.get_inheritable(fd), linux.LOG_FD_NAME in os.environ)
"""


def test_programs_that_a_child_starts_do_not_have_its_log(
    output: ChildOutput, caplog: pytest.LogCaptureFixture
) -> None:
    environ = {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", NAMES_ITS_LOG]
    pid = linux.spawn(command, environ, output_fd=output.writer)
    output.belongs_to(pid)
    os.waitpid(pid, 0)
    output.read_last()
    assert caplog.messages == ["True False False"]


@pytest.mark.parametrize(
    ("line", "level"),
    [
        ("plain words", logging.INFO),
        ("W1122 07:31:36.000000 7 file.cc:83] words", logging.WARNING),
        ("E20261122 07:31:36.000000 7 file.cc:83] words", logging.ERROR),
        ("[W1122 07:31:36.000 file.cpp:83] Warning: words", logging.WARNING),
        ("[07:31:36] /project/cpp/grammar.cc:83: Warning: words", logging.WARNING),
        ("[07:31:36] /project/cpp/grammar.cc:83: words", logging.INFO),
        ("[12:00:00] WARNING words", logging.WARNING),
        ("[12:00:00] FATAL: words", logging.CRITICAL),
        ("Warm-up is over", logging.INFO),
        ("I1122 07:31:36.000000 7 file.cc:83] words", logging.INFO),
    ],
)
def test_a_line_has_the_level_that_its_library_gave_it(line: str, level: int) -> None:
    assert level_of(line) == level
