"""HTTP/1.1 with limits: uvicorn's httptools protocol, with defences against hostile and broken
clients.

httptools parses strictly but has no limits of size or time. Those of size are in `arrival.py`,
those of time here. A refusal is one JSON object, and the connection closes after it.
"""

import asyncio
import logging
import math
import os
import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any, ClassVar, Literal, cast
from urllib.parse import unquote

import httptools
import orjson
from starlette.datastructures import Headers
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from lmi.errors import Overloaded
from lmi.http.arrival import MAX_FIELDS, MAX_UNREPORTED_BYTES, Arrival
from lmi.http.chunk_sizes import size_lines
from lmi.http.cycle import Cycle
from lmi.http.exchange import NUM_ANNOUNCED
from lmi.http.flow import FairFlow
from lmi.http.refusals import Refusal, refusal_headers
from lmi.http.request_head import (
    MAX_HEAD_BYTES,
    check_fields,
    check_line,
    check_target,
    head_bytes,
    large_head,
    other_version,
)
from lmi.http.stalls import ReaderWatch
from lmi.http.websocket_limits import WebSocketLimits

log = logging.getLogger(__name__)

# Of a request line that comes in pieces only so many bytes are examined.
MAX_SPLIT_LINE_BYTES = 1024
MAX_PIPELINED = 16
# How often the speed of a body is checked.
BODY_CHECK_S = 1.0
# A refused client may send for this long before the connection is cut.
LINGER_S = 1.0
# A client whose body was answered early may send the remaining bytes for this long, before it
# reads.
BODY_LINGER_S = 10.0
# Among so many idle connections those are found that have been silent for longest.
MAX_COMPARED = 64
# Descriptors that clients never get: they are for other sockets, and for the files of a model that
# is loaded.
RESERVED_FDS = 40
# A header for browsers: an answer has the content type that its head says.
NO_SNIFFING = (
    b"x-content-type-options",
    b"nosniff",
)


