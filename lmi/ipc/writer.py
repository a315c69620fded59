"""The writing end of an asyncio connection, which any thread may use.

`write` sends directly from the thread that calls it. Bytes that the kernel does not accept are queued on the event
loop, and later writes queue behind them. So a thread that computes sends its results without waking another thread,
which would take the interpreter from it in the middle of its next step.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from contextlib import suppress

log = logging.getLogger(__name__)


class ThreadSafeWriter:
    """Writes to one connection from any thread, and aborts it if more than `max_unsent_bytes` are unread.

    Make it in `connection_made`, call `resume` in `resume_writing` and `close` in `connection_lost`.
    """

    def __init__(self, transport: asyncio.Transport, max_unsent_bytes: int) -> None:
        transport.set_write_buffer_limits(high=0)  # asyncio then calls `resume_writing` only when nothing is left
        self._transport = transport
        self._max_unsent_bytes = max_unsent_bytes
        self._fd: int = transport.get_extra_info("socket").fileno()
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()  # guards the three fields below, and keeps the descriptor open during a write
        self._num_on_their_way = 0  # writes that were passed to the loop and have not arrived there
        self._is_behind = False
        self._is_open = True

    def write(self, data: bytes) -> None:
        """Send all of `data` behind earlier writes. Does nothing once the connection is closed."""
        with self._lock:
            rest = data if self._is_behind or not self._is_open else data[self._write_some(data) :]
            if rest and self._is_open:
                self._is_behind = True
                self._num_on_their_way += 1
                with suppress(RuntimeError):  # the loop has ended, so this process ends too
                    self._loop.call_soon_threadsafe(self._pass_on, rest)

    def _write_some(self, data: bytes) -> int:
        try:
            return os.write(self._fd, data)
        except BlockingIOError:
            return 0
        except OSError:  # the loop sees the error too and ends the connection
            return len(data)

    def _pass_on(self, rest: bytes) -> None:
        with self._lock:
            self._num_on_their_way -= 1
            if not self._is_open:
                return
            self._transport.write(rest)
        if self._transport.get_write_buffer_size() > self._max_unsent_bytes:
            log.error("the other end has stopped reading, closing its connection")
            self._transport.abort()
        self.resume()

    def resume(self) -> None:
        """Let writes be direct again if all earlier ones have been sent. Call it on the event loop."""
        with self._lock:
            self._is_behind = self._num_on_their_way > 0 or self._transport.get_write_buffer_size() > 0

    def close(self) -> None:
        with self._lock:
            self._is_open = False
