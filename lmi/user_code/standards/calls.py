"""Requests through the app of AWS's model-hosting-container-standards: the messages between a front
end and the process of user code, in msgpack, and the front end's side of them.

A call is one request of a client. The front end begins it with `Serve`, and the app answers with
an `AppStart`, chunks and an `End`. Inside a call the app may ask the server itself, any number of
times and side by side: each `AskServer` has a number within the call, with which its `ServerReply`
and its parts come back. Each side sends at most WINDOW chunks more than the other end `Taken`, so a
slow end slows the other one. The front end ends a call early with `Drop`, the app one question with
`StopAsking`.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from lmi.errors import Unavailable
from lmi.ipc import Connections
from lmi.shared.state import EngineRecord
from lmi.user_code.calls import MAX_CHUNK_BYTES, Drop, End, Taken, UserCodeConnection

# The call of a `Doors`.
NO_CALL = -1

# A name and a value, as they are on the wire.
Field = tuple[bytes, bytes]


class MessageOfApp(msgspec.Struct, frozen=True, array_like=True):
    pass


class Doors(MessageOfApp, frozen=True, tag="doors"):
    """Which requests the app wants: those of `routes`, each a method and the pattern of a path, or
    with `takes_all` every one, because a middleware stands before them. Comes once, first.
    """

    routes: list[tuple[str, str]]
    takes_all: bool


class Serve(MessageOfApp, frozen=True, tag="serve"):
    """A request of a client."""

    method: str
    path: str
    query: bytes
    headers: list[Field]
    body: bytes
    client: tuple[str, int] | None


class AppStart(MessageOfApp, frozen=True, tag="start"):
    """Status and headers of the app's answer."""

    status: int
    headers: list[Field]


class AskServer(MessageOfApp, frozen=True, tag="ask"):
    """A request of the app to the server that it stands in front of."""

    number: int
    method: str
    path: str
    query: bytes
    headers: list[Field]
    body: bytes


class ServerReply(MessageOfApp, frozen=True, tag="reply"):
    """Status and headers of the server's answer."""

    number: int
    status: int
    headers: list[Field]


class Part(MessageOfApp, frozen=True, tag="part"):
    """A chunk of the server's answer. After the last one nothing follows."""

    number: int
    body: bytes
    is_last: bool


class Broken(MessageOfApp, frozen=True, tag="broken"):
    """The server's answer ends before its end."""

    number: int
    reason: str


class PartTaken(MessageOfApp, frozen=True, tag="part_taken"):
    number: int


class StopAsking(MessageOfApp, frozen=True, tag="stop_asking"):
    number: int


ToApp = Serve | Taken | Drop | ServerReply | Part | Broken
# Bytes are a chunk of the app's answer.
ToFrontEnd = Doors | AppStart | bytes | End | AskServer | PartTaken | StopAsking

# The decoders raise msgspec.DecodeError or ValidationError for any other bytes.
decode_to_app: Callable[[bytes], tuple[int, ToApp]] = msgspec.msgpack.Decoder(
    tuple[int, ToApp]
).decode
decode_to_front_end: Callable[[bytes], tuple[int, ToFrontEnd]] = msgspec.msgpack.Decoder(
    tuple[int, ToFrontEnd]
).decode


class AppCall:
    """One call. Its messages are taken in order. Always `close` it."""

    def __init__(self, connection: "AppConnection", call_id: int) -> None:
        self._connection = connection
        self._id = call_id
        self.inbox: asyncio.Queue[ToFrontEnd] = asyncio.Queue()

    def send(self, message: ToApp) -> None:
        """Send a message. Raises RequestTooLarge if it does not fit in a frame."""
        self._connection.send(self._id, message)

    async def take(self) -> ToFrontEnd:
        return await self.inbox.get()

    def close(self) -> None:
        self._connection.drop(self._id)


class AppConnection(UserCodeConnection[AppCall]):
    """One socket to the app's process."""

    other_end = "the app of the model's code"

    def __init__(self, on_doors: Callable[[Doors], None]) -> None:
        super().__init__()
        self._on_doors = on_doors

    def new_call(self, call_id: int) -> AppCall:
        return AppCall(self, call_id)

    def take(self, payload: bytes) -> None:
        call_id, message = decode_to_front_end(payload)
        if isinstance(message, Doors):
            self._on_doors(message)
        else:
            self.deliver(call_id, message)


class AppConnections(Connections[AppConnection]):
    """The connections of one front end to the app of the model's code.

    `doors` is what the app said last, None before it was reached for the first time.
    """

    def __init__(self, sockets: Sequence[str], records: Sequence[EngineRecord]) -> None:
        super().__init__(self._made, sockets, records)
        self.doors: Doors | None = None

    def _made(self) -> AppConnection:
        return AppConnection(self._note_doors)

    def _note_doors(self, doors: Doors) -> None:
        self.doors = doors

    async def begin(self, request: Serve) -> AppCall:
        """Begin a call. Raises Unavailable if the app cannot be reached."""
        await self.wait_for(lambda: self.alive)
        if not self.alive:
            raise Unavailable("the model's code is not ready: " + self.describe())

        return min(self.alive, key=lambda connection: len(connection.calls)).begin(request)


def chunks_of(data: bytes) -> list[bytes]:
    """Cut a body into chunks that fit in a frame. An empty one is one empty chunk."""
    starts: Any = range(0, len(data) or 1, MAX_CHUNK_BYTES)
    return [data[start : start + MAX_CHUNK_BYTES] for start in starts]
