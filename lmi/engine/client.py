"""The front end's end of the engine sockets.

`Engines` keeps one connection to each engine, sends a request to the engine with the fewest outstanding tokens and puts
each Response into the stream of its request. Nothing here retries a request: when an engine is lost, its requests end
with `EngineLost`. A stream that is closed before its end cancels its request.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from itertools import count

from lmi.engine.messages import Cancel, Output, Ready, Submit, decode_to_front_end, encode
from lmi.errors import (
    EngineLost,
    ErrorInfo,
    GenerationFailed,
    InvalidRequest,
    LmiError,
    OutOfMemory,
    Unavailable,
    from_info,
)
from lmi.executor import EngineInfo, ErrorKind, Request, Response, ResponseError, Result
from lmi.ipc.connection import Connection, Connections
from lmi.ipc.frames import frame
from lmi.shared.state import EngineRecord


class Stream:
    """The Responses of one request, in order: `await arrival()`, then `take()`. Close it whatever happens."""

    def __init__(self, connection: EngineConnection, request_id: int, num_tokens: int) -> None:
        self.num_tokens = num_tokens  # of the prompt and the longest possible answer: the engine's load
        self._connection = connection
        self._id = request_id
        self._inbox: deque[Result | LmiError] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._is_over = False  # no further Response will come

    def arrival(self) -> asyncio.Future[None]:
        """A future that is done when `take` has something. It is not a coroutine, which would cost more per token."""
        self._waiter = waiter = self._connection.loop.create_future()
        if self._inbox:
            waiter.set_result(None)
        return waiter

    def take(self) -> Result:
        """The next Result, which has arrived. Raises the LmiError that ended the request, if one did."""
        item = self._inbox.popleft()
        if isinstance(item, LmiError):
            raise item
        return item

    def close(self) -> None:
        """Forget the request, and cancel it in the engine unless it has ended there."""
        if not self._is_over:
            self._is_over = True
            self._connection.cancel(self._id)

    def put(self, item: Result | LmiError) -> None:
        self._inbox.append(item)
        if isinstance(item, LmiError) or item.is_final:
            self._is_over = True
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class EngineConnection(Connection):
    """One socket to one engine, and the streams of its requests."""

    other_end = "an engine"

    def __init__(self) -> None:
        super().__init__()
        self.info: EngineInfo | None = None
        self.num_outstanding_tokens = 0
        self._ids = count()
        self._streams: dict[int, Stream] = {}

    def submit(self, request: Request) -> Stream:
        request_id = next(self._ids)
        submit = frame(encode(Submit(request_id, request)))  # may be too large, so nothing is kept before it
        stream = self._streams[request_id] = Stream(self, request_id, len(request.input_token_ids) + request.max_tokens)
        self.num_outstanding_tokens += stream.num_tokens
        self.write(submit)
        return stream

    def cancel(self, request_id: int) -> None:
        if self._forget(request_id) is not None:
            self.write(frame(encode(Cancel(request_id))))

    def _forget(self, request_id: int) -> Stream | None:
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            self.num_outstanding_tokens -= stream.num_tokens
        return stream

    def take(self, payload: bytes) -> None:
        message = decode_to_front_end(payload)
        if isinstance(message, Output):
            for response in message.responses:
                self._deliver(response)
        elif isinstance(message, Ready):
            self.info = message.info
        elif (stream := self._forget(message.request_id)) is not None:
            stream.put(from_info(message.error))

    def _deliver(self, response: Response) -> None:
        stream = self._streams.get(response.request_id)
        if stream is None:  # cancelled a moment ago
            return
        if response.is_final:
            self._forget(response.request_id)
        stream.put(response.result if response.error is None and response.result else failure(response.error))

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self.info = None
        for request_id in list(self._streams):
            stream = self._forget(request_id)
            assert stream is not None
            stream.put(EngineLost("the engine was lost while it worked on this request"))


class Engines(Connections[EngineConnection]):
    """The connections of one front end to all engines of this server."""

    def __init__(self, sockets: Sequence[str], records: Sequence[EngineRecord]) -> None:
        super().__init__(EngineConnection, sockets, records)

    def submit(self, request: Request) -> Stream:
        """Send a request to the least loaded engine. Raises Unavailable when there is none."""
        return self._least_loaded().submit(request)

    async def ready(self) -> EngineInfo:
        """Facts about the model, which are equal for all replicas. Raises Unavailable when no engine is ready."""
        await self.wait_for(self._ready)
        info = self._least_loaded().info
        assert info is not None
        return info

    def _ready(self) -> list[EngineConnection]:
        """Connected engines, without those whose last heartbeat is old unless there are no others."""
        ready = {slot: connection for slot, connection in self.open.items() if connection.info is not None}
        alive = [connection for slot, connection in ready.items() if self.records[slot].is_alive]
        return alive or list(ready.values())

    def _least_loaded(self) -> EngineConnection:
        ready = self._ready()
        if not ready:
            raise Unavailable("no engine is ready: " + self.describe())
        return min(ready, key=lambda connection: connection.num_outstanding_tokens)


LABELS = {
    ErrorKind.GENERATION: GenerationFailed.label,
    ErrorKind.OUT_OF_MEMORY: OutOfMemory.label,
    ErrorKind.ENGINE_LOST: EngineLost.label,
    ErrorKind.INVALID: InvalidRequest.label,
}


def failure(error: ResponseError | None) -> LmiError:
    """The error that ended a request after the engine had accepted it."""
    if error is None:
        return GenerationFailed("the engine sent neither a result nor an error")
    return from_info(ErrorInfo(LABELS[error.kind], error.message, error.field))
