"""Calls of user code: the messages between a front end and the code's process, in msgpack, and the
front end's side of them.

A call is a request to `handle`, or a request with formatters, which run in one call, so that the
second finds the object that the first made. The front end chooses its id, with which each message
comes. A call ends with `End`, or `Drop` from the front end. The worker sends at most WINDOW chunks
of `handle` more than were `Taken`, so a slow client slows the code. Any other bytes close the
connection. Nothing is retried.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar

import msgspec

from lmi.errors import EngineLost, ErrorInfo, RequestTooLarge, Unavailable, from_info
from lmi.ipc import Connecting, Connections, FrameTooLarge, frame
from lmi.shared.state import Block, EngineRecord
from lmi.types import Token

# The most chunks of one call that are sent and not taken yet.
WINDOW = 32
MAX_CHUNK_BYTES = 1 << 20


class _Message(msgspec.Struct, frozen=True, array_like=True):
    pass


class AdapterCode(_Message, frozen=True):
    """The file of an adapter that has code of its own, and when it was written."""

    name: str
    path: str
    written_ns: int

    @classmethod
    def of(cls, name: str, file: Path) -> Self | None:
        """Return the code of an adapter in this file, or None without such a file."""
        try:
            return cls(name, str(file), file.stat().st_mtime_ns)
        except OSError:
            return None


class LoadCode(_Message, frozen=True, tag="load_code"):
    """Import the code of an adapter. One chunk comes back, the kinds of its formatters as words."""

    adapter: AdapterCode


class Handle(_Message, frozen=True, tag="handle"):
    properties: dict[str, str]
    query: dict[str, str]
    body: bytes


class ReadInput(_Message, frozen=True, tag="read_input"):
    """Run the input formatter. One chunk comes back, the body that it made. The call stays open for
    an Open.
    """

    properties: dict[str, str]
    body: bytes
    # Whose formatter it is, where the adapter has one.
    adapter: AdapterCode | None = None


class Open(_Message, frozen=True, tag="open"):
    """Begin the answers, one for each prompt. A Head comes back, then one chunk for each Feed.

    `fields` is the request's body without the prompt. `details` and `return_full_text` have their
    defaults applied.
    """

    prompts: list[str]
    fields: dict[str, Any]
    is_streaming: bool
    details: bool
    return_full_text: bool
    adapter: AdapterCode | None = None


class Feed(_Message, frozen=True, tag="feed"):
    """New tokens of the answer to the prompt at `index`. The call ends when each answer has a
    `finish_reason`.

    Tokens have `top`, and there is `prefill`, if the request asked for them. `prefill` and the
    prompt's token ids come with the first Feed of a prompt.
    """

    index: int
    tokens: list[Token]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt_token_ids: list[int] | None = None
    prefill: list[Token] | None = None


class Respond(_Message, frozen=True, tag="respond"):
    """Rewrite an object or chunk of another API's response, given as JSON. One chunk comes back."""

    body: bytes
    adapter: AdapterCode | None = None


class Taken(_Message, frozen=True, tag="taken"):
    """The front end took one chunk."""


class Drop(_Message, frozen=True, tag="drop"):
    """The front end does not wait for the call any more."""


class Head(_Message, frozen=True, tag="head"):
    """Status and headers. `media_type` is "" if there is no body, or if the code names none."""

    status: int
    media_type: str
    headers: dict[str, str]
    # The front end sends the chunks on as they arrive.
    is_streaming: bool = False


class End(_Message, frozen=True, tag="end"):
    """Nothing follows. The error is what the code raised."""

    error: ErrorInfo | None = None


# What the code works on.
Work = Handle | ReadInput | Open | Feed | Respond | LoadCode
ToWorker = Work | Taken | Drop
# Bytes are a chunk of a body.
ToFrontEnd = Head | bytes | End

encode: Callable[[tuple[int, object]], bytes] = msgspec.msgpack.Encoder().encode
# The decoders raise msgspec.DecodeError or ValidationError for any other bytes.
decode_to_worker: Callable[[bytes], tuple[int, ToWorker]] = msgspec.msgpack.Decoder(
    tuple[int, ToWorker]
).decode
decode_to_front_end: Callable[[bytes], tuple[int, ToFrontEnd]] = msgspec.msgpack.Decoder(
    tuple[int, ToFrontEnd]
).decode


class Call:
    """One call. Its messages are taken in order. Always `close` it."""

    def __init__(self, connection: "WorkerConnection", call_id: int) -> None:
        self._id = call_id
        self._connection = connection
        self.inbox: asyncio.Queue[ToFrontEnd] = asyncio.Queue()

    def send(self, message: ToWorker) -> None:
        """Send a message. Raises RequestTooLarge if it does not fit in a frame."""
        self._connection.send(self._id, message)

    async def take(self) -> Head | bytes | None:
        """Wait for the next message. Returns None after the last. Raises the LmiError that ended
        the call.
        """
        message = await self.inbox.get()
        if isinstance(message, End):
            if message.error is not None:
                raise from_info(message.error)

            return None

        if isinstance(message, bytes):
            self.send(Taken())

        return message

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


