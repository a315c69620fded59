"""Sockets between two processes of a server: frames, both ends of a connection, and a writer for
any thread.

A frame is a 4-byte little-endian length and that many bytes. A connection closes when one is not a
valid message.
"""

import asyncio
import logging
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Generic, NamedTuple, TypeVar, cast

import msgspec

from lmi.shared.state import EngineRecord, Phase

HEAD_BYTES = 4
MAX_FRAME_BYTES = 64 << 20
# As much is passed to the transport, which cannot give back what the other end has not read.
MAX_PASSED_BYTES = 256 << 10
RECONNECT_S = 0.05
# On a busy machine a process that is ready may take seconds to say so to those who connect.
CONNECT_TIMEOUT_S = 10.0

log = logging.getLogger(__name__)


class FrameTooLarge(ValueError):
    """A frame is over the limit. If the other end announced it, the connection cannot be used any
    more.
    """

    def __init__(self, num_bytes: int) -> None:
        super().__init__(f"a frame has at most {MAX_FRAME_BYTES} bytes, this one {num_bytes}")


def frame(payload: bytes) -> bytes:
    if len(payload) > MAX_FRAME_BYTES:
        raise FrameTooLarge(len(payload))

    return len(payload).to_bytes(HEAD_BYTES, "little") + payload


class FrameReader:
    """Cuts a byte stream into frames, however the bytes arrive. It never touches a socket."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the payloads of the frames that `data` completes. Raises FrameTooLarge for a length
        over the limit.
        """
        self._buffer += data
        offset = 0
        while len(self._buffer) - offset >= HEAD_BYTES:
            size = int.from_bytes(self._buffer[offset : offset + HEAD_BYTES], "little")
            if size > MAX_FRAME_BYTES:
                raise FrameTooLarge(size)

            if len(self._buffer) - offset - HEAD_BYTES < size:
                break

            offset += HEAD_BYTES
            yield bytes(self._buffer[offset : offset + size])
            offset += size

        del self._buffer[:offset]


class Connection(asyncio.Protocol):
    """One end of one socket, from its first byte to its last."""

    # The process at the other end, for the log.
    other_end: str

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.closed: asyncio.Future[None] = self.loop.create_future()
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None

    def take(self, payload: bytes) -> None:
        """Handle the payload of one frame. Raises MsgspecError for an invalid message, which closes
        the connection.
        """
        raise NotImplementedError

    def write(self, data: bytes) -> None:
        """Send a frame. Does nothing once the other end is lost."""
        if self._transport is not None:
            self._transport.write(data)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's class has the methods but not the base.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._reader.feed(data):
                self.take(payload)
        except (FrameTooLarge, msgspec.MsgspecError, UnicodeDecodeError) as error:
            log.error(
                "%s sent something that is not a message of ours, closing: %s",
                self.other_end,
                error,
            )
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if not self.closed.done():
            self.closed.set_result(None)


class Unsent(NamedTuple):
    """A frame that waits until the other end reads on."""

    data: bytes
    # The id of the request or call that it belongs to, if that may take it back.
    owner: int | None


class Connecting(Connection):
    """The connecting end of a connection. Frames that the other end does not read wait here.

    Those of a request whose client has left are taken back: an end that has stopped reading holds
    no memory of theirs.
    """

    def __init__(self) -> None:
        super().__init__()
        self._unsent: deque[Unsent] = deque()
        self._is_paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        cast(asyncio.Transport, transport).set_write_buffer_limits(high=MAX_PASSED_BYTES, low=0)

    def write(self, data: bytes, owner: int | None = None) -> None:
        """Send a frame when the other end has read those before it. Does nothing once the other end
        is lost.
        """
        if self._is_paused:
            self._unsent.append(Unsent(data, owner))
        else:
            super().write(data)

    def take_back(self, owner: int) -> bool:
        """Drop the frames of a request that still wait here. Returns whether there were any."""
        if not self._unsent:
            return False

        still_unsent = deque(unsent for unsent in self._unsent if unsent.owner != owner)
        has_dropped = len(still_unsent) < len(self._unsent)
        self._unsent = still_unsent
        return has_dropped

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        while self._unsent and not self._is_paused:
            super().write(self._unsent.popleft().data)

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self._unsent.clear()


class Accepted(Connection):
    """The accepting end of a connection. It closes at once if the other process belongs to anybody
    else.
    """

    # Another user who may connect, beside this one and root.
    client_uid: int | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        peer = transport.get_extra_info("socket")
        credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        # These are pid, uid and gid. Source: unix(7), SO_PEERCRED.
        _, uid, _ = struct.unpack("3i", credentials)
        if uid not in (os.geteuid(), 0, self.client_uid):
            log.error("refused a connection of another user")
            self.close()


async def listen(
    accept: Callable[[], Accepted], path: str, uid: int | None = None
) -> asyncio.Server:
    """Accept connections at `path`, also of processes of user `uid`. `accept` makes the protocol of
    each.
    """

    def accepted() -> Accepted:
        connection = accept()
        connection.client_uid = uid
        return connection

    return await asyncio.get_running_loop().create_unix_server(accepted, sock=bind(path, uid))


