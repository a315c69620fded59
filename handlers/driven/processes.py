"""The processes of a foreign engine: whether they live, and their end."""

import contextlib
import os
import signal
from collections.abc import Iterable

from lmi.shared import signals


class Processes:
    """The engine's processes, whose ends its library reports late, or never."""

    def __init__(self, pids: Iterable[int]) -> None:
        """Watch the processes with these ids, but for those that have ended."""
        self._fds: list[int] = []
        for pid in pids:
            with contextlib.suppress(OSError):
                self._fds.append(os.pidfd_open(pid))

    @property
    def are_alive(self) -> bool:
        """Whether none of them has ended."""
        return not signals.is_any_readable(self._fds)

    def kill(self) -> None:
        """End those that still run, at once."""
        for fd in self._fds:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)

    def close(self) -> None:
        """Stop watching them."""
        for fd in self._fds:
            os.close(fd)

        self._fds.clear()
