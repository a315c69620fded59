"""HTTP/1.1 with limits: uvicorn's httptools protocol, with defences against hostile and broken clients.

httptools parses strictly but has no limits of size or time. A refusal is one JSON object, and the connection closes
after it. Sources: RFC 9112 and RFC 9110; the limits are those of edge proxies.
"""

import asyncio
import fcntl
import logging
import re
import resource
import sys
import termios
from collections.abc import Awaitable, Callable
from contextlib import suppress
from http import HTTPStatus
from typing import Any, ClassVar
from urllib.parse import unquote

import httptools
import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from lmi.errors import shorten
from lmi.http.exchange import SENT
from lmi.http.flow import FairFlow

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 << 10
MAX_FIELDS = 128
MAX_CHUNKS, LARGE_CHUNK_BYTES = 65_536, 1024  # a body may have more chunks if they have so many bytes on average
MAX_UNTOLD_BYTES = 16 << 10  # of chunk extensions and blanks, of which the parser tells nothing
CHUNK_LINES_BYTES = 32  # around a chunk without an extension, at most
MAX_SPLIT_LINE_BYTES = 1024  # of a request line that comes in pieces are looked at
MAX_PIPELINED = 16
MIN_BODY_BYTES_PER_S = 1024
LINGER_S = 1.0  # a refused client may send for this long before the connection is cut
BODY_LINGER_S = 10.0  # a client may send the rest of a body that was answered early for this long, before it reads
MAX_UNREAD_BYTES = 64 << 10  # of a body that was answered early; up to this many are discarded to keep the connection
BODY_LOOK_S = 1.0
RESERVED_FDS = 40  # for files and sockets other than clients'
TWO_SPACES = re.compile(rb"[\r\n]*[^\s]+ (?: |[^\s]+  )")  # in a request line; the parser takes them for one
HOST = re.compile(rb"(\[[\w:.%~-]+\]|[\w.~!$&'()*+,;=%-]*)(:\d*)?")  # RFC 3986, 3.2.2 and 3.2.3


