"""The way of a request through the app of AWS's model-hosting-container-standards: from the front
end to the model's code, and what that code asks this server in turn.

The code sees the request as in AWS's own images, before anything of it is read. What it passes on
comes back here as a request of the same client, with the same rights, and goes the usual way.
"""

import asyncio
import re
from contextlib import closing
from functools import partial
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Scope

from lmi.errors import UserCodeFailed, from_info
from lmi.http.exchange import NUM_ANNOUNCED, OUTER, Exchange
from lmi.server.access import PROBES
from lmi.server.routes.health import service_health
from lmi.server.service import Service
from lmi.user_code.calls import WINDOW, End, Taken
from lmi.user_code.outputs import WITHOUT_BODY
from lmi.user_code.standards.calls import (
    AppCall,
    AppStart,
    AskServer,
    Broken,
    Doors,
    Field,
    Part,
    PartTaken,
    Serve,
    ServerReply,
    StopAsking,
    chunks_of,
)

PING = "/ping"
INVOCATIONS = "/invocations"
# The paths that do what /invocations does. The app knows them by that name.
ALIASES = re.compile(r"/predictions/([^/]+)(?:/([^/]+))?|/models/([^/]+)/invoke")
# They tell of the server, whatever its model's code does.
NEVER = frozenset((*PROBES, "/metrics")) - {PING}
# What belongs to one exchange alone.
OF_EXCHANGE = ("lmi.exchange", "path_params", "endpoint", "route", "router", NUM_ANNOUNCED)
# The server writes these itself.
OF_SERVER = frozenset((b"content-length", b"connection", b"transfer-encoding", b"date", b"server"))


def takes(exchange: Exchange, service: Service) -> bool:
    """Whether the app wants a request. Until the app has said what it wants, it gets all."""
    path = exchange.path
    if OUTER in exchange.scope or path in NEVER:
        return False

    if path == PING and service_health(service).status != 200:
        # No code makes a server healthy that is not.
        return False

    assert service.standards is not None
    doors = service.standards.doors
    return doors is None or doors.takes_all or _is_wanted(doors, exchange.method, path)


async def serve(exchange: Exchange, service: Service, server: ASGIApp) -> None:
    """Let the app answer. `server` answers what the app asks. Raises LmiError before the first
    byte.
    """
    exchange.model = service.config.model.name
    path = _checked_path(exchange.path, service)
    if exchange.method == "POST" and path != PING:
        # A full server does not read the body.
        service.check_room()

    max_bytes = service.config.server.max_request_size
    body = await exchange.body(max_bytes, service.front_end.body_memory)
    client = exchange.scope.get("client")
    request = Serve(
        method=exchange.method,
        path=path,
        query=exchange.scope.get("query_string", b""),
        headers=list(exchange.headers.raw),
        body=body,
        client=None if client is None else (str(client[0]), int(client[1])),
    )
    del body

    assert service.standards is not None
    async with exchange.deadline(service.config.server.predict_timeout_s):
        with closing(await service.standards.begin(request)) as call:
            # Nothing here holds the body any more.
            del request
            await exchange.run_while_there(Conversation(exchange, call, server).run())


def _checked_path(path: str, service: Service) -> str:
    """Return the path as the app knows it. Raises UnknownModel for a model in it that is not
    here.
    """
    match = ALIASES.fullmatch(path)
    if match is None:
        return path

    service.check_model(match[1] or match[3], match[2])
    return INVOCATIONS


def _is_wanted(doors: Doors, method: str, path: str) -> bool:
    if ALIASES.fullmatch(path):
        path = INVOCATIONS

    for wanted_method, pattern in doors.routes:
        if method == wanted_method and re.fullmatch(pattern, path):
            return True

    return False


