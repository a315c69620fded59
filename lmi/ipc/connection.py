"""One end of a socket between two processes of a server, and the connections of one process.

`Connection` decodes frames and closes when a frame is not a valid message. `Connections` connects to each of several
processes when its record says that it is ready, and again after the connection was lost.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Generic, Protocol, TypeVar, cast

import msgspec

from lmi.ipc.frames import FrameReader, FrameTooLarge
from lmi.shared.state import Phase

RECONNECT_S = 0.05
CONNECT_TIMEOUT_S = 2.0

log = logging.getLogger(__name__)


class Connection(asyncio.Protocol):
    """One end of one socket, from its first byte to its last."""

    other_end: str  # the process there, for the log

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.closed: asyncio.Future[None] = self.loop.create_future()
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None

    def take(self, payload: bytes) -> None:
        """Handle the payload of one frame. Raises MsgspecError for an invalid message, which closes the connection."""
        raise NotImplementedError

    def write(self, data: bytes) -> None:
        """Send a frame. Does nothing once the other end is lost."""
        if self._transport is not None:
            self._transport.write(data)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's class has the methods but not the base

    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._reader.feed(data):
                self.take(payload)
        except (FrameTooLarge, msgspec.MsgspecError, UnicodeDecodeError) as error:
            log.error("%s sent something that is not a message of ours, closing: %s", self.other_end, error)
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if not self.closed.done():
            self.closed.set_result(None)


class PeerRecord(Protocol):
    """The record of a process that others connect to."""

    @property
    def phase(self) -> int: ...

    @property
    def is_alive(self) -> bool: ...


C = TypeVar("C", bound=Connection)


class Connections(Generic[C]):
    """Connections to several processes. Slot i listens at `sockets[i]` and has its phase in `records[i]`.

    `open` holds the open connections by slot.
    """

    def __init__(self, make: Callable[[], C], sockets: Sequence[str], records: Sequence[PeerRecord]) -> None:
        self.open: dict[int, C] = {}
        self.records = records
        self._make = make
        self._sockets = sockets
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        self._tasks = [asyncio.create_task(self._keep_connected(slot)) for slot in range(len(self._sockets))]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def alive(self) -> list[C]:
        """The open connections without those that have just been lost."""
        return [connection for connection in self.open.values() if not connection.closed.done()]

    async def wait_for(self, is_there: Callable[[], object]) -> None:
        """Wait a moment for a process that has just become ready and is not connected yet."""
        deadline_s = time.monotonic() + CONNECT_TIMEOUT_S
        while not is_there() and time.monotonic() < deadline_s:
            if not any(record.phase == Phase.READY for record in self.records):
                break
            await asyncio.sleep(RECONNECT_S)

    def describe(self) -> str:
        """Return the states of the processes, for the message that no process can be reached."""
        return ", ".join(
            "not connected yet" if record.phase == Phase.READY else Phase(record.phase).name.lower()
            for record in self.records
        )

    async def _keep_connected(self, slot: int) -> None:
        """Connect when the process of this slot is ready, and again after the connection was lost."""
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
