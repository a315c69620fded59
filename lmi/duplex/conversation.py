"""What happens on a WebSocket: each message is a request, and the records of its answer are
messages.

A message goes through the application as if it had been posted, with the headers of the request
that opened the WebSocket. So it is counted, limited, refused and logged as every other.

    {"id": "a", "status": 200, "headers": {"content-type": …}}     an answer begins
    {"id": "a", "data": {"token": …}}                              a record of it
    {"id": "a", "end": "complete"}                                 its end

An answer to a message without an id has only its records, and waits for those to earlier ones.
"""

import asyncio
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Scope

from lmi.duplex.messages import BodyMessage, CancelMessage, Field, read
from lmi.duplex.paths import path_of_requests, takes_websocket
from lmi.duplex.records import DONE, Records, as_json, with_status
from lmi.duplex.socket import Socket
from lmi.errors import InvalidParameter, Overloaded
from lmi.http.exchange import NUM_ANNOUNCED, REQUEST_ID, REQUEST_IDS, WEBSOCKET, Exchange
from lmi.server.service import Models

# How many messages of one connection are answered at once, and how many of those that are refused
# may wait to be told.
MAX_RUNNING = 64
MAX_REFUSED = 64
# A connection on which nothing runs and no message comes is closed after so long.
IDLE_S = 600.0
# Close codes. Source: RFC 6455, 7.4.1.
GOING_AWAY = 1001
POLICY_VIOLATION = 1008
INTERNAL_ERROR = 1011
# What the request that opened the WebSocket says of itself alone.
OF_HANDSHAKE = (
    b"connection",
    b"content-length",
    b"upgrade",
    *(name.encode() for name in REQUEST_IDS),
)
OF_EXCHANGE = ("lmi.exchange", "lmi.meters", "subprotocols", NUM_ANNOUNCED, WEBSOCKET)


async def converse(exchange: Exchange, models: Models) -> None:
    """Accept a WebSocket, and answer until it ends. Raises HTTPException or LmiError before."""
    if not takes_websocket(exchange.path):
        raise HTTPException(404)

    models.front_end.check_serves()
    if models.keeps_only_one:
        models.require_only()

    socket: Socket = exchange.scope[WEBSOCKET]
    conversation = Duplex(exchange, socket)
    await socket.accept([(REQUEST_ID.encode(), exchange.request_id.encode())])
    exchange.status = 101
    await conversation.run()


class Duplex:
    """One WebSocket, and the messages that are answered on it."""

    def __init__(self, exchange: Exchange, socket: Socket, idle_s: float = IDLE_S) -> None:
        self._exchange = exchange
        self._socket = socket
        self._app: ASGIApp = exchange.scope["app"]

        self._running: dict[asyncio.Task[None], MessageCall] = {}
        # Set when the last message without an id is answered.
        self._last_answered = asyncio.Event()
        self._last_answered.set()

        self._idle_s = idle_s
        # Ends the conversation when nothing runs.
        self._limit = asyncio.timeout(idle_s)

        self._is_leaving = False
        self._is_open = False
        socket.on_leave = self._leave

    async def run(self) -> None:
        try:
            async with self._limit:
                await self._take_all()
        except TimeoutError:
            reason = f"nothing came for {self._idle_s:g} s"
            if self._is_leaving:
                reason = "the server shuts down"

            await self._socket.close(GOING_AWAY, reason)
        finally:
            for call in self._running.values():
                call.cancel()

            if self._running:
                await asyncio.wait(self._running)

    async def _take_all(self) -> None:
        self._is_open = True
        self._set_limit()
        try:
            while (message := await self._socket.receive()) is not None:
                if len(self._running) == MAX_RUNNING + MAX_REFUSED:
                    rule = f"more than {len(self._running)} messages wait for an answer"
                    await self._socket.close(POLICY_VIOLATION, rule)
                    return

                self._take(message)
                # Many small messages come at once, and others have their turns meanwhile.
                await asyncio.sleep(0)
        finally:
            self._is_open = False

    def _leave(self) -> None:
        self._is_leaving = True
        self._set_limit()

    def _set_limit(self) -> None:
        """Let the conversation end when it has nothing to do."""
        if not self._is_open or self._limit.expired():
            return

        delay_s = 0.0 if self._is_leaving else self._idle_s
        due_s = asyncio.get_running_loop().time() + delay_s
        self._limit.reschedule(None if self._running else due_s)

    def _take(self, message: bytes) -> None:
        match read(message):
            case CancelMessage(id=id):
                for call in self._running.values():
                    if call.id == id:
                        call.cancel()

            case BodyMessage() as request:
                self._begin(request)

    def _begin(self, message: BodyMessage) -> None:
        self._exchange.log_fields["num_messages"] += 1
        call = MessageCall(self._checked(message), self._scope(message), self._socket)
        if message.id is None:
            call.turn = self._last_answered
            self._last_answered = call.is_answered

        task = asyncio.create_task(call.run(self._app))
        self._running[task] = call
        task.add_done_callback(self._forget)
        self._set_limit()

    def _forget(self, task: asyncio.Task[None]) -> None:
        del self._running[task]
        self._set_limit()

    def _checked(self, message: BodyMessage) -> BodyMessage:
        """Return what is asked, or why it is refused."""
        if len(self._running) >= MAX_RUNNING:
            rule = f"at most {MAX_RUNNING} messages of one connection are answered at once"
            return BodyMessage(id=message.id, fault=Overloaded(rule))

        ids = {call.id for call in self._running.values()}
        if message.id is not None and message.id in ids:
            rule = "one that no message has that is answered now"
            return BodyMessage(id=message.id, fault=InvalidParameter("id", rule, message.id))

        return message

    def _scope(self, message: BodyMessage) -> Scope:
        """Return the scope of a request: that of the WebSocket, with the message as its body."""
        outer = self._exchange.scope
        scope = {key: value for key, value in outer.items() if key not in OF_EXCHANGE}
        path = path_of_requests(outer["path"])
        scope["method"] = "POST"
        scope["path"] = path
        scope["raw_path"] = path.encode()
        scope["headers"] = _headers(self._exchange, message)
        return scope