class GuardedProtocol(HttpToolsProtocol):
    """One connection, with limits on how long its head, its body and its client's
    reading may take.
    """

    header_timeout_s: ClassVar[float] = 10.0
    body_timeout_s: ClassVar[float] = 60.0
    stall_timeout_s: ClassVar[float] = 30.0
    # A body may be slower than MIN_BODY_BYTES_PER_S for this long.
    slow_start_s: ClassVar[float] = 10.0
    last_client_fd: ClassVar[int] = max(
        RESERVED_FDS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - RESERVED_FDS
    )
    max_connections: ClassVar[int] = 10_000
    # See WebSocketLimits.
    max_message_bytes: ClassVar[int] = 16 << 20
    max_partial_bytes: ClassVar[int] = 256 << 20
    ping_s: ClassVar[float] = 20.0
    cycle: Cycle
    _reader: ReaderWatch

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The part of a request that comes next.
        self._part: Literal["start", "head", "body"] = "start"
        self._arrival = Arrival()
        # How many requests have begun in the bytes that are being read.
        self._num_begun = 0
        # The requests whose application runs, the oldest first.
        self._unanswered: deque[Cycle] = deque()
        # The beginning of a request line whose end has not come.
        self._line = b""

        # What the timer calls, or has called last.
        self._due: Callable[[], None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._refusal: Refusal | None = None
        self._is_lingering = False
        # When the client sent something last. The loop tells the same time during one turn of it.
        self._last_read_s = 0.0

    # What a subclass may change.

    def is_leaving(self) -> bool:
        """Whether each connection shall end with its next answer, so that its client connects to
        another server.
        """
        return False

    def websocket_at(self, path: str) -> type[Any] | None:
        """Return the protocol of a WebSocket at this path, None where a client may open none."""
        return None

    def rendered(self, refusal: Refusal) -> tuple[bytes, str]:
        """Return the body of a refusal, and the lines of further headers."""
        body = orjson.dumps({"error": str(refusal), "code": refusal.status}) + b"\n"
        return body, ""

    def note_refusal(self, refusal: Refusal) -> None:
        """Log the refusal. No application sees this request, so a subclass counts it here too."""
        peer = self.client[0] if self.client else "a client"
        log.info(
            "refused %s: %d %s", peer, refusal.status, refusal, extra={"status": refusal.status}
        )

    # Connections come.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = FairFlow(transport, self.loop)
        self._reader = ReaderWatch(transport, self.loop, self.stall_timeout_s)
        self._last_read_s = time.monotonic()
        num_to_close = self._num_to_close(transport)
        if num_to_close and not self._make_room(num_to_close):
            self._refuse(Refusal(503, f"{len(self.connections) - 1} connections are busy here"))
        else:
            self._set_deadline()

    def _num_to_close(self, transport: asyncio.Transport) -> int:
        """Return how many other connections this one displaces: none as long as there is room, one
        where there are too many connections.

        It displaces two where only reserved descriptors are free, so that the files for which they
        are reserved get them back. The system gives each file the lowest number that is free, so
        the number that the next one would get says whether any other is left. The connection's own
        number does not: it may have filled a gap below others.
        """
        client_socket = transport.get_extra_info("socket")
        if client_socket is not None and _next_fd(client_socket.fileno()) > self.last_client_fd:
            return 2

        return 1 if len(self.connections) > self.max_connections else 0

    def _make_room(self, num_connections: int) -> bool:
        """Close so many idle connections, so that a health check gets through although idle clients
        hold them all. Returns whether one was closed.

        Those that were silent for longest are closed first, and after all others those that linger,
        since their clients may still read a last answer.
        """
        idle = list(islice(self._idle_connections(), MAX_COMPARED))
        idle.sort(key=lambda connection: (connection._is_lingering, connection._last_read_s))

        for connection in idle[:num_connections]:
            connection.transport.abort()

        return bool(idle)

    def _idle_connections(self) -> Iterator["GuardedProtocol"]:
        for connection in self.connections:
            if connection is self or not isinstance(connection, GuardedProtocol):
                continue

            if connection._is_idle():
                yield connection

    def _is_idle(self) -> bool:
        """Whether no request runs or waits here, and no answer is on its way. A part of a head may
        have come.
        """
        is_busy = self._unanswered or self.transport.get_write_buffer_size()
        return not (is_busy or self.transport.is_closing())

    # Bytes in.

    def data_received(self, data: bytes) -> None:
        self._last_read_s = time.monotonic()
        if self._refusal is not None or self._is_lingering:
            # Its bytes are dropped. It waits for its turn to read on, since the loop would read
            # megabytes at once from a fast client.
            self.flow.pause_reading()
            self.flow.resume_reading()
            return

        self._unset_keepalive_if_required()
        began_in = self._part
        self._num_begun = 0
        try:
            self._check_line(data)
            self._feed(data)
            if self.transport.get_protocol() is not self:
                # It is a WebSocket now.
                return

            # If these bytes belong to one request alone, its part is known, and its limits hold.
            if self._num_begun == (began_in == "start"):
                self._check_fed(len(data))
        except (Refusal, httptools.HttpParserError) as error:
            self._refuse(_refusal_of(error))
            return

        self._set_deadline()
        self._pause_if_full()

    def _pause_if_full(self) -> None:
        """Read no more while many requests, or many bytes of them, wait for the first one's answer.

        This is the last step of a read, because a connection that is not read does not show its
        end.
        """
        num_waiting_bytes = 0
        for cycle in islice(self._unanswered, 1, None):
            num_waiting_bytes += cycle.num_head_bytes + len(cycle.body)

        if len(self.pipeline) == MAX_PIPELINED or num_waiting_bytes > HIGH_WATER_LIMIT:
            self.flow.pause_reading()

    def _check_line(self, data: bytes) -> None:
        """Refuse two spaces in a request line.

        They pass in a line that follows another request in the same bytes: the parser does not say
        where such a line begins.
        """
        if not self._line and self._part != "start":
            return

        self._line += data
        check_line(self._line)
        is_whole = b"\n" in self._line.lstrip(b"\r\n")
        if is_whole or len(self._line) > MAX_SPLIT_LINE_BYTES:
            self._line = b""

    def _check_fed(self, num_bytes: int) -> None:
        """Refuse what the parser takes in without a callback: a field of the head without an end,
        and long extensions of chunks.
        """
        arrival = self._arrival
        arrival.num_fed_bytes += num_bytes
        if self._part == "head":
            if arrival.num_fed_bytes > MAX_HEAD_BYTES:
                raise large_head()
        elif arrival.has_many_unreported:
            # Its body is at fault, also if it has just come whole: no application has read it.
            self._part = "body"
            raise Refusal(
                400,
                f"a request has at most {MAX_UNREPORTED_BYTES} bytes of chunk extensions and "
                f"blanks",
            )

    def _feed(self, data: bytes) -> None:
        """Parse the bytes. A request that offers an upgrade, and gets none, is parsed again without
        the offer.

        Some clients (Java's, h2c) offer one with every first request. The parser stops behind such
        a head, and would take the body for another protocol.
        """
        while data:
            try:
                self._parse(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if self._begin_websocket(data[upgrade.args[0] :]):
                    return

                fields = [field for field in self.headers if field[0] != b"upgrade"]
                head = head_bytes(self.parser.get_method(), self.url, fields)
                data = head + data[upgrade.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                # uvicorn sets it too.
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)

    def _begin_websocket(self, rest: bytes) -> bool:
        """Hand the connection over if the request asks for a WebSocket at a path that has one.
        Returns whether it did. Raises Refusal, also for a client that has sent more than the head.
        """
        fields = Headers(raw=self.headers)
        has_body = "content-length" in fields or "transfer-encoding" in fields
        is_websocket = fields.get("upgrade", "").lower() == "websocket"
        if not is_websocket or has_body or self._unanswered:
            return False

        check_fields(self.parser.get_http_version(), fields)
        self._complete_scope()
        is_get = self.scope["method"] == "GET" and self.scope["http_version"] == "1.1"
        protocol = self.websocket_at(self.scope["path"])
        if not is_get or protocol is None:
            return False

        if rest:
            raise Refusal(400, "the messages of a WebSocket come after the server's answer")

        max_websockets = min(self.max_connections, self.last_client_fd) // 2
        if protocol.num_open >= max_websockets:
            raise Refusal(503, f"{max_websockets} WebSockets are open here")

        limits = WebSocketLimits(
            self.max_message_bytes,
            self.max_partial_bytes,
            self.body_timeout_s,
            self.stall_timeout_s,
            self.ping_s,
        )
        websocket = protocol(self.config, self.server_state, self.app_state, self.loop, limits)
        self._set_timer(None)
        self.connections.discard(self)
        self.transport.set_protocol(websocket)
        target = self.scope["raw_path"]
        if self.scope["query_string"]:
            target += b"?" + self.scope["query_string"]

        websocket.take_over(self.transport, head_bytes(b"GET", target, self.headers))
        return True

    def _parse(self, data: bytes) -> None:
        """Parse bytes, and announce a large chunk to the application as soon as its size has come.

        The parser first gets a line that may be a size, without the line's last byte, and then that
        byte alone: if a chunk begins with it, the line was a size, else a text in the body. The
        chunk of a size that was missed counts as its bytes come.

        Raises HttpParserUpgrade with the offset from the beginning of `data`.
        """
        is_body = self._part == "body"
        if is_body:
            may_have_chunks = self.cycle.is_chunked
        else:
            may_have_chunks = data.find(b"hunked", 0, MAX_HEAD_BYTES) >= 0

        if not may_have_chunks:
            self.parser.feed_data(data)
            return

        begin = 0
        try:
            for line in size_lines(data, begins_in_body=is_body):
                self.parser.feed_data(data[begin : line.end])
                begin = line.end

                num_chunks_before = self._arrival.num_chunks
                self.parser.feed_data(data[begin : begin + 1])
                begin += 1
                if self._arrival.num_chunks > num_chunks_before:
                    self._announce(line.size)

            if begin < len(data):
                self.parser.feed_data(data[begin:])
        except httptools.HttpParserUpgrade as upgrade:
            raise httptools.HttpParserUpgrade(begin + upgrade.args[0]) from None

    def _announce(self, num_bytes: int) -> None:
        """Tell the application that a chunk of so many bytes comes, so that it can refuse a body
        that will be too large.
        """
        scope = cast(dict[str, Any], self.cycle.scope)
        scope[NUM_ANNOUNCED] = self._arrival.num_body_bytes + num_bytes
        self.cycle.message_event.set()

    # What the parser calls.

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._part = "head"
        self._arrival = Arrival()
        self._num_begun += 1

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._arrival.count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._arrival.count_head(len(name) + len(value) + 4)
        if self._part == "body":
            # A trailer must not pass for a field of the head.
            self._arrival.count_trailer()
            return

        super().on_header(name, value)
        if len(self.headers) > MAX_FIELDS:
            raise Refusal(431, f"a request has at most {MAX_FIELDS} header fields")

    def on_headers_complete(self) -> None:
        if self.parser.get_method() == b"CONNECT":
            raise Refusal(405, "this is no proxy")

        if self.parser.should_upgrade():
            # `_feed` parses the request again.
            return

        fields = Headers(raw=self.headers)
        check_fields(self.parser.get_http_version(), fields)
        self._complete_scope()
        self._part = "body"
        self._begin_request(int(fields.get("content-length", sys.maxsize)))
        self.cycle.is_chunked = "transfer-encoding" in fields
        if len(self.pipeline) > MAX_PIPELINED:
            raise Refusal(400, f"at most {MAX_PIPELINED} requests may wait on one connection")

    def _complete_scope(self) -> None:
        """Fill the scope from the request line."""
        method = self.parser.get_method().decode("ascii")
        url = httptools.parse_url(self.url)
        check_target(method, url)

        # A URL may have none.
        path = url.path or b"/"
        self.scope["method"] = method
        self.scope["http_version"] = self.parser.get_http_version()
        self.scope["path"] = unquote(path.decode("ascii"))
        self.scope["raw_path"] = path
        self.scope["query_string"] = url.query or b""

    def _begin_request(self, num_body_bytes: int) -> None:
        """Run the application, or queue the request behind the one that the application
        works on.
        """
        is_http_1_1 = self.scope["http_version"] == "1.1"
        previous = self.cycle
        self.cycle = Cycle(
            scope=self.scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            # The application writes the access log.
            access_log=False,
            default_headers=[*self.server_state.default_headers, NO_SNIFFING],
            message_event=asyncio.Event(),
            expect_100_continue=self.expect_100_continue and is_http_1_1,
            keep_alive=is_http_1_1 and self.parser.should_keep_alive(),
            on_response=self.on_response_complete,
        )
        self.cycle.is_leaving = self.is_leaving
        self.cycle.num_head_bytes = self._arrival.num_head_bytes
        self.cycle.num_missing_bytes = num_body_bytes

        self._unanswered.append(self.cycle)
        if previous is None or previous.response_complete:
            self._start_asgi_task(self.cycle, self.app)
        else:
            self.pipeline.appendleft((self.cycle, self.app))

    def on_chunk_header(self) -> None:
        self._arrival.count_chunk()

    def on_body(self, body: bytes) -> None:
        self._arrival.num_body_bytes += len(body)
        self.cycle.num_missing_bytes -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return

        self._part = "start"
        super().on_message_complete()

    # Deadlines.

    def _set_deadline(self) -> None:
        """Set the deadline of the head or the body that comes next. Called after each read."""
        is_idle = self.cycle is None or self.cycle.response_complete
        if self._part == "body":
            due = self._check_body_speed
            delay_s = BODY_CHECK_S
        elif self._part == "head" or is_idle:
            due = self._refuse_late_head
            delay_s = self.header_timeout_s
        else:
            due = None
            delay_s = 0.0

        if due != self._due:
            self._set_timer(due, delay_s)

    def _set_timer(self, due: Callable[[], None] | None, delay_s: float = 0.0) -> None:
        """Call `due` after `delay_s`, and no longer what was due before."""
        if self._timer is not None:
            self._timer.cancel()

        self._due = due
        self._timer = None if due is None else self.loop.call_later(delay_s, due)

    def _refuse_late_head(self) -> None:
        self._refuse(
            Refusal(408, f"no complete request head came within {self.header_timeout_s:g} s")
        )

    def _check_body_speed(self) -> None:
        if self._part != "body":
            self._set_timer(None)
            return

        arrival = self._arrival
        # While the connection is not read, the server is slow, not the client.
        if not self.flow.read_paused and not self.cycle.waiting_for_100_continue:
            arrival.body_s += BODY_CHECK_S

        is_slow = arrival.body_s > self.slow_start_s and arrival.is_slow
        if is_slow or arrival.body_s >= self.body_timeout_s:
            self._refuse(
                Refusal(408, f"the request body came too slowly, it has {self.body_timeout_s:g} s")
            )
        else:
            self._set_timer(self._check_body_speed, BODY_CHECK_S)

    # Answers and refusals.

    def pause_writing(self) -> None:
        """Note that the client reads too slowly. If it reads nothing for `stall_timeout_s`, the
        connection is cut.
        """
        super().pause_writing()
        self._reader.begin()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._reader.end()

    def _refuse(self, refusal: Refusal) -> None:
        """Answer the refusal and close, after the answers to earlier requests of this
        connection.
        """
        if self._refusal is not None or self.transport.is_closing():
            return

        self._refusal = refusal
        self._set_timer(None)
        if self._part == "body" and not self.cycle.response_complete:
            # The body of this request is at fault.
            self._unanswered.pop().note_departure()
            self._unqueue(self.cycle)

        # Else `on_response_complete` answers it later.
        if not self._unanswered:
            self._answer_refusal(refusal)

    def _unqueue(self, cycle: Cycle) -> None:
        """Drop the last request from those that wait for the application, if it is among them."""
        if self.pipeline:
            newest_cycle, _ = self.pipeline[0]
            if newest_cycle is cycle:
                self.pipeline.popleft()

    def _answer_refusal(self, refusal: Refusal) -> None:
        if self._part == "body" and self.cycle.response_started:
            # An answer to this request has already begun.
            self.transport.close()
            self._set_timer(self.transport.abort, LINGER_S)
            return

        self.note_refusal(refusal)
        body, lines = self.rendered(refusal)
        if refusal.status == 503:
            for name, text in refusal_headers(Overloaded()).items():
                lines += f"{name.lower()}: {text}\r\n"

        head = (
            f"content-type: application/json\r\n"
            f"content-length: {len(body)}\r\n"
            f"{lines}"
            f"x-content-type-options: nosniff\r\n"
            f"connection: close\r\n"
            f"\r\n"
        )
        self.transport.write(STATUS_LINE[refusal.status] + head.encode() + body)
        self._linger(LINGER_S)

    def _linger(self, linger_s: float) -> None:
        """Read on for so long, then close. To close with unread bytes would reset the connection,
        and the client would lose its answer.
        """
        self._is_lingering = True
        self._unset_keepalive_if_required()
        self.flow.resume_reading()
        # TLS has no such end.
        if self.transport.can_write_eof():
            # The client may be gone already.
            with suppress(OSError):
                self.transport.write_eof()

        self._set_timer(self.transport.abort, linger_s)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._unanswered.popleft()
        if self.transport.is_closing():
            self._watch_last_answer()
            return

        if self.cycle.is_early:
            self._linger(BODY_LINGER_S)
        elif self._refusal is not None and not self._unanswered:
            self._answer_refusal(self._refusal)

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._watch_last_answer()

    def _watch_last_answer(self) -> None:
        """Watch the reader of an answer behind which the transport closes, once all is read."""
        # While writing is paused, the reader is watched already.
        if self in self.connections and not self.flow.write_paused:
            self._reader.begin()

    def connection_lost(self, exc: Exception | None) -> None:
        self._set_timer(None)
        self.resume_writing()
        for cycle in self._unanswered:
            cycle.note_departure()

        super().connection_lost(exc)


def _next_fd(fd: int) -> float:
    """Return the number that the next file of this process gets, infinity if it can have none.

    `fd` is any open file.
    """
    try:
        next_fd = os.dup(fd)
    except OSError:
        return math.inf

    os.close(next_fd)
    return next_fd


def _refusal_of(error: Exception) -> Refusal:
    """Return the refusal that a callback raised, or the one for bytes that httptools could not
    parse. Of the parser's messages only those about the version are useful.
    """
    for cause in (error, error.__context__):
        if isinstance(cause, Refusal):
            return cause

    if "Invalid HTTP version" in str(error) or "PRI" in str(error):
        return other_version()

    return Refusal(400, "this is no HTTP/1.1 request")
