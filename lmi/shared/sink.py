"""Standard output and error that do not block a writer whose reader is slow. A line is written
whole or not at all.

O_NONBLOCK on descriptors that others share would change theirs. So the supervisor opens the files
behind them a second time, not blocking, and its children inherit these. Sources: pipe(7), open(2),
send(2), and Linux's fs/pipe.c for the room in a pipe.
"""

import fcntl
import io
import os
import select
import socket
import stat
import struct
import sys
import termios
import time
from contextlib import suppress
from typing import Any, TextIO

STDOUT = 1
STDERR = 2
PAUSE_S = 0.001
# The longest that a writer waits at a time for a late reader.
MAX_WAIT_S = 0.25
# The share of its time that it may wait in the long run.
WAIT_SHARE = 0.05
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# The pages of a pipe for other processes that write at the same moment.
SPARE_PAGES = 2
# The buffer of a stream, so that a line is one write.
BUFFER_BYTES = 64 << 10
# A terminal surely takes so many when poll says that it can be written to.
TERMINAL_BYTES = 256


def open_missing() -> None:
    """Open /dev/null in place of standard input, output and error where they are closed.

    Otherwise the next file or socket that is opened would get their numbers, and every print would
    go there.
    """
    for fd in (0, STDOUT, STDERR):
        try:
            os.fstat(fd)
        except OSError:
            # It returns the lowest free number: `fd`.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def never_wait() -> None:
    """Make standard output and error of this process, and of its children, descriptors that do not
    block.

    A regular file never blocks, but each write must go to its end, because a process that opens the
    file again has a different offset. A socket or the file of another user cannot be opened a
    second time. Those stay as they are, and only a Sink writes to them without waiting.
    """
    for fd in (STDOUT, STDERR):
        with suppress(OSError):
            if stat.S_ISREG(os.fstat(fd).st_mode):
                flags = fcntl.fcntl(fd, fcntl.F_GETFL)
                fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_APPEND)

            if stat.S_ISFIFO(os.fstat(fd).st_mode) or os.isatty(fd):
                access = os.O_RDWR if os.isatty(fd) else os.O_WRONLY
                reopened = os.open(f"/proc/self/fd/{fd}", access | os.O_NONBLOCK | os.O_NOCTTY)
                os.dup2(reopened, fd)
                os.close(reopened)

    guard_streams()


def guard_streams() -> None:
    """Let Python code print without exceptions. Text that cannot be written is dropped."""
    sys.stdout = stream(STDOUT)
    sys.stderr = stream(STDERR)


def stream(fd: int) -> TextIO:
    """Return a text stream to a descriptor, whose writes raise nothing."""
    raw = io.BufferedWriter(_File(fd), BUFFER_BYTES)
    return io.TextIOWrapper(
        raw, "utf-8", "backslashreplace", line_buffering=True, write_through=True
    )


class Sink:
    """Writes lines to a file descriptor. Only one thread at a time may use it."""

    def __init__(self, fd: int, max_wait_s: float = MAX_WAIT_S) -> None:
        mode = os.fstat(fd).st_mode
        self.fd = fd
        self._blocks = not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_NONBLOCK
        self._is_pipe = stat.S_ISFIFO(mode)
        self._is_terminal = os.isatty(fd)
        self._is_socket = stat.S_ISSOCK(mode)
        # In seconds.
        self._patience = Allowance(max_wait_s, WAIT_SHARE)
        # The last line was lost, so `write` does not wait until a line is written.
        self._is_stuck = False
        # The end of a line that was begun.
        self._unwritten = b""

    def write(self, line: bytes) -> bool:
        """Write a line. Returns False if none of it was written, because the reader is late or the
        disk is full.
        """
        self._unwritten = self._push(self._unwritten)
        unwritten = line if self._unwritten else self._push(line)
        is_written = len(unwritten) < len(line)
        if is_written:
            # The next call writes it first.
            self._unwritten = unwritten

        self._is_stuck = not is_written
        return is_written

    def _push(self, data: bytes) -> bytes:
        """Write as much as the reader takes in time. Returns the rest."""
        # An OSError: a full disk, or a reader that is gone.
        with suppress(OSError):
            while data:
                now = time.monotonic()
                num_bytes = self._offer(data)
                if num_bytes:
                    data = data[num_bytes:]
                    continue

                if self._is_stuck or self._patience.left(now) < PAUSE_S:
                    break

                time.sleep(PAUSE_S)
                self._patience.spend(time.monotonic() - now)

        return data

    def _offer(self, data: bytes) -> int:
        """Write without waiting. Returns the number of bytes that were written."""
        try:
            if self._is_socket:
                return send(self.fd, data)

            if self._is_pipe:
                return os.write(self.fd, data) if self._has_room(len(data)) else 0

            if self._is_terminal and self._blocks:
                return os.write(self.fd, data[:TERMINAL_BYTES]) if can_be_written(self.fd) else 0

            return os.write(self.fd, data)
        except BlockingIOError:
            return 0

    def _has_room(self, num_bytes: int) -> bool:
        """Return whether the pipe takes so many bytes in one write."""
        # The kernel takes them whole or not at all.
        if num_bytes <= select.PIPE_BUF and not self._blocks:
            return True

        num_pages = fcntl.fcntl(self.fd, fcntl.F_GETPIPE_SZ) // PAGE_BYTES
        num_unread = pipe_unread_bytes(self.fd)
        if not num_unread:
            return num_bytes <= num_pages * PAGE_BYTES or not self._blocks

        # A write that does not fit in the last page begins another: any two neighbouring pages
        # together hold more than one page of bytes, except the first and the last.
        num_used = 2 * num_unread // PAGE_BYTES + 2
        num_needed = num_bytes // PAGE_BYTES + 1 + SPARE_PAGES
        return num_needed <= num_pages - num_used


class Allowance:
    """What may be spent: `burst` at once, and `per_s` in the long run."""

    def __init__(self, burst: float, per_s: float) -> None:
        self._burst = burst
        self._per_s = per_s
        self._left = burst
        self._looked_s = time.monotonic()

    def left(self, now: float) -> float:
        """Return what may be spent at this time of `time.monotonic`."""
        self._left = min(self._burst, self._left + self._per_s * (now - self._looked_s))
        self._looked_s = now
        return self._left

    def spend(self, amount: float) -> None:
        """Note that so much was spent."""
        self._left = max(0.0, self._left - amount)


def send(fd: int, data: bytes) -> int:
    """Send to a socket. Raises BlockingIOError if it has no room, also if the socket is a blocking
    one.
    """
    end = socket.socket(fileno=fd)
    try:
        return end.send(data, socket.MSG_DONTWAIT)
    finally:
        end.detach()


def can_be_written(fd: int) -> bool:
    """Whether a descriptor takes data now."""
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(0))


def pipe_unread_bytes(fd: int) -> int:
    """Return how many bytes of a pipe nobody has read yet."""
    [num_bytes] = struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, bytes(4)))
    return int(num_bytes)


class _File(io.FileIO):
    """The file under Python's standard output or error. It drops data for which the reader has no
    room.
    """

    def __init__(self, fd: int) -> None:
        super().__init__(fd, "w", closefd=False)
        self._sink = Sink(fd)

    def write(self, data: Any, /) -> int:
        whole = bytes(data)
        self._sink.write(whole)
        return len(whole)
