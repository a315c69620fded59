"""The processes in which TensorRT-LLM computes, as far as this one has started them.

TensorRT-LLM reports the end of one only with the next request, or never. So each is watched. It is known by its command
line: MPI's pool and Python's own start them. When this process ends, so do they: Open MPI's daemon, or their pipe, sees
to it.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from lmi.shared import linux

STARTERS = (b"mpi4py", b"multiprocessing.spawn", b"--multiprocessing-fork")


class Workers:
    """The processes that compute when this object is made."""

    def __init__(self) -> None:
        pids = filter(_computes, linux.descendants(os.getpid()))
        self._fds = [fd for pid in pids if (fd := _opened(pid)) is not None]

    @property
    def num(self) -> int:
        return len(self._fds)

    @property
    def are_alive(self) -> bool:
        return not linux.is_any_readable(self._fds)

    def kill(self) -> None:
        for fd in self._fds:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()


def _computes(pid: int) -> bool:
    with contextlib.suppress(OSError):
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
        return any(word in line for word in STARTERS)
    return False


def _opened(pid: int) -> int | None:
    with contextlib.suppress(OSError):
        return os.pidfd_open(pid)
    return None
