"""One request of a client in the process of user code: the app answers it, and may ask the server
questions on the way.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from itertools import count
from typing import NamedTuple, TypeAlias

from starlette.types import ASGIApp, Message

from lmi.errors import ErrorInfo, UserCodeFailed, shorten
from lmi.user_code.calls import WINDOW, Drop, End, Taken
from lmi.user_code.outputs import HEADER_NAME, HEADER_VALUE
from lmi.user_code.standards.calls import (
    AppStart,
    AskServer,
    Broken,
    Field,
    Part,
    PartTaken,
    Serve,
    ServerReply,
    StopAsking,
    ToApp,
    ToFrontEnd,
    chunks_of,
)
from lmi.user_code.worker import describe

# The log names the module that its readers know.
log = logging.getLogger("lmi.user_code.standards.worker")

FromServer: TypeAlias = ServerReply | Part | Broken


class ServerLost(Exception):
    """The server's answer to the code ended before its end."""


class ServerAnswer(NamedTuple):
    """The server's answer to a question. `parts` may be read once."""

    status: int
    headers: list[Field]
    parts: AsyncIterator[bytes]

    async def body(self) -> bytes:
        return b"".join([part async for part in self.parts])


class Question:
    """One request of the code to the server, and what has come back of it."""

    def __init__(self, request: "RunningRequest", number: int) -> None:
        self._request = request
        self._number = number
        self._inbox: asyncio.Queue[FromServer] = asyncio.Queue()
        self._is_over = False

    def take(self, message: FromServer) -> None:
        self._inbox.put_nowait(message)

    async def answer(self) -> ServerAnswer:
        try:
            reply = await self._next()
        except BaseException:
            # Code that waits no longer has nothing else by which to stop the answer.
            self.close()
            raise

        assert isinstance(reply, ServerReply)
        return ServerAnswer(reply.status, reply.headers, self._parts())

    async def _parts(self) -> AsyncIterator[bytes]:
        try:
            while not self._is_over:
                part = await self._next()
                assert isinstance(part, Part)
                self._is_over = part.is_last
                self._request.send(PartTaken(self._number))
                if part.body:
                    yield part.body
        finally:
            self.close()

    async def _next(self) -> ServerReply | Part:
        message = await self._inbox.get()
        if isinstance(message, Broken):
            self._is_over = True
            raise ServerLost(message.reason)

        return message

    def close(self) -> None:
        """Stop the server's answer, unless all of it has come."""
        self._request.forget(self._number, is_over=self._is_over)
        self._is_over = True


class RunningRequest:
    """One request of a client, while the app answers it."""

    def __init__(
        self,
        request: Serve,
        send: Callable[[ToFrontEnd], None],
        forget: Callable[[], None],
    ) -> None:
        """`send` sends to the front end. `forget` is called when nothing follows."""
        self.request = request
        self.send = send
        self._forget = forget
        self._numbers = count()
        self._questions: dict[int, Question] = {}
        self._has_read = False
        # Set when the client has left, or has the whole answer.
        self._gone = asyncio.Event()
        # Chunks that the front end still takes before it has sent some on.
        self._room = asyncio.Semaphore(WINDOW)
        self._has_ended = False
        self.task: asyncio.Task[None] | None = None

    # What comes from the front end.

    def take(self, message: ToApp) -> None:
        match message:
            case Taken():
                self._room.release()
            case Drop():
                self._gone.set()
                if self.task is not None:
                    self.task.cancel()
            case ServerReply() | Part() | Broken():
                question = self._questions.get(message.number)
                if question is not None:
                    question.take(message)

    def lose(self) -> None:
        """The front end has gone, and the client with it."""
        self.take(Drop())
        for question in list(self._questions.values()):
            question.take(Broken(0, "the front end was lost"))

    # What goes to the front end.

    async def ask(
        self, method: str, path: str, query: bytes, headers: list[Field], body: bytes
    ) -> Question:
        """Ask the server. Raises ServerLost where the request has ended already."""
        if self._has_ended:
            raise ServerLost("the request that this belongs to has ended")

        number = next(self._numbers)
        question = Question(self, number)
        self._questions[number] = question
        self.send(AskServer(number, method, path, query, headers, body))
        return question

    def forget(self, number: int, *, is_over: bool) -> None:
        if self._questions.pop(number, None) is not None and not is_over and not self._has_ended:
            self.send(StopAsking(number))

    # The app.

    async def run(self, app: ASGIApp) -> None:
        RUNNING_REQUEST.set(self)
        error = None
        try:
            await app(self._scope(), self._receive, self._send)
            if not self._has_ended:
                error = UserCodeFailed("the model's code returned before its answer was whole").info
        except asyncio.CancelledError:
            # The process ends, or the code has cancelled itself: an answer that has begun is not
            # whole.
            if not self._gone.is_set():
                error = UserCodeFailed("the model's code was cancelled").info
        # An app that calls `sys.exit` ends its request, and not the process with all the others.
        except BaseException as failure:
            log.error("the model's code failed", exc_info=failure)
            error = UserCodeFailed(describe(failure)).info
        finally:
            self._end(error)

    def _scope(self) -> dict[str, object]:
        request = self.request
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "scheme": "http",
            "method": request.method,
            "path": request.path,
            "raw_path": request.path.encode(),
            "root_path": "",
            "query_string": request.query,
            "headers": list(request.headers),
            "client": request.client,
            # ASGI asks for an address. The server's own is not known in this process.
            "server": ("127.0.0.1", 8080),
            "state": {},
        }

    async def _receive(self) -> Message:
        if not self._has_read:
            self._has_read = True
            return {"type": "http.request", "body": self.request.body, "more_body": False}

        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            fields = [(bytes(name), bytes(value)) for name, value in message.get("headers", ())]
            _check_head(message["status"], fields)
            self.send(AppStart(message["status"], fields))
            return

        if message["type"] != "http.response.body":
            return

        for chunk in chunks_of(message.get("body", b"")):
            await self._room.acquire()
            self.send(chunk)

        if not message.get("more_body", False):
            self._end(None)

    def _end(self, error: ErrorInfo | None) -> None:
        if self._has_ended:
            return

        self._has_ended = True
        self._gone.set()
        self.send(End(error))
        self._forget()


def _check_head(status: int, fields: list[Field]) -> None:
    """Raise ValueError for a head that HTTP cannot carry, as one into which a client has written
    lines of its own.
    """
    if not 200 <= status <= 599:
        raise ValueError(f"an answer's status must be from 200 to 599, given {status}")

    for raw_name, raw_value in fields:
        name = raw_name.decode("latin-1")
        value = raw_value.decode("latin-1")
        if not HEADER_NAME.fullmatch(name):
            raise ValueError(f"a header must have a header's name, given {shorten(name)}")

        if not HEADER_VALUE.fullmatch(value):
            raise ValueError(f"the header {name} must be one line, given {shorten(value)}")


# The request that the code runs for now. Tasks that it makes inherit it.
RUNNING_REQUEST: ContextVar[RunningRequest | None] = ContextVar("lmi_running_request", default=None)
