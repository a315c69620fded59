"""What a child and its libraries print, read by the supervisor and written as lines of our log.

Compilers, C++ libraries and user code write to standard output and error in forms of their own. For such a child these
two are a pipe; its log goes past it, to the descriptor that `processes.log_fd` names. The supervisor is the one process
that still reads the pipe when the child has died, so last words are not lost. No child waits for it: the pipe does not
block its writer. Nor can a child keep the supervisor busy: each turn reads once, lines have a limit of length, and a
second has a limit of lines. The lines above it are counted.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import time
from collections.abc import Iterable
from contextlib import suppress

from lmi.shared.log import add_dropped

PIPE_BYTES = 1 << 20  # also the most that is read in one turn
MAX_LINE_BYTES = 4096
BURST_LINES, LINES_PER_S = 500, 50.0
CALM_S = 0.1
LAST_LINES = 100  # of a dead process: these are logged however much came before them
GLOG = re.compile(r"\[?([IWEF])\d{4,8} ")  # glog, and torch in brackets
TIMED = re.compile(r"\[\d\d:\d\d:\d\d\] (?:\S+:\d+: )?(debug|warning|error|fatal)\b", re.IGNORECASE)  # TVM, xgrammar
LEVELS = {"D": logging.DEBUG, "W": logging.WARNING, "E": logging.ERROR, "F": logging.CRITICAL}


class ChildOutput:
    """The pipe behind the standard output and error of one process."""

    def __init__(self, logger: str, role: str) -> None:
        self.reader, self.writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        with suppress(OSError):  # more than this user may have
            fcntl.fcntl(self.reader, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self.is_open = True
        self._log = logging.getLogger(logger)
        self._role = role
        self._pid = 0
        self._read_s = 0.0  # when something was read
        self._rest = b""  # of a line whose end has not come
        self._allowance = Allowance(BURST_LINES, LINES_PER_S)
        self._num_dropped = 0  # since the last line that was logged

    def belongs_to(self, pid: int) -> None:
        """The process has started, and holds the other end."""
        self._pid = pid
        os.close(self.writer)

    def may_wake(self, now: float) -> bool:
        """Whether to wake for what comes. Not soon after the last time: what a process prints without end waits for the
        next turn."""
        return now - self._read_s >= CALM_S

    def read(self) -> None:
        """Log what has come."""
        *lines, rest = self._receive_lines()
        self._rest = rest[: MAX_LINE_BYTES + 1]
        num_logged = self._allowance.take(len(lines), time.monotonic())
        self._say(lines[:num_logged])
        self._drop(len(lines) - num_logged)

    def read_last(self) -> None:
        """Log what a process left when it ended, the latest lines if there are too many."""
        lines = self._receive_lines()
        self._rest = b""
        self._drop(len(lines[:-LAST_LINES]))
        self._say(lines[-LAST_LINES:])

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            os.close(self.reader)

    def _receive_lines(self) -> list[bytes]:
        """The lines that have come and, last, the beginning of the next one. Empty lines are left out."""
        *lines, rest = (self._rest + self._receive()).replace(b"\r", b"\n").split(b"\n")
        return [*filter(None, lines), rest]

    def _receive(self) -> bytes:
        if not self.is_open:
            return b""
        try:
            data = os.read(self.reader, PIPE_BYTES)
        except BlockingIOError:
            return b""
        if not data:
            self.close()
        self._read_s = time.monotonic()
        return data

    def _say(self, lines: Iterable[bytes]) -> None:
        for line in filter(None, lines):
            if self._num_dropped:
                self._log.warning("%d lines were dropped here: too many at once", self._num_dropped, extra=self._source)
                self._num_dropped = 0
            cut = "…" if len(line) > MAX_LINE_BYTES else ""
            text = line[:MAX_LINE_BYTES].decode("utf-8", "backslashreplace").rstrip() + cut
            self._log.log(level_of(text), "%s", text, extra=self._source)

    def _drop(self, num_lines: int) -> None:
        self._num_dropped += num_lines
        add_dropped(num_lines)

    @property
    def _source(self) -> dict[str, object]:
        return {"role": self._role, "pid": self._pid}


class Allowance:
    """How many of something may be had: `burst` at once, and `per_s` in the long run."""

    def __init__(self, burst: int, per_s: float) -> None:
        self._burst, self._per_s = burst, per_s
        self._left = float(burst)
        self._taken_s = time.monotonic()

    def take(self, num_wanted: int, now: float) -> int:
        self._left = min(self._burst, self._left + self._per_s * (now - self._taken_s))
        self._taken_s = now
        num_taken = min(num_wanted, int(self._left))
        self._left -= num_taken
        return num_taken


def level_of(line: str) -> int:
    """The level that a line names in the forms of C++ libraries, INFO for any other."""
    found = GLOG.match(line) or TIMED.match(line)
    return LEVELS.get(found[1][0].upper(), logging.INFO) if found else logging.INFO