def bind(path: str, uid: int | None = None) -> socket.socket:
    """Return a socket bound to `path` that only one user can open. It replaces a dead process's
    socket there.
    """
    if os.path.exists(path):
        os.unlink(path)

    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    previous = os.umask(0o177)
    try:
        listener.bind(path)
    finally:
        os.umask(previous)

    if uid is not None:
        os.chown(path, uid, -1, follow_symlinks=False)

    return listener


C = TypeVar("C", bound=Connection)


class Connections(Generic[C]):
    """Connections to several processes. Slot i listens at `sockets[i]` and has its phase in
    `records[i]`.

    `open` holds the open connections by slot.
    """

    def __init__(
        self, make: Callable[[], C], sockets: Sequence[str], records: Sequence[EngineRecord]
    ) -> None:
        self.open: dict[int, C] = {}
        self.records = records
        self._make = make
        self._sockets = sockets
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        for slot in range(len(self._sockets)):
            self._tasks.append(asyncio.create_task(self._keep_connected(slot)))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()

        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def alive(self) -> list[C]:
        """The open connections without those that have just been lost."""
        return [connection for connection in self.open.values() if not connection.closed.done()]

    async def wait_for(
        self, is_there: Callable[[], object], timeout_s: float = CONNECT_TIMEOUT_S
    ) -> None:
        """Wait for a process that has just become ready and is not connected yet."""
        deadline_s = time.monotonic() + timeout_s
        while not is_there() and time.monotonic() < deadline_s:
            if not any(record.phase == Phase.READY for record in self.records):
                break

            await asyncio.sleep(RECONNECT_S)

    def describe(self) -> str:
        """Return the states of the processes, for the message that no process can be reached."""
        states = []
        for record in self.records:
            if record.phase == Phase.READY:
                states.append("not connected yet")
            else:
                states.append(Phase(record.phase).name.lower())

        return ", ".join(states)

    async def _keep_connected(self, slot: int) -> None:
        """Connect when the process of this slot is ready, and again after the
        connection was lost.
        """
        while True:
            if self.records[slot].phase == Phase.READY:
                with suppress(OSError):
                    await self._connect(slot)

            await asyncio.sleep(RECONNECT_S)

    async def _connect(self, slot: int) -> None:
        """Connect, and return when the connection is lost."""
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_unix_connection(self._make, self._sockets[slot])
        self.open[slot] = connection
        try:
            await connection.closed
        finally:
            del self.open[slot]
            connection.close()


class ThreadSafeWriter:
    """Writes to one connection from any thread, and aborts it if more than `max_unsent_bytes` are
    unread.

    `write` sends directly from the thread that calls it. Bytes that the kernel does not accept are
    queued on the event loop, and later writes queue behind them. So a thread that computes sends
    its results without waking another thread, which would take the interpreter from it in the
    middle of its next step.

    Make it in `connection_made`, call `resume` in `resume_writing` and `close` in
    `connection_lost`.
    """

    def __init__(self, transport: asyncio.Transport, max_unsent_bytes: int) -> None:
        # With it asyncio calls `resume_writing` only when nothing is left.
        transport.set_write_buffer_limits(high=0)
        self._transport = transport
        self._max_unsent_bytes = max_unsent_bytes
        self._fd: int = transport.get_extra_info("socket").fileno()
        self._loop = asyncio.get_running_loop()

        # It guards the three fields below, and keeps the descriptor open during a write.
        self._lock = threading.Lock()
        # The writes that were passed to the loop and have not arrived there.
        self._num_on_their_way = 0
        self._is_behind = False
        self._is_open = True

    def write(self, data: bytes) -> None:
        """Send all of `data` behind earlier writes. Does nothing once the connection is closed."""
        with self._lock:
            if not self._is_open:
                return

            if not self._is_behind:
                try:
                    data = data[os.write(self._fd, data) :]
                except BlockingIOError:
                    pass
                except OSError:
                    # The loop sees the error too and ends the connection.
                    return

            if data:
                self._is_behind = True
                self._num_on_their_way += 1
                # The loop may have ended, and then this process ends too.
                with suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(self._pass_on, data)

    def _pass_on(self, data: bytes) -> None:
        with self._lock:
            self._num_on_their_way -= 1
            if not self._is_open:
                return

            self._transport.write(data)

        if self._transport.get_write_buffer_size() > self._max_unsent_bytes:
            log.error("the other end has stopped reading, closing its connection")
            self._transport.abort()

        self.resume()

    def resume(self) -> None:
        """Let writes be direct again if all earlier ones have been sent. Call it on the
        event loop.
        """
        with self._lock:
            self._is_behind = (
                self._num_on_their_way > 0 or self._transport.get_write_buffer_size() > 0
            )

    def close(self) -> None:
        with self._lock:
            self._is_open = False
