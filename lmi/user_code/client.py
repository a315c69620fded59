"""The front end's end of the code workers' sockets.

`CodeWorkers` keeps one connection to each worker and gives a call to the one that has the fewest. A worker that is lost
ends its calls with `EngineLost`; a call that is closed before its end sends Drop. Nothing is retried.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import count

from lmi.errors import CustomCodeFailed, EngineLost, LmiError, MalformedRequest, OutOfMemory, Unavailable
from lmi.ipc.connection import Connection, Connections
from lmi.ipc.frames import FrameTooLarge, frame
from lmi.shared.state import EngineRecord
from lmi.user_code.messages import (
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


class Call:
    """One call. `take` gives what comes back, in order. Always `close` it."""

    def __init__(self, connection: WorkerConnection, call_id: int) -> None:
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
            raise (OutOfMemory if item.is_out_of_memory else CustomCodeFailed)(item.message)
        if isinstance(item, End):
            return None
        if isinstance(item, Piece):
            self._connection.send(Taken(self.id))
        return item

    def put(self, item: ToFrontEnd | LmiError) -> None:
        self._inbox.put_nowait(item)

    def close(self) -> None:
        self._connection.drop(self.id)


class WorkerConnection(Connection):
    """One socket to one worker."""

    other_end = "a code worker"

    def __init__(self) -> None:
        super().__init__()
        self._ids = count()
        self._calls: dict[int, Call] = {}

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
            self.write(frame(encode(message)))
        except FrameTooLarge as error:
            raise MalformedRequest(f"the request does not fit on the way to the model's code: {error}") from None

    def drop(self, call_id: int) -> None:
        if self._calls.pop(call_id, None) is not None:
            self.send(Drop(call_id))

    def take(self, payload: bytes) -> None:
        message = decode_to_front_end(payload)
        is_last = isinstance(message, End | Failed)
        call = self._calls.pop(message.call_id, None) if is_last else self._calls.get(message.call_id)
        if call is not None:  # else it was dropped a moment ago
            call.put(message)

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.put(EngineLost("the model's code was lost while it worked on this request"))


class CodeWorkers(Connections[WorkerConnection]):
    """Every code worker of this server, as one front-end worker sees them."""

    def __init__(self, sockets: Sequence[str], records: Sequence[EngineRecord]) -> None:
        super().__init__(WorkerConnection, sockets, records)

    async def begin(self, first: Callable[[int], ToWorker]) -> Call:
        """Begin a call with the message that `first` makes of its id. Raises Unavailable when no worker is there."""
        await self.wait_for(lambda: self.alive)
        if not self.alive:
            raise Unavailable("the model's code is not ready: " + self.describe())
        return min(self.alive, key=lambda connection: connection.num_calls).begin(first)
