"""A connection whose client reads nothing of what waits for it is cut."""

import asyncio
import fcntl
import math
import sys
import termios


class ReaderWatch:
    """Watches one client while bytes wait for it."""

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, stall_timeout_s: float
    ) -> None:
        self._transport = transport
        self._loop = loop
        self._stall_timeout_s = stall_timeout_s
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, num_before: float = math.inf) -> None:
        """Cut the connection if the client has read nothing since `num_before` bytes waited for it.
        Else look again later. Once the kernel has all bytes, nothing is watched.
        """
        if self._transport.get_write_buffer_size() == 0:
            return

        num_unread = self.num_unread()
        if num_unread < num_before:
            self._timer = self._loop.call_later(self._stall_timeout_s, self.begin, num_unread)
        else:
            self._transport.abort()

    def num_unread(self) -> int:
        """Return how many bytes wait for the client, here and in the kernel.

        Both are counted, because the kernel takes more bytes from here only once a third of its own
        are read. Source: tcp(7), SIOCOUTQ, which has the same number as TIOCOUTQ.
        """
        descriptor = self._transport.get_extra_info("socket").fileno()
        num_queued = fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4))
        num_in_kernel = int.from_bytes(num_queued, sys.byteorder)
        return self._transport.get_write_buffer_size() + num_in_kernel

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