def _headers(exchange: Exchange, message: BodyMessage) -> list[Field]:
    """Return the headers of a message: those of the WebSocket, with its own in their place."""
    own = {name for name, _ in message.headers}
    headers = []
    for name, value in exchange.headers.raw:
        is_of_handshake = name in OF_HANDSHAKE or name.startswith(b"sec-websocket-")
        if not is_of_handshake and name not in own:
            headers.append((name, value))

    headers += message.headers
    if "content-type" not in exchange.headers:
        headers.append((b"content-type", b"application/json"))

    headers.append((b"content-length", str(len(message.body)).encode()))
    return headers


class MessageCall:
    """One message, as a request of the application."""

    def __init__(self, message: BodyMessage, scope: Scope, socket: Socket) -> None:
        self.id = message.id
        self._fault = message.fault
        # The body until it is read.
        self._body: bytes | None = message.body
        self._scope = scope
        self._socket = socket

        # What the first record of the answer waits for.
        self.turn: asyncio.Event | None = None
        self.is_answered = asyncio.Event()
        self._gone = asyncio.Event()

        self._status = 0
        self._records = Records("", is_whole=True)
        self._is_over = False

    def cancel(self) -> None:
        """Let the application see that nobody waits for the answer."""
        self._gone.set()

    async def run(self, app: ASGIApp) -> None:
        try:
            await app(self._scope, self._receive, self._send)
        except Exception:
            # ErrorMiddleware has logged it.
            self._is_over = False

        try:
            await self._end()
        finally:
            self.is_answered.set()

    async def _receive(self) -> Message:
        if self._fault is not None:
            raise self._fault

        if self._body is not None:
            body = self._body
            self._body = None
            return {"type": "http.request", "body": body, "more_body": False}

        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            await self._start(message["status"], message["headers"])
            return

        records = self._records.feed(message.get("body", b""))
        if not message.get("more_body", False):
            self._is_over = True
            records += self._records.end()

        for record in records:
            await self._write(record)

    async def _start(self, status: int, headers: list[Field]) -> None:
        fields = {}
        for name, value in headers:
            fields[name.decode("latin-1").lower()] = value.decode("latin-1")

        self._status = status
        self._records = Records(fields.get("content-type", ""), is_whole="content-length" in fields)
        if self.turn is not None:
            await self.turn.wait()

        if self.id is not None:
            await self._say(status=status, headers=fields)

    async def _write(self, record: bytes) -> None:
        if self.id is None:
            is_error = self._status >= 400 and self._is_over
            await self._socket.send(with_status(record, self._status) if is_error else record)
        elif record != DONE:
            await self._socket.send(
                b'{"id":%b,"data":%b}' % (orjson.dumps(self.id or None), as_json(record))
            )

    async def _end(self) -> None:
        """Tell how the answer ended. Without an id only the end of the connection tells that it is
        cut.
        """
        end = "cut"
        if self._is_over:
            end = "complete"
        elif self._gone.is_set():
            end = "cancelled"

        if self.id is not None:
            await self._say(end=end)
        elif end == "cut":
            await self._socket.close(INTERNAL_ERROR, "an answer failed, see the server's log")

    async def _say(self, **fields: Any) -> None:
        await self._socket.send(orjson.dumps({"id": self.id or None, **fields}))
