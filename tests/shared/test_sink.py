"""Lines for readers that are slow, gone or asleep: a line is written whole or dropped, and its
writer goes on.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import pty
import select
import socket
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from lmi.shared import log
from lmi.shared.sink import MAX_WAIT_S, PAGE_BYTES, Allowance, Sink, pipe_unread_bytes, stream
from tests import machine
from tests.machine import measurements

ROOT = Path(__file__).parents[2]
LONG = b"x" * (log.MAX_LINE - 1) + b"\n"


def test_a_process_that_opens_the_log_file_again_overwrites_nothing(tmp_path: Path) -> None:
    program = """
import os
from lmi.shared import sink
sink.never_wait()
for number in range(3):
    os.write(2, b"ours %d\\n" % number)
    other = os.open("/proc/self/fd/2", os.O_WRONLY | os.O_APPEND)
    os.write(other, b"theirs %d\\n" % number)
    os.close(other)
"""
    with open(tmp_path / "log", "wb") as file:
        subprocess.run([sys.executable, "-c", program], stderr=file, cwd=ROOT, check=True)

    lines = [f"{whose} {number}" for number in range(3) for whose in ("ours", "theirs")]
    assert (tmp_path / "log").read_text().splitlines() == lines


@pytest.fixture(params=["not blocking", "blocking"])
def pipe(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    """A pipe without a reader. It is blocking where it belongs to another user and cannot be opened
    again.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, request.param == "blocking")
    yield reader, writer
    os.close(reader)
    os.close(writer)


def write_until_full(sink: Sink, line: bytes) -> int:
    """The number of lines that were written before one was dropped."""
    for number in range(10_000):
        if not sink.write(line):
            return number

    raise AssertionError("the pipe was never full")


def drain(reader: int) -> bytes:
    data = b""
    while select.select([reader], [], [], 0)[0]:
        data += os.read(reader, 65536)

    return data


@pytest.mark.parametrize("size", [100, 3000, 4096, 4097, 9000, log.MAX_LINE])
def test_a_pipe_that_nobody_reads_holds_whole_lines_and_its_writer_goes_on(
    pipe: tuple[int, int], size: int
) -> None:
    reader, writer = pipe
    line = b"x" * (size - 1) + b"\n"
    sink = Sink(writer)
    num_written = write_until_full(sink, line)
    for measurement in measurements():
        # It does not wait for each line
        with measurement.within(4 * MAX_WAIT_S):
            assert not any(sink.write(line) for _ in range(1000))

    assert drain(reader) == num_written * line and num_written > 0
    assert sink.write(line), "the reader is back"
    assert drain(reader) == line