class WithInbox(Protocol):
    """A call whose messages come through a queue."""

    @property
    def inbox(self) -> asyncio.Queue[Any]: ...


AnyCall = TypeVar("AnyCall", bound=WithInbox)


class UserCodeConnection(Connecting, Generic[AnyCall]):
    """One socket to a process of user code, and the calls that are open on it, by their ids."""

    def __init__(self) -> None:
        super().__init__()
        self._ids = count()
        self.calls: dict[int, AnyCall] = {}

    def new_call(self, call_id: int) -> AnyCall:
        raise NotImplementedError

    def begin(self, first: object) -> AnyCall:
        """Begin a call with its first message. Raises RequestTooLarge."""
        call_id = next(self._ids)
        self.send(call_id, first)
        call = self.new_call(call_id)
        self.calls[call_id] = call
        return call

    def send(self, call_id: int, message: object) -> None:
        """Send a message. Raises RequestTooLarge if it does not fit in a frame."""
        try:
            self.write(frame(encode((call_id, message))), call_id)
        except FrameTooLarge as error:
            raise RequestTooLarge(
                f"the request does not fit on the way to the model's code: {error}"
            ) from None

    def drop(self, call_id: int) -> None:
        if self.calls.pop(call_id, None) is not None:
            self.take_back(call_id)
            self.send(call_id, Drop())

    def deliver(self, call_id: int, message: object) -> None:
        """Put a message that has come into the inbox of its call."""
        call = self.calls.get(call_id)
        # A call that was dropped a moment ago is not here any more.
        if call is None:
            return

        if isinstance(message, End):
            del self.calls[call_id]

        call.inbox.put_nowait(message)

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        calls = self.calls
        self.calls = {}
        lost = EngineLost("the model's code was lost while it worked on this request")
        for call in calls.values():
            call.inbox.put_nowait(End(lost.info))


class WorkerConnection(UserCodeConnection[Call]):
    """One socket to one worker."""

    other_end = "a user code worker"

    def new_call(self, call_id: int) -> Call:
        return Call(self, call_id)

    def take(self, payload: bytes) -> None:
        call_id, message = decode_to_front_end(payload)
        self.deliver(call_id, message)


def ends(folder: Path, block: Block) -> list[tuple[str, EngineRecord]]:
    """Return the socket and the record of each process of user code.

    User code that is the model has the records of engines.
    """
    records = block.formatters or block.engines
    return [(str(folder / f"code-{slot}.sock"), record) for slot, record in enumerate(records)]


class UserCodeWorkers(Connections[WorkerConnection]):
    """The connections of one front end to every process of user code."""

    def __init__(self, sockets: Sequence[str], records: Sequence[EngineRecord]) -> None:
        super().__init__(WorkerConnection, sockets, records)
        # The code of each adapter that was asked for last, and the kinds of formatters that it has,
        # by the adapter's name.
        self._kinds_by_adapter: dict[str, tuple[AdapterCode, frozenset[str]]] = {}

    async def formatters_of(self, adapter: AdapterCode) -> frozenset[str]:
        """Return the kinds of formatters that the code of an adapter has. Raises UserCodeFailed
        with what it raises as it is imported.
        """
        code, kinds = self._kinds_by_adapter.get(adapter.name, (None, frozenset()))
        if code == adapter:
            return kinds

        with closing(await self.begin(LoadCode(adapter))) as call:
            kinds = frozenset((await call.chunk()).decode().split())

        self._kinds_by_adapter[adapter.name] = (adapter, kinds)
        return kinds

    async def begin(self, first: ToWorker) -> Call:
        """Begin a call with this message. Raises Unavailable if no worker is connected."""
        await self.wait_for(lambda: self.alive)
        if not self.alive:
            raise Unavailable("the model's code is not ready: " + self.describe())

        return min(self.alive, key=lambda connection: len(connection.calls)).begin(first)


class SharedCall:
    """The one call around a request, which all its formatters share. It begins with the first
    message. Always `close` it.
    """

    def __init__(self, workers: UserCodeWorkers) -> None:
        self._workers = workers
        self._call: Call | None = None
        # Whose own code the formatters are, where the adapter of the request has any.
        self.adapter: AdapterCode | None = None

    async def send(self, message: ToWorker) -> Call:
        """Send the message. Returns the call, whose next messages answer it."""
        if self._call is None:
            self._call = await self._workers.begin(message)
        else:
            self._call.send(message)

        return self._call

    def close(self) -> None:
        if self._call is not None:
            self._call.close()
