"""The front end's end of the user code sockets.

The calls of a lost worker end with `EngineLost`. A call that is closed before its end sends Drop. Nothing is retried.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from itertools import count

from lmi.errors import EngineLost, MalformedRequest, Unavailable, from_info
from lmi.ipc import Connection, Connections, FrameTooLarge, frame
from lmi.shared.state import EngineRecord
from lmi.user_code import messages
from lmi.user_code.messages import End, Head, ToFrontEnd, ToWorker


class Call:
    """One call. Its messages are taken in order. Always `close` it."""

    def __init__(self, connection: "WorkerConnection", call_id: int) -> None:
        self._id = call_id
        self._connection = connection
        self.inbox: asyncio.Queue[ToFrontEnd] = asyncio.Queue()

    def send(self, message: ToWorker) -> None:
        """Send a message. Raises MalformedRequest if it does not fit in a frame."""
        self._connection.send(self._id, message)

    async def take(self) -> Head | bytes | None:
        """Wait for the next message. Returns None after the last. Raises the LmiError that ended the call."""
        item = await self.inbox.get()
        if isinstance(item, End):
            if item.error is not None:
                raise from_info(item.error)
            return None
        if isinstance(item, bytes):
            self.send(messages.Taken())
        return item

    async def head(self) -> Head:
        head = await self.take()
        assert isinstance(head, Head)
        return head

    async def chunk(self) -> bytes:
        chunk = await self.take()
        assert isinstance(chunk, bytes)
        return chunk

    async def chunks(self) -> AsyncGenerator[bytes]:
        """Yield every chunk up to the end of the call."""
        while (chunk := await self.take()) is not None:
            assert isinstance(chunk, bytes)
            yield chunk

    def close(self) -> None:
        self._connection.drop(self._id)


class WorkerConnection(Connection):
    """One socket to one worker."""

    other_end = "a user code worker"

    def __init__(self) -> None:
        super().__init__()
        self._ids = count()
        self.calls: dict[int, Call] = {}

    def begin(self, first: ToWorker) -> Call:
        call_id = next(self._ids)
        self.send(call_id, first)
        call = self.calls[call_id] = Call(self, call_id)
        return call

    def send(self, call_id: int, message: ToWorker) -> None:
        try:
            self.write(frame(messages.encode((call_id, message))))
        except FrameTooLarge as error:
            raise MalformedRequest(f"the request does not fit on the way to the model's code: {error}") from None

    def drop(self, call_id: int) -> None:
        if self.calls.pop(call_id, None) is not None:
            self.send(call_id, messages.Drop())

    def take(self, payload: bytes) -> None:
        call_id, message = messages.decode_to_front_end(payload)
        call = (self.calls.pop if isinstance(message, End) else self.calls.get)(call_id, None)
        if call is not None:  # else it was dropped a moment ago
            call.inbox.put_nowait(message)

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        calls, self.calls = self.calls, {}
        lost = EngineLost("the model's code was lost while it worked on this request")
        for call in calls.values():
            call.inbox.put_nowait(End(lost.info))


class UserCodeWorkers(Connections[WorkerConnection]):
    """The connections of one front end to every process of user code."""

    def __init__(self, sockets: Sequence[str], records: Sequence[EngineRecord]) -> None:
        super().__init__(WorkerConnection, sockets, records)

    async def begin(self, first: ToWorker) -> Call:
        """Begin a call with this message. Raises Unavailable if no worker is connected."""
        await self.wait_for(lambda: self.alive)
        if not self.alive:
            raise Unavailable("the model's code is not ready: " + self.describe())
        return min(self.alive, key=lambda connection: len(connection.calls)).begin(first)
