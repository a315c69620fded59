"""The front end's end of the code workers' sockets.

`CodeWorkers` keeps one connection to each worker and gives a call to the one that has the fewest. A worker that is lost
ends its calls with `EngineLost`; a call that is closed before its end sends Drop. Nothing is retried.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from typing import cast

import msgspec

from lmi.custom.messages import (
    Drop,
    End,
    Failed,
    Head,
    Piece,
    Taken,
    ToFrontEnd,
    ToWorker,
    decode_to_front_end,
    encode,
)
from lmi.engine.client import CONNECT_TIMEOUT_S, RECONNECT_S, describe
from lmi.engine.frames import FrameReader, FrameTooLarge, frame
from lmi.errors import EngineLost, GenerationFailed, LmiError, MalformedRequest, Unavailable
from lmi.state import EngineRecord, Phase

log = logging.getLogger(__name__)


class CustomCodeFailed(GenerationFailed):
    """Code of the model's own raised; the message is its exception's."""

    label = "custom_code_failed"


class Call:
    """One call. `take` gives what comes back, in order. Always `close` it."""

    def __init__(self, connection: Connection, call_id: int) -> None:
        self.id = call_id
        self._connection = connection
        self._inbox: asyncio.Queue[ToFrontEnd | LmiError] = asyncio.Queue()

    def send(self, message: ToWorker) -> None:
        """Raises MalformedRequest for what does not fit in a frame."""
        self._connection.send(message)

    async def take(self) -> Head | Piece | None:
        """The next message; None at the end. Raises the LmiError that ended the call instead."""
        item = await self._inbox.get()
        if isinstance(item, LmiError):
            raise item
        if isinstance(item, Failed):
            raise CustomCodeFailed(item.message)
        if isinstance(item, End):
            return None
        if isinstance(item, Piece):
            self._connection.send(Taken(self.id))
        return item

    def put(self, item: ToFrontEnd | LmiError) -> None:
        self._inbox.put_nowait(item)

    def close(self) -> None:
        self._connection.drop(self.id)


class Connection(asyncio.Protocol):
    """One socket to one worker, from its first byte to its last."""

    def __init__(self) -> None:
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ids = count()
        self._calls: dict[int, Call] = {}
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None

    @property
    def num_calls(self) -> int:
        return len(self._calls)

    def begin(self, first: Callable[[int], ToWorker]) -> Call:
        call = Call(self, next(self._ids))
        self.send(first(call.id))
        self._calls[call.id] = call
        return call

    def send(self, message: ToWorker) -> None:
        try:
            data = frame(encode(message))
        except FrameTooLarge as error:
            raise MalformedRequest(f"the request does not fit on the way to the model's code: {error}") from None
        if self._transport is not None:
            self._transport.write(data)

    def drop(self, call_id: int) -> None:
        if self._calls.pop(call_id, None) is not None:
            self.send(Drop(call_id))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._reader.feed(data):
                self._deliver(decode_to_front_end(payload))
        except (FrameTooLarge, msgspec.MsgspecError) as error:
            log.error("a code worker sent something that is no message of ours, closing: %s", error)
            self.close()

    def _deliver(self, message: ToFrontEnd) -> None:
        is_last = isinstance(message, End | Failed)
        call = self._calls.pop(message.call_id, None) if is_last else self._calls.get(message.call_id)
        if call is not None:  # else it was dropped a moment ago
            call.put(message)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.put(EngineLost("the model's code was lost while it worked on this request"))
        if not self.closed.done():
            self.closed.set_result(None)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class CodeWorkers:
    """Every code worker of this server, as one front-end worker sees them."""

    def __init__(self, sockets: Sequence[str], records: Sequence[EngineRecord]) -> None:
        self._sockets = sockets
        self._records = records
        self._connections: dict[int, Connection] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        self._tasks = [asyncio.create_task(self._keep_connected(slot)) for slot in range(len(self._sockets))]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def begin(self, first: Callable[[int], ToWorker]) -> Call:
        """Begin a call with the message that `first` makes of its id. Raises Unavailable when no worker is there.

        A worker that has just become ready may not be connected yet: that is waited for.
        """
        deadline_s = time.monotonic() + CONNECT_TIMEOUT_S
        while (
            not self._connections
            and time.monotonic() < deadline_s
            and any(record.phase == Phase.READY for record in self._records)
        ):
            await asyncio.sleep(RECONNECT_S)
        if not self._connections:
            raise Unavailable("the model's code is not ready: " + describe(self._records))
        return min(self._connections.values(), key=lambda connection: connection.num_calls).begin(first)

    async def _keep_connected(self, slot: int) -> None:
        loop = asyncio.get_running_loop()
        while True:
            if self._records[slot].phase == Phase.READY:
                with suppress(OSError):
                    _, connection = await loop.create_unix_connection(Connection, self._sockets[slot])
                    self._connections[slot] = connection
                    try:
                        await connection.closed
                    finally:
                        del self._connections[slot]
                        connection.close()
            await asyncio.sleep(RECONNECT_S)
