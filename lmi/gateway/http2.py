"""HTTP/2 with limits: connections, and the requests on them for an ASGI application.

The package `h2` reads and writes the frames. It is the one of python-hyper that httpx and hypercorn
build on, is pure Python, does no I/O of its own, and leaves flow control to its user, which bounds
here what each side must hold. Neither uvicorn nor gunicorn speaks HTTP/2.

Source: RFC 9113.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from socket import socket as Listener
from ssl import SSLContext
from typing import Any
from urllib.parse import unquote

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    PingReceived,
    PriorityUpdated,
    RemoteSettingsChanged,
    RequestReceived,
    StreamEnded,
    StreamReset,
    WindowUpdated,
)
from h2.exceptions import ProtocolError
from starlette.types import ASGIApp, Message, Scope

from lmi.errors import ClientGone
from lmi.http.stalls import ReaderWatch

# Of all streams of a connection, whose requests may have so many unread bytes together. Each alone
# has h2's 64 KiB.
CONNECTION_WINDOW_BYTES = 1 << 20
MAX_CONNECTIONS = 1000
# Frames that cost the server something and carry nothing: of one connection so many within
# FLOOD_S.
MAX_IDLE_FRAMES = 1000
FLOOD_S = 10.0
# The time for a connection's first request, and for the next ones.
FIRST_REQUEST_S = 10.0
IDLE_S = 120.0
HANDSHAKE_S = 10.0
# A client must take what waits for it within this time.
STALL_S = 30.0
# The time for requests that are still open when the server ends.
LEAVE_S = 5.0
# The time in which requests that are open even then tell their clients of the end.
FAREWELL_S = 1.0
H2 = "h2"

log = logging.getLogger(__name__)


@asynccontextmanager
async def serving(app: ASGIApp, listener: Listener, tls: SSLContext | None) -> AsyncIterator[None]:
    """Serve connections in the block. With `tls` they must choose HTTP/2 by ALPN, without it they
    begin with it.
    """
    connections: set[Http2Connection] = set()
    options: dict[str, Any] = {}
    if tls is not None:
        options = {"ssl": tls, "ssl_handshake_timeout": HANDSHAKE_S}

    server = await asyncio.get_running_loop().create_server(
        lambda: Http2Connection(app, connections), sock=listener, **options
    )
    try:
        yield
    finally:
        server.close()
        tasks = [task for connection in connections for task in connection.tasks]
        for connection in list(connections):
            connection.leave()

        if tasks:
            _, unfinished = await asyncio.wait(tasks, timeout=LEAVE_S)
            await _cancel(unfinished)

        for connection in list(connections):
            connection.cut()


async def _cancel(tasks: Collection[asyncio.Task[None]]) -> None:
    """Cancel requests, and let them say so to their clients."""
    for task in tasks:
        task.cancel()

    if tasks:
        await asyncio.wait(tasks, timeout=FAREWELL_S)


class Http2Connection(asyncio.Protocol):
    """One connection, in the set of all of them while it is open."""

    def __init__(self, app: ASGIApp, connections: "set[Http2Connection]") -> None:
        self.tasks: set[asyncio.Task[None]] = set()
        self._app = app
        self._connections = connections
        self._loop = asyncio.get_running_loop()

        self._h2 = H2Connection(H2Configuration(client_side=False))
        self._streams: dict[int, Http2Stream] = {}
        self._transport: asyncio.Transport
        self._reader: ReaderWatch
        # Whether the client reads what is written.
        self._is_writable = True
        # Whether no further request is taken.
        self._is_leaving = False

        # Closes the connection while it has no request.
        self._idle_timer: asyncio.TimerHandle | None = None
        self._num_idle_frames = 0
        self._counted_since_s = self._loop.time()

    # The transport's side.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self._reader = ReaderWatch(transport, self._loop, STALL_S)
        tls = transport.get_extra_info("ssl_object")
        is_refused = tls is not None and tls.selected_alpn_protocol() != H2
        if is_refused or len(self._connections) >= MAX_CONNECTIONS:
            transport.abort()
            return

        self._connections.add(self)
        self._h2.initiate_connection()
        self._h2.increment_flow_control_window(
            CONNECTION_WINDOW_BYTES - self._h2.inbound_flow_control_window
        )
        self._flush()
        self._set_idle_timer(FIRST_REQUEST_S)

    def data_received(self, data: bytes) -> None:
        try:
            events = self._h2.receive_data(data)
        except ProtocolError as error:
            # h2 has written what the client is told.
            log.info("a connection of HTTP/2 broke a rule: %s", error)
            self._close()
            return

        for event in events:
            if self._transport.is_closing():
                return

            self._take(event)

        self._flush()

    def pause_writing(self) -> None:
        """Note that the client reads too slowly. It is not read either, because it would get an
        answer to each of its pings.
        """
        self._is_writable = False
        self._transport.pause_reading()
        self._reader.begin()

    def resume_writing(self) -> None:
        self._is_writable = True
        self._reader.end()
        self._transport.resume_reading()
        self._wake(0)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self._reader.end()
        self._set_idle_timer(None)
        self._note_departure()

    def _note_departure(self) -> None:
        for stream in self._streams.values():
            stream.note_departure()

    # What the client does.

    def _take(self, event: Event) -> None:
        match event:
            case RequestReceived():
                self._begin(event)
            case DataReceived():
                self._take_data(event)
            case StreamEnded(stream_id=stream_id):
                if stream_id in self._streams:
                    self._streams[stream_id].end_request()

            case StreamReset(stream_id=stream_id):
                self._count_idle_frame()
                if stream_id in self._streams:
                    self._streams[stream_id].note_departure()

            case WindowUpdated(stream_id=stream_id):
                self._wake(stream_id or 0)
            case RemoteSettingsChanged():
                self._count_idle_frame()
                self._wake(0)
            case PingReceived() | PriorityUpdated():
                self._count_idle_frame()

            case ConnectionTerminated():
                # h2 sends nothing more.
                self._close()

    def _begin(self, event: RequestReceived) -> None:
        if self._is_leaving:
            self._h2.reset_stream(event.stream_id, ErrorCodes.REFUSED_STREAM)
            return

        scope = _scope(event.headers, self._transport)
        stream = Http2Stream(self, event.stream_id, scope)
        self._streams[stream.id] = stream
        self._set_idle_timer(None)

        task = self._loop.create_task(self._run(stream))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def _take_data(self, event: DataReceived) -> None:
        if not event.data and event.stream_ended is None:
            self._count_idle_frame()

        stream = self._streams.get(event.stream_id)
        if stream is None:
            self.give_back(event.stream_id, event.flow_controlled_length)
        else:
            stream.feed(event.data, event.flow_controlled_length)

    def _count_idle_frame(self) -> None:
        """End the connection of a client that sends too many of them."""
        now_s = self._loop.time()
        if now_s - self._counted_since_s > FLOOD_S:
            self._counted_since_s = now_s
            self._num_idle_frames = 0

        self._num_idle_frames += 1
        if self._num_idle_frames > MAX_IDLE_FRAMES:
            self._h2.close_connection(ErrorCodes.ENHANCE_YOUR_CALM)
            self._close()

    async def _run(self, stream: "Http2Stream") -> None:
        """Let the application answer a request."""
        try:
            await self._app(stream.scope, stream.receive, stream.send)
        except ClientGone:
            # The application has done with it.
            pass
        except Exception:
            log.exception("a request of HTTP/2 failed")
        finally:
            self._forget(stream)

    def _forget(self, stream: "Http2Stream") -> None:
        del self._streams[stream.id]
        if self._transport.is_closing():
            return

        self.give_back(stream.id, stream.take_unread())
        if not stream.is_gone and not stream.is_complete:
            code = ErrorCodes.NO_ERROR if stream.is_answered else ErrorCodes.INTERNAL_ERROR
            self._h2.reset_stream(stream.id, code)

        self._flush()
        self._close_if_done()

    # For the streams.

    def room(self, stream_id: int) -> int:
        """Return how many bytes of an answer can be sent now."""
        if not self._is_writable:
            return 0

        window = self._h2.local_flow_control_window(stream_id)
        return min(window, self._h2.max_outbound_frame_size)

    def send_head(self, stream_id: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Send the head of an answer."""
        self._h2.send_headers(stream_id, headers)
        self._flush()

    def send_data(self, stream_id: int, data: bytes, is_last: bool) -> None:
        """Send a part of an answer, for which there is room."""
        self._h2.send_data(stream_id, data, end_stream=is_last)
        self._flush()

    def give_back(self, stream_id: int, num_bytes: int) -> None:
        """Let the client send so many further bytes, because as many are read."""
        if num_bytes and not self._transport.is_closing():
            self._h2.acknowledge_received_data(num_bytes, stream_id)
            self._flush()

    # The end.

    def leave(self) -> None:
        """Take no further requests, and end after those that are open."""
        self._is_leaving = True
        self._close_if_done()

    def cut(self) -> None:
        """End at once, unless what is written already is the end."""
        for task in self.tasks:
            task.cancel()

        if not self._transport.is_closing():
            self._transport.abort()

    def _close_if_done(self) -> None:
        if self._streams or self._transport.is_closing():
            return

        if self._is_leaving:
            self._h2.close_connection()
            self._close()
        else:
            self._set_idle_timer(IDLE_S)

    def _set_idle_timer(self, delay_s: float | None) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()

        self._idle_timer = None
        if delay_s is not None:
            self._idle_timer = self._loop.call_later(delay_s, self.leave)

    def _close(self) -> None:
        """Close, after what is written already. h2 sends nothing more."""
        self._flush()
        self._transport.close()
        self._note_departure()

    def _flush(self) -> None:
        data = self._h2.data_to_send()
        if data and not self._transport.is_closing():
            self._transport.write(data)

    def _wake(self, stream_id: int) -> None:
        """Let a stream look again whether it can send, all of them with 0."""
        for stream in list(self._streams.values()):
            if stream_id in (0, stream.id):
                stream.wake()