class Conversation:
    """The messages of one call: the app's answer becomes the response, its questions requests."""

    def __init__(self, exchange: Exchange, call: AppCall, server: ASGIApp) -> None:
        self._exchange = exchange
        self._call = call
        self._server = server
        self._questions: dict[int, ServerRequest] = {}
        self._head: AppStart | None = None
        # The chunks of an answer that is sent whole.
        self._kept: list[bytes] = []

    async def run(self) -> None:
        try:
            while not await self._take(await self._call.take()):
                pass
        finally:
            for question in self._questions.values():
                question.task.cancel()

    async def _take(self, message: object) -> bool:
        """Act on a message. Returns whether it was the last."""
        match message:
            case AskServer():
                question = ServerRequest(message, self._exchange, self._call, self._server)
                self._questions[message.number] = question
                forget = partial(self._questions.pop, message.number, None)
                question.task.add_done_callback(lambda task: forget())
            case PartTaken():
                if message.number in self._questions:
                    self._questions[message.number].room.release()
            case StopAsking():
                if message.number in self._questions:
                    self._questions[message.number].task.cancel()
            case AppStart():
                await self._begin(message)
            case bytes():
                await self._write(message)
            case End():
                await self._end(message)
                return True

        return False

    async def _begin(self, head: AppStart) -> None:
        self._head = head
        if _is_whole(head):
            return

        media_type, headers = self._response_fields(head)
        await self._exchange.start(head.status, media_type, headers)

    async def _write(self, chunk: bytes) -> None:
        assert self._head is not None
        if _is_whole(self._head):
            self._kept.append(chunk)
        elif chunk:
            await self._exchange.write(chunk)

        self._call.send(Taken())

    async def _end(self, message: End) -> None:
        head = self._head
        if message.error is not None:
            error = from_info(message.error)
            if not self._exchange.has_begun:
                raise error

            # The server cuts the connection, which shows that the answer is incomplete.
            raise CutShort(str(error))

        if head is None:
            raise UserCodeFailed("the model's code ended without an answer")

        if not _is_whole(head):
            await self._exchange.end()
            return

        media_type, headers = self._response_fields(head)
        body = b"" if head.status in WITHOUT_BODY else b"".join(self._kept)
        await self._exchange.send_whole(head.status, media_type, body, headers)

    def _response_fields(self, head: AppStart) -> tuple[str, list[tuple[str, str]]]:
        """Return the content type and the other headers of the response. The code's own id of the
        request takes the place of the server's.
        """
        media_type = ""
        headers = []
        for raw_name, raw_value in head.headers:
            name = raw_name.decode("latin-1").lower()
            value = raw_value.decode("latin-1")
            if name == "content-type":
                media_type = value
            elif raw_name.lower() not in OF_SERVER:
                headers.append((name, value))

        names = {name for name, _ in headers}
        id_headers = [name for name in self._exchange.id_headers if name not in names]
        self._exchange.id_headers = id_headers
        return media_type, headers


class CutShort(Exception):
    """The app failed after the first byte of its answer."""


class ServerRequest:
    """One request that the app asks the server in the name of its client."""

    def __init__(self, ask: AskServer, outer: Exchange, call: AppCall, server: ASGIApp) -> None:
        self._ask = ask
        self._outer = outer
        self._call = call
        self._server = server
        self._is_read = False
        self._is_over = False
        # How many chunks may still be sent.
        self.room = asyncio.Semaphore(WINDOW)
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        scope = inner_scope(self._outer, self._ask)
        reason = "the server ended its answer early"
        try:
            await self._server(scope, self._receive, self._send)
        except Exception as error:
            # ErrorMiddleware has logged it.
            reason = f"{type(error).__name__}: {error}"
        finally:
            self._note(scope)

        if not self._is_over:
            self._call.send(Broken(self._ask.number, reason))

    def _note(self, scope: Scope) -> None:
        """Note in the client's line of the log what its requests to the engines took."""
        inner = scope.get("lmi.exchange")
        if inner is None:
            return

        for name, number in inner.log_fields.items():
            if name.endswith("_tokens"):
                self._outer.log_fields[name] += number
            else:
                # Times are those of the first.
                self._outer.log_fields.setdefault(name, number)

    async def _receive(self) -> Message:
        if not self._is_read:
            self._is_read = True
            return {"type": "http.request", "body": self._ask.body, "more_body": False}

        # A client that leaves cancels the task.
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    async def _send(self, message: Message) -> None:
        number = self._ask.number
        if message["type"] == "http.response.start":
            fields = [(bytes(name), bytes(value)) for name, value in message["headers"]]
            self._call.send(ServerReply(number, message["status"], fields))
            return

        self._is_over = not message.get("more_body", False)
        *chunks, last_chunk = chunks_of(message.get("body", b""))
        for chunk in chunks:
            await self.room.acquire()
            self._call.send(Part(number, chunk, is_last=False))

        await self.room.acquire()
        self._call.send(Part(number, last_chunk, is_last=self._is_over))


def inner_scope(outer: Exchange, ask: AskServer) -> Scope:
    """Return the scope of a request of the app: the client's, with another path and body."""
    scope = {key: value for key, value in outer.scope.items() if key not in OF_EXCHANGE}
    headers = [(name.lower(), value) for name, value in ask.headers]
    names = {name for name, _ in headers}
    if b"x-request-id" not in names:
        headers.append((b"x-request-id", outer.request_id.encode("latin-1")))

    scope["method"] = ask.method
    scope["path"] = ask.path
    scope["raw_path"] = quote(ask.path).encode()
    scope["query_string"] = ask.query
    scope["headers"] = _with_length(headers, len(ask.body))
    scope[OUTER] = outer
    return scope


def _with_length(headers: list[Field], num_bytes: int) -> list[Field]:
    """Return the headers with the length that the body has now, which code may have changed."""
    fields = [(name, value) for name, value in headers if name not in OF_SERVER]
    if num_bytes:
        fields.append((b"content-length", str(num_bytes).encode()))

    return fields


def _is_whole(head: AppStart) -> bool:
    """Whether the answer is no stream: it has no body, or the app has announced its length."""
    if head.status in WITHOUT_BODY:
        return True

    return any(name.lower() == b"content-length" for name, _ in head.headers)
