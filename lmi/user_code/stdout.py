"""What user code prints, as lines of our log."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable

from lmi.shared.log import LineHandler
from lmi.shared.sink import STDERR, STDOUT, Sink

FINISH_S = 0.5  # for the last lines: a child of the code may hold the pipe open

log = logging.getLogger("model.py")


def log_what_is_printed() -> Callable[[], None]:
    """Log every line that Python or C code writes to stdout or stderr of this process.

    Call the returned function at the end of the process: it waits for the last lines.
    """
    real_stderr = os.dup(STDERR)
    reader = _redirect_to_pipe()
    for handler in logging.getLogger().handlers:
        if isinstance(handler, LineHandler):
            handler.sink = Sink(real_stderr)
    faulthandler.register(signal.SIGUSR2, file=real_stderr, all_threads=True)
    copier = threading.Thread(target=_log_lines, args=(reader,), name="printed", daemon=True)
    copier.start()

    def finish() -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for fd in (STDOUT, STDERR):
            os.dup2(real_stderr, fd)
        copier.join(FINISH_S)

    return finish


def _redirect_to_pipe() -> int:
    """Make stdout and stderr the writing end of a pipe. Returns the reading end."""
    reader, writer = os.pipe()
    for fd in (STDOUT, STDERR):
        os.dup2(writer, fd)
    os.close(writer)
    sys.stdout, sys.stderr = (open(fd, "w", 1, "utf-8", "backslashreplace", closefd=False) for fd in (STDOUT, STDERR))
    return reader


def _log_lines(reader: int) -> None:
    with open(reader, encoding="utf-8", errors="backslashreplace") as lines:
        for line in lines:
            log.info("%s", line.rstrip("\n"))