def test_lines_of_every_length_stay_whole_beside_those_of_others(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    sinks = [Sink(writer), Sink(writer)]
    lines_written: list[bytes] = []
    for number in range(3000):
        line = b"%d " % number * (number * 37 % 3200) + b"\n"
        line = line[-log.MAX_LINE :]
        if sinks[number % 2].write(line):
            lines_written.append(line)

        if number % 300 == 299:
            assert drain(reader) == b"".join(lines_written)
            lines_written.clear()


def test_a_small_pipe_takes_a_long_line_when_its_reader_reads() -> None:
    """A host that is short of memory for pipes gives each pipe a page or two."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PAGE_BYTES)
    os.set_blocking(writer, False)
    sink = Sink(writer, max_wait_s=30.0)
    heard: list[bytes] = []
    thread = threading.Thread(target=lambda: heard.extend(iter(lambda: os.read(reader, 1000), b"")))
    thread.start()
    assert sink.write(LONG) and sink.write(LONG)

    os.close(writer)
    thread.join()
    os.close(reader)

    assert b"".join(heard) == 2 * LONG


def test_the_rest_of_a_line_goes_before_the_next_one() -> None:
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PAGE_BYTES)
    os.set_blocking(writer, False)
    sink = Sink(writer, max_wait_s=0.0)
    assert sink.write(LONG) and not sink.write(b"dropped\n")

    heard = b""
    for _ in range(10):
        heard += drain(reader)
        sink.write(b"next\n")

    assert heard.startswith(LONG) and set(heard[len(LONG) :].split(b"\n")) == {b"next", b""}

    os.close(reader)
    os.close(writer)


def test_a_socket_that_nobody_reads_holds_whole_lines_and_its_writer_goes_on() -> None:
    near_end, theirs = socket.socketpair()
    with near_end, theirs:
        num_written = write_until_full(Sink(near_end.fileno()), LONG)
        theirs.setblocking(False)
        heard = b""
        while len(heard) < num_written * len(LONG):
            heard += theirs.recv(1 << 20)

        with pytest.raises(BlockingIOError):
            theirs.recv(1)

        assert heard == num_written * LONG


@pytest.mark.parametrize("blocks", [True, False])
def test_a_terminal_that_is_held_stops_nobody(blocks: bool) -> None:
    """Ctrl-S holds a terminal."""
    keyboard, terminal = pty.openpty()
    os.set_blocking(terminal, blocks)
    termios.tcflow(terminal, termios.TCOOFF)
    sink = Sink(terminal)
    started_s = machine.own_s()
    write_until_full(sink, b"x" * 200 + b"\n")
    assert machine.own_s() - started_s < 5.0

    termios.tcflow(terminal, termios.TCOON)
    termios.tcflush(terminal, termios.TCIOFLUSH)
    os.close(terminal)
    os.close(keyboard)


def test_a_reader_that_is_gone_and_a_full_disk_lose_the_line_and_nothing_else() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    assert not Sink(writer).write(b"line\n")
    os.close(writer)
    with open("/dev/full", "wb") as full:
        assert not Sink(full.fileno()).write(b"line\n")


def test_an_allowance_grows_with_time_up_to_its_burst() -> None:
    allowance = Allowance(burst=10, per_s=2.0)
    now = time.monotonic()
    allowance.spend(8)
    assert allowance.left(now) == pytest.approx(2, abs=0.01)
    allowance.spend(2)
    assert allowance.left(now + 1.5) == pytest.approx(3, abs=0.01)
    assert allowance.left(now + 1000) == 10


def test_a_stream_of_python_drops_what_finds_no_room() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    out = stream(writer)
    for _ in range(2000):
        print("x" * 99, file=out)

    assert set(drain(reader).split(b"\n")) == {b"x" * 99, b""}
    os.close(reader)
    os.close(writer)


def test_our_own_output_does_not_block_and_that_of_our_parent_stays_as_it_was() -> None:
    reader, writer = os.pipe()
    code = """
import os, sys
from lmi.shared import sink
sink.never_wait()
print("x" * 100_000, file=sys.stderr)
print("still here", file=sys.stderr)
os._exit(not os.get_blocking(2) and os.get_blocking(1))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=writer, timeout=60, cwd=ROOT
    )

    assert done.returncode == 1
    assert os.get_blocking(writer) and pipe_unread_bytes(reader) > 0

    os.close(reader)
    os.close(writer)


def test_a_descriptor_that_is_closed_becomes_the_null_device_and_is_inherited() -> None:
    code = """
import os, subprocess, sys
from lmi.shared import sink
sink.open_missing()
print([os.readlink(f"/proc/self/fd/{fd}") for fd in (0, 1)], file=sys.stderr)
subprocess.run(["sh", "-c", "echo to stdout && cat && echo inherited >&2"], check=True)
"""
    command = f"exec {sys.executable} -c '{code.replace(chr(39), chr(34))}' <&- >&-"
    done = subprocess.run(
        ["bash", "-c", command], stderr=subprocess.PIPE, text=True, timeout=60, cwd=ROOT
    )

    assert done.stderr.splitlines() == ["['/dev/null', '/dev/null']", "inherited"]


def test_dropped_lines_are_counted_and_the_log_says_how_many() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    counted = SimpleNamespace(num_log_lines_dropped=0)
    log.count_dropped_in(counted)
    # Without those of other tests
    counted.num_log_lines_dropped = 0
    handler = log.LineHandler(log.LineFormatter("x", log.as_json), writer)
    for number in range(2000):
        handler.emit(logging.makeLogRecord({"msg": "%d", "args": (number,)}))

    before = [json.loads(line) for line in drain(reader).splitlines()]
    handler.emit(logging.makeLogRecord({"msg": "back"}))
    note, back = (json.loads(line) for line in drain(reader).splitlines())

    assert [event["message"] for event in before] == [str(number) for number in range(len(before))]
    assert counted.num_log_lines_dropped == 2000 - len(before) > 0
    assert note["level"] == "WARNING" and note["message"].startswith(
        f"{counted.num_log_lines_dropped} lines "
    )
    assert back["message"] == "back"

    os.close(reader)
    os.close(writer)


def test_what_was_dropped_before_a_process_had_a_record_is_counted_in_it() -> None:
    program = """
import logging
from lmi.shared import log
class Record:
    num_log_lines_dropped = 0
log.setup("x")
logging.error("lost")
log.count_dropped_in(Record)
logging.error("lost")
print(Record.num_log_lines_dropped)
"""
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=full, cwd=ROOT, timeout=60)

    assert done.stdout == b"2\n"