class Http2Stream:
    """One request and its answer, which an application reads and writes as ASGI says."""

    def __init__(self, connection: Http2Connection, id: int, scope: Scope) -> None:
        self.id = id
        self.scope = scope
        self.is_gone = False
        self.is_answered = False
        self._connection = connection

        self._received = bytearray()
        # What they count in the windows, which padding does too.
        self._num_unread_bytes = 0
        # Whether the request has come whole, and the application has it.
        self._has_ended = False
        self._is_read = False
        self._changed = asyncio.Event()

    @property
    def is_complete(self) -> bool:
        """Whether both the request and the answer are whole."""
        return self._has_ended and self.is_answered

    # The connection's side.

    def feed(self, data: bytes, num_counted_bytes: int) -> None:
        self._received += data
        self._num_unread_bytes += num_counted_bytes
        self._changed.set()

    def end_request(self) -> None:
        self._has_ended = True
        self._changed.set()

    def note_departure(self) -> None:
        """Note that the client wants no answer, or is lost."""
        self.is_gone = True
        self._changed.set()

    def wake(self) -> None:
        self._changed.set()

    def take_unread(self) -> int:
        """Return the bytes in the windows that the application has read, or will not read."""
        num_bytes = self._num_unread_bytes
        self._num_unread_bytes = 0
        return num_bytes

    # The application's side.

    async def receive(self) -> Message:
        """Return what has come of the request, or that the client has left."""
        while not self.is_gone and (self._is_read or not (self._received or self._has_ended)):
            await self._wait()

        if self.is_gone:
            return {"type": "http.disconnect"}

        body = bytes(self._received)
        self._received.clear()
        self._is_read = self._has_ended
        self._connection.give_back(self.id, self.take_unread())
        return {"type": "http.request", "body": body, "more_body": not self._has_ended}

    async def send(self, message: Message) -> None:
        """Send a part of the answer, as soon as the client has room for it. Raises ClientGone."""
        if self.is_gone:
            raise ClientGone("the client left before its answer was complete")

        if message["type"] == "http.response.start":
            status = str(message["status"]).encode()
            self._connection.send_head(self.id, [(b":status", status), *message["headers"]])
            return

        await self._send_data(message.get("body", b""))
        if not message.get("more_body", False):
            self._connection.send_data(self.id, b"", is_last=True)
            self.is_answered = True

    async def _send_data(self, data: bytes) -> None:
        begin = 0
        while begin < len(data):
            end = begin + await self._wait_for_room()
            self._connection.send_data(self.id, data[begin:end], is_last=False)
            begin = end

    async def _wait_for_room(self) -> int:
        """Return how many bytes can be sent. Raises ClientGone, also where the client takes
        nothing for too long.
        """
        try:
            async with asyncio.timeout(STALL_S):
                while not self.is_gone:
                    num_bytes = self._connection.room(self.id)
                    if num_bytes > 0:
                        return num_bytes

                    await self._wait()
        except TimeoutError:
            pass

        raise ClientGone("the client takes nothing of its answer")

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()


def _scope(headers: list[Any], transport: asyncio.Transport) -> Scope:
    """Return the scope of a request. A name of its head that begins with a colon is no header."""
    pseudo_headers: dict[bytes, bytes] = {}
    fields: list[tuple[bytes, bytes]] = []
    for name, value in headers:
        if name.startswith(b":"):
            pseudo_headers[name] = value
        elif name != b"host":
            fields.append((name, value))
        else:
            pseudo_headers.setdefault(b":authority", value)

    target = pseudo_headers.get(b":path", b"/")
    path, _, query = target.partition(b"?")
    peer = transport.get_extra_info("peername")
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "2",
        "scheme": pseudo_headers.get(b":scheme", b"http").decode("latin-1"),
        "method": pseudo_headers[b":method"].decode("latin-1"),
        "path": unquote(path.decode("latin-1")),
        "raw_path": path,
        "query_string": query,
        "headers": [(b"host", pseudo_headers.get(b":authority", b"")), *fields],
        "client": peer[:2] if peer else None,
        "server": None,
    }
