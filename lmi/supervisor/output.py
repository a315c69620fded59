"""Reads the output of a child and its libraries from a pipe and writes it as lines of the log.

The pipe does not block the child, and is still read when the child has died. A child cannot keep
the supervisor busy: each turn reads once, and the lines above a limit per second are dropped and
counted.
"""

import fcntl
import logging
import os
import re
import time
from collections.abc import Iterable
from contextlib import suppress

from lmi.shared.log import add_dropped
from lmi.shared.sink import Allowance

# Also the limit of one read.
PIPE_BYTES = 1 << 20
MAX_LINE_BYTES = 4096
BURST_LINES = 5000
LINES_PER_S = 1000.0
CALM_S = 0.1
# So many lines of a dead process are always logged.
LAST_LINES = 100
# The lines of glog, and of torch in brackets.
GLOG = re.compile(r"\[?([IWEF])\d{4,8} ")
# The lines of TVM and xgrammar.
TIMED = re.compile(r"\[\d\d:\d\d:\d\d\] (?:\S+:\d+: )?(debug|warning|error|fatal)\b", re.IGNORECASE)
LEVELS = {"D": logging.DEBUG, "W": logging.WARNING, "E": logging.ERROR, "F": logging.CRITICAL}


class ChildOutput:
    """The pipe behind the standard output and error of one process."""

    def __init__(self, logger: str, role: str) -> None:
        self.reader, self.writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # The size may be over this user's limit.
        with suppress(OSError):
            fcntl.fcntl(self.reader, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

        self.is_open = True
        self._log = logging.getLogger(logger)
        self._role = role
        self._pid = 0
        # When output was last read.
        self._read_s = 0.0
        # The beginning of a line whose end has not come.
        self._beginning = b""
        self._allowance = Allowance(BURST_LINES, LINES_PER_S)
        # The lines since the last one that was logged.
        self._num_dropped = 0

    def belongs_to(self, pid: int) -> None:
        """Note the process, which has started and holds the other end."""
        self._pid = pid
        self._close_writer()

    def may_wake(self, now: float) -> bool:
        """Return whether new output may wake the supervisor. Soon after a read it waits for the
        next turn.
        """
        return now - self._read_s >= CALM_S

    def read(self) -> None:
        *lines, beginning = self._receive_lines()
        self._beginning = beginning[: MAX_LINE_BYTES + 1]
        num_logged = min(len(lines), int(self._allowance.left(time.monotonic())))
        self._allowance.spend(num_logged)
        self._say(lines[:num_logged])
        self._drop(len(lines) - num_logged)

    def read_last(self) -> None:
        """Log the output that a process left when it ended, and only the last lines if there are
        too many.
        """
        lines = self._receive_lines()
        self._beginning = b""
        self._drop(len(lines[:-LAST_LINES]))
        self._say(lines[-LAST_LINES:])
        self._say_dropped()

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            os.close(self.reader)

        self._close_writer()

    def _close_writer(self) -> None:
        """Close the end of the process, which has it too if it was started."""
        if self.writer >= 0:
            os.close(self.writer)
            self.writer = -1

    def _receive_lines(self) -> list[bytes]:
        """Return the lines that have come, without empty ones, and then the beginning of the next
        line.
        """
        data = b""
        if self.is_open:
            with suppress(BlockingIOError):
                data = os.read(self.reader, PIPE_BYTES)
                self._read_s = time.monotonic()
                if not data:
                    self.close()

        text = (self._beginning + data).replace(b"\r", b"\n")
        *lines, beginning = text.split(b"\n")
        return [*filter(None, lines), beginning]

    def _say(self, lines: Iterable[bytes]) -> None:
        for line in filter(None, lines):
            self._say_dropped()
            text = line[:MAX_LINE_BYTES].decode("utf-8", "backslashreplace").rstrip()
            if len(line) > MAX_LINE_BYTES:
                text += "…"

            self._log.log(level_of(text), "%s", text, extra=self._source)

    def _say_dropped(self) -> None:
        if self._num_dropped:
            self._log.warning(
                "%d lines were dropped here: too many at once",
                self._num_dropped,
                extra=self._source,
            )
            self._num_dropped = 0

    def _drop(self, num_lines: int) -> None:
        self._num_dropped += num_lines
        add_dropped(num_lines)

    @property
    def _source(self) -> dict[str, object]:
        return {"role": self._role, "pid": self._pid}


def level_of(line: str) -> int:
    """Return the level that a line names in the form of a C++ library, or INFO for any
    other line.
    """
    match = GLOG.match(line) or TIMED.match(line)
    if match is None:
        return logging.INFO

    initial = match[1][0].upper()
    return LEVELS.get(initial, logging.INFO)