class Refusal(Exception):
    """This request is not served. The parser's callbacks raise it."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Cycle(RequestResponseCycle):
    """One request and its response.

    `num_missing_bytes` is the number of bytes of the body that have not arrived. For a chunked body it is unknown.
    """

    num_missing_bytes = 0
    is_early = False  # the answer began before the body was complete, and the rest is not awaited
    is_delimited_by_close = False  # the answer to an HTTP/1.0 client ends where the connection does

    def send(self, message: Any) -> Awaitable[None]:  # type: ignore[override]  # any awaitable does
        """Send a part of the response. A piece of a stream is written before this returns, if the client keeps up."""
        if message.get("more_body") and self._write_chunk(message["body"]):
            return SENT
        if message["type"] == "http.response.start":
            return self._start(message)
        if self.is_delimited_by_close and message["type"] == "http.response.body":
            self.expected_content_length = len(message.get("body", b""))
        return super().send(message)

    async def run_asgi(self, app: Any) -> None:
        """Run the application. A request that is cancelled, because the process ends, is cut and logs nothing."""

        async def cut_if_cancelled(scope: Any, receive: Any, send: Any) -> None:
            try:
                await app(scope, receive, send)
            except asyncio.CancelledError:
                self.disconnected = True
                self.transport.close()

        await super().run_asgi(cut_if_cancelled)

    def _write_chunk(self, body: bytes) -> bool:
        """Write one chunk, or return False where uvicorn has to wait or to complain, or has another framing."""
        if not (self.response_started and self.chunked_encoding and body) or self.response_complete:
            return False
        if self.flow.write_paused or self.disconnected:
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        return True

    async def _start(self, message: Any) -> None:
        is_awaited = self.waiting_for_100_continue or self.num_missing_bytes > MAX_UNREAD_BYTES
        self.is_early = self.more_body and is_awaited
        has_length = any(name == b"content-length" for name, _ in message.get("headers", []))
        if self.scope["http_version"] == "1.0" and not has_length:
            self.is_delimited_by_close, self.chunked_encoding = True, False
        self.keep_alive = self.keep_alive and not self.is_early
        await super().send(message)
        self.keep_alive = self.keep_alive or self.is_early  # the protocol lingers and then closes


class GuardedProtocol(HttpToolsProtocol):
    """One connection, with limits on how long its head, its body and its client's reading may take."""

    header_timeout_s: ClassVar[float] = 10.0
    body_timeout_s: ClassVar[float] = 60.0
    stall_timeout_s: ClassVar[float] = 30.0
    slow_start_s: ClassVar[float] = 10.0  # a body may be slower than MIN_BODY_BYTES_PER_S for this long
    max_connections: ClassVar[int] = max(1, min(10_000, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - RESERVED_FDS))
    cycle: Cycle

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.access_log = False  # the application writes it
        self._is_in_head = self._is_in_body = False
        self._num_messages = self._num_unanswered = 0
        self._line = b""  # a request line as far as it has come, without an end
        self._num_fed_bytes = 0  # of this request, to the parser
        self._num_head_bytes = 0
        self._num_chunks = 0
        self._num_body_bytes = 0
        self._body_s = 0.0  # that the client had for its body so far
        self._timer: asyncio.TimerHandle | None = None
        self._due: Callable[[], None] | None = None  # what the timer calls
        self._refusal: Refusal | None = None
        self._is_lingering = False
        self._stall: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = FairFlow(transport, self.loop)
        if len(self.connections) > self.max_connections and not self._make_room():
            self._refuse(Refusal(503, f"{self.max_connections} connections are busy here"))
        else:
            self._start_timer(self._head_is_late, self.header_timeout_s)

    def _make_room(self) -> bool:
        """Close an idle connection, so that a health check gets through although idle clients hold all others."""
        for other in self.connections:
            if isinstance(other, GuardedProtocol) and other is not self and other.is_idle:
                other.transport.abort()
                return True
        return False

    @property
    def is_idle(self) -> bool:
        """Whether no request runs or waits here. Part of a head may have arrived."""
        return self._num_unanswered == 0 and not self.transport.is_closing()

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None or self._is_lingering:
            self.flow.pause_reading()  # and read on in turn: else the loop reads megabytes at once from a fast client
            self.flow.resume_reading()
            return
        self._unset_keepalive_if_required()
        num_messages, was_idle = self._num_messages, not (self._is_in_head or self._is_in_body)
        try:
            self._check_line(data)
            self._feed(data)
            self._check_untold(len(data), self._num_messages - num_messages, was_idle=was_idle)
            if self._is_in_head and self._num_fed_bytes > MAX_HEAD_BYTES:
                raise _head_too_large()  # the parser reports only whole fields, and one may be endless
        except Refusal as refusal:
            self._refuse(refusal)
        except httptools.HttpParserError as error:
            self._refuse(error.__context__ if isinstance(error.__context__, Refusal) else _unreadable(error))
        else:
            self._mind_time()

    def _check_line(self, data: bytes) -> None:
        """Refuse two spaces in a request line. Where one begins in a pipeline, nobody tells, so there they pass."""
        if self._line or not (self._is_in_head or self._is_in_body):
            self._line += data
            if TWO_SPACES.match(self._line):
                raise Refusal(400, "the words of a request line have one space between them")
            if b"\n" in self._line.lstrip(b"\r\n") or len(self._line) > MAX_SPLIT_LINE_BYTES:
                self._line = b""

    def _check_untold(self, num_bytes: int, num_begun: int, *, was_idle: bool) -> None:
        """Refuse long chunk extensions. Of bytes that came for several requests nobody tells which are whose."""
        if num_begun != was_idle:
            return
        self._num_fed_bytes += num_bytes
        told = self._num_head_bytes + self._num_body_bytes + CHUNK_LINES_BYTES * self._num_chunks
        if self._num_fed_bytes - told > MAX_UNTOLD_BYTES and not self._is_in_head:
            self._is_in_body = True  # also if it has just come whole, and no application has read it
            raise Refusal(400, f"a request has at most {MAX_UNTOLD_BYTES} bytes of chunk extensions and blanks")

    def _feed(self, data: bytes) -> None:
        """Parse the bytes. An upgrade that a client offers is not accepted: the request is parsed again without it.

        The parser stops at such a head and would treat the body as another protocol, but some clients (Java's, h2c)
        offer an upgrade with every first request.
        """
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                head = [self.parser.get_method(), b" ", self.url, b" HTTP/1.1\r\n"]
                for name, value in self.headers:
                    head += [name, b": ", value, b"\r\n"] if name != b"upgrade" else []
                data = b"".join([*head, b"\r\n", data[upgrade.args[0] :]])
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as in uvicorn

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head = True
        self._num_messages += 1
        self._num_fed_bytes = self._num_head_bytes = self._num_chunks = self._num_body_bytes = 0
        self._body_s = 0.0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value) + 4)
        if self._is_in_body:
            return  # a trailer, which must not pass for a field of the head
        super().on_header(name, value)
        if len(self.headers) > MAX_FIELDS:
            raise Refusal(431, f"a request has at most {MAX_FIELDS} header fields")

    def _count_head(self, num_bytes: int) -> None:
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > MAX_HEAD_BYTES:
            raise _head_too_large()

    def on_headers_complete(self) -> None:
        if self.parser.get_method() == b"CONNECT":
            raise Refusal(405, "this is no proxy")
        if self.parser.should_upgrade():
            return  # _feed parses the request again
        self._check_head()
        self._complete_scope()
        self._is_in_head, self._is_in_body = False, True
        self._begin_request()
        self._num_unanswered += 1
        if len(self.pipeline) > MAX_PIPELINED:
            raise Refusal(400, f"at most {MAX_PIPELINED} requests may wait on one connection")

    def _complete_scope(self) -> None:
        """Fill the scope from the request line. Source of the forms of its target: RFC 9112, 3.2."""
        method, url = self.parser.get_method().decode("ascii"), httptools.parse_url(self.url)
        if url.path == b"*":
            status = 405 if method == "OPTIONS" else 400
            raise Refusal(status, f"the request target must be a path, given * with {method}")
        if url.schema is not None and url.schema.lower() not in (b"http", b"https"):
            raise Refusal(400, "the request target must be a path, or a URL of http or https")
        if url.fragment is not None or url.userinfo is not None:
            raise Refusal(400, "the request target must have no fragment and no user")
        path = url.path or b"/"  # a URL may have none
        self.scope["method"] = method
        self.scope["http_version"] = self.parser.get_http_version()
        self.scope["path"] = unquote(path.decode("ascii"))
        self.scope["raw_path"] = path
        self.scope["query_string"] = url.query or b""

    def _begin_request(self) -> None:
        """Run the application, or queue the request behind the one that the application works on."""
        before = self.cycle
        self.cycle = Cycle(
            scope=self.scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=self.access_log,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=self.expect_100_continue and self.scope["http_version"] == "1.1",
            keep_alive=self.scope["http_version"] == "1.1" and self.parser.should_keep_alive(),
            on_response=self.on_response_complete,
        )
        lengths = [int(value) for name, value in self.headers if name == b"content-length"]
        self.cycle.num_missing_bytes = lengths[0] if lengths else sys.maxsize
        if before is None or before.response_complete:
            self._start_asgi_task(self.cycle, self.app)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, self.app))

    def _check_head(self) -> None:
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1"):
            raise Refusal(505, "only HTTP/1.1 and HTTP/1.0 are spoken here")
        values: dict[bytes, list[bytes]] = {b"host": [], b"transfer-encoding": [], b"expect": []}
        for name, value in self.headers:
            if name in values:
                values[name].append(value)
        num_hosts = len(values[b"host"])
        if num_hosts > 1 or (num_hosts == 0 and version == "1.1"):
            raise Refusal(400, f"a request has exactly one Host field, this one {num_hosts}")
        for host in values[b"host"]:
            if HOST.fullmatch(host) is None:
                raise Refusal(400, f"Host must be a name or an address, given {shorten(host.decode('latin-1'))}")
        codings = b", ".join(values[b"transfer-encoding"]).decode("latin-1").lower()
        if version == "1.0" and codings:
            raise Refusal(400, "HTTP/1.0 has no Transfer-Encoding")
        if codings not in ("", "chunked"):  # the end of the body can be found only if chunked is the last
            status = 501 if codings.endswith("chunked") else 400
            raise Refusal(status, f"Transfer-Encoding must be chunked, given {shorten(codings)}")
        if any(value.lower() != b"100-continue" for value in values[b"expect"]):
            raise Refusal(417, "the only expectation that can be met is 100-continue")

    def on_chunk_header(self) -> None:
        self._num_chunks += 1
        if self._num_chunks > max(MAX_CHUNKS, 1 + self._num_body_bytes // LARGE_CHUNK_BYTES):
            raise Refusal(400, f"a body has at most {MAX_CHUNKS} chunks, or one for each {LARGE_CHUNK_BYTES} bytes")

    def on_body(self, body: bytes) -> None:
        self._num_body_bytes += len(body)
        self.cycle.num_missing_bytes -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._is_in_body = False
        super().on_message_complete()

    def _mind_time(self) -> None:
        """Set the deadline of a head or a body that has begun. Called after each read."""
        is_idle = self.cycle is None or self.cycle.response_complete
        due = self._look_at_body if self._is_in_body else self._head_is_late if self._is_in_head or is_idle else None
        if due == self._due and self._timer is not None:
            return
        self._stop_timer()
        if due is not None:
            self._start_timer(due, BODY_LOOK_S if self._is_in_body else self.header_timeout_s)

    def _start_timer(self, due: Callable[[], None], delay_s: float) -> None:
        self._due, self._timer = due, self.loop.call_later(delay_s, due)

    def _head_is_late(self) -> None:
        self._timer = None
        self._refuse(Refusal(408, f"no complete request head came within {self.header_timeout_s:g} s"))

    def _look_at_body(self) -> None:
        self._timer = None
        if not self._is_in_body or self._refusal is not None:
            return
        if not self.flow.read_paused and not self.cycle.waiting_for_100_continue:  # else the server is slow
            self._body_s += BODY_LOOK_S
        is_slow = self._body_s > self.slow_start_s and self._num_body_bytes < MIN_BODY_BYTES_PER_S * self._body_s
        if is_slow or self._body_s >= self.body_timeout_s:
            self._refuse(Refusal(408, f"the request body came too slowly, it has {self.body_timeout_s:g} s"))
        else:
            self._start_timer(self._look_at_body, BODY_LOOK_S)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # Bytes out.

    def pause_writing(self) -> None:
        """Note that the client reads too slowly. If it reads nothing for `stall_timeout_s`, the connection is cut."""
        super().pause_writing()
        self._watch_reader()

    def _watch_reader(self) -> None:
        self._stall = self.loop.call_later(self.stall_timeout_s, self._look_at_reader, self._num_unread_bytes())

    def _look_at_reader(self, num_unread_bytes: int) -> None:
        if self._num_unread_bytes() < num_unread_bytes:  # nothing was written meanwhile, so the client read some
            self._watch_reader()
        else:
            self.transport.abort()

    def _num_unread_bytes(self) -> int:
        """Return the bytes that wait for the client, in this process and in the kernel.

        The kernel takes more once a third of its part is read. Source: tcp(7), SIOCOUTQ, which has the same number as
        TIOCOUTQ.
        """
        num_queued = fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
        return self.transport.get_write_buffer_size() + int.from_bytes(num_queued, sys.byteorder)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_stall()

    def _stop_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _refuse(self, refusal: Refusal) -> None:
        """Answer the refusal and close, after the answers to earlier requests of this connection."""
        if self._refusal is not None or self.transport.is_closing():
            return
        self._refusal = refusal
        self._stop_timer()
        if self._is_in_body and not self.cycle.response_complete:
            self._drop_request(self.cycle)
        if self._num_unanswered == 0:
            self._answer_refusal(refusal)  # else on_response_complete answers it later

    def _drop_request(self, cycle: RequestResponseCycle) -> None:
        """Drop the request whose body is at fault. If its application is running, it sees the client leave."""
        self._num_unanswered -= 1
        if self.pipeline and self.pipeline[0][0] is cycle:
            self.pipeline.popleft()
        else:
            cycle.disconnected = True
            cycle.message_event.set()

    def _answer_refusal(self, refusal: Refusal) -> None:
        if self._is_in_body and self.cycle.response_started:
            self.transport.close()  # an answer to this request has already begun
            self._start_timer(self.transport.abort, LINGER_S)
            return
        self.note_refusal(refusal)
        retry = "retry-after: 1\r\n" if refusal.status == 503 else ""
        body, more = self.rendered(refusal)
        phrase = HTTPStatus(refusal.status).phrase
        head = (
            f"HTTP/1.1 {refusal.status} {phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n{more}{retry}connection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self._linger(LINGER_S)

    def rendered(self, refusal: Refusal) -> tuple[bytes, str]:
        """Return the body of a refusal, and the lines of further headers."""
        return orjson.dumps({"error": str(refusal), "code": refusal.status}) + b"\n", ""

    def note_refusal(self, refusal: Refusal) -> None:
        """Log the refusal. No application sees this request, so a subclass counts it here too."""
        peer = self.client[0] if self.client else "a client"
        log.info("refused %s: %d %s", peer, refusal.status, refusal, extra={"status": refusal.status})

    def _linger(self, linger_s: float) -> None:
        """Read on before closing. Closing with unread bytes would reset the connection and lose the answer."""
        self._is_lingering = True
        self._stop_timer()
        self._unset_keepalive_if_required()
        self.flow.resume_reading()
        if self.transport.can_write_eof():  # not within TLS
            with suppress(OSError):  # the client is gone already
                self.transport.write_eof()
        self._start_timer(self.transport.abort, linger_s)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._num_unanswered -= 1
        if self.cycle.is_early and not self.transport.is_closing():
            self._linger(BODY_LINGER_S)
        elif self._refusal is not None and self._num_unanswered == 0 and not self.transport.is_closing():
            self._unset_keepalive_if_required()
            self._answer_refusal(self._refusal)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_stall()
        super().connection_lost(exc)


def _head_too_large() -> Refusal:
    return Refusal(431, f"a request head has at most {MAX_HEAD_BYTES} bytes")


def _unreadable(error: httptools.HttpParserError) -> Refusal:
    """Return the refusal of bytes that httptools could not parse. Its messages are useful only about the version."""
    if "Invalid HTTP version" in str(error) or "PRI" in str(error):
        return Refusal(505, "only HTTP/1.1 and HTTP/1.0 are spoken here")
    return Refusal(400, "this is no HTTP/1.1 request")
