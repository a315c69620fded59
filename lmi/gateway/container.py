"""The gateway's side of HTTP: one call to a container, whose answer is read as it comes.

A call has a connection of its own, so closing it ends what the container does for this call and nothing else. The
bounds of chunks are kept, because a streamed answer has one record in each. Source: RFC 9112.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import httptools

from lmi.errors import LmiError

Header = tuple[str, str]

MAX_CHUNK_BYTES = 1 << 20  # a longer chunk is handed on in pieces of this size
MAX_WAITING_BYTES = 256 << 10  # of an answer wait for their reader; with more its connection is not read
MAX_ANSWER_BYTES = 1 << 30


class ContainerFault(LmiError):
    """A call did not get its whole answer. The message is the reason."""

    label = "container_fault"


class Unreachable(ContainerFault):
    """The container refused the connection, or lost it before the head of its answer."""

    status = 503
    label = "container_unreachable"


class AnswerCut(ContainerFault):
    """The connection was lost in the middle of an answer."""

    status = 502
    label = "answer_cut"


class OutOfTime(ContainerFault):
    """The call took longer than it may."""

    status = 504
    label = "out_of_time"


class Container:
    """A container at `url`, for example http://127.0.0.1:8080. Raises ValueError if that is no http URL."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname or parts.username or parts.query or parts.fragment:
            raise ValueError(f"must be http://HOST[:PORT], given {url}")
        self.url = url.rstrip("/")
        self._host, self._port = parts.hostname, parts.port or 80
        self._authority, self._prefix = parts.netloc, parts.path.rstrip("/")

    @asynccontextmanager
    async def call(
        self, method: str, path: str, headers: Iterable[Header] = (), body: bytes = b"", timeout_s: float = 60.0
    ) -> AsyncIterator[Answer]:
        """Send a request, and yield its answer when the head has come. Leaving the block closes the connection.

        Host and Content-Length are added. Raises Unreachable or OutOfTime. `timeout_s` counts to the end of the answer.
        """
        answer = Answer(timeout_s)
        try:
            await self._connect(answer)
            await answer.ask(self._head(method, path, headers, len(body)) + body)
            yield answer
        finally:
            answer.close()

    async def _connect(self, answer: Answer) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(answer.timeout_s):
                await loop.create_connection(lambda: answer, self._host, self._port)
        except TimeoutError:
            raise OutOfTime(f"no connection to {self.url} within {answer.timeout_s:g} s") from None
        except OSError as error:
            raise Unreachable(f"no connection to {self.url}: {error.strerror or error}") from None

    def _head(self, method: str, path: str, headers: Iterable[Header], num_body_bytes: int) -> bytes:
        fields = [("Host", self._authority), *headers]
        if method != "GET":
            fields.append(("Content-Length", str(num_body_bytes)))
        lines = [f"{method} {self._prefix}{path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields)]
        return "\r\n".join([*lines, "", ""]).encode("latin-1")


class Answer(asyncio.Protocol):
    """A container's answer. `status` and `headers` are there when the call yields it; the body comes in chunks.

    `fault` says why the body ended early. It is None while the body comes, and for a body that is complete.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.status = 0
        self.headers: list[Header] = []  # names in lower case
        self.is_chunked = False
        self.fault: ContainerFault | None = None
        self._has_head = self._is_over = self._is_paused = False
        self._is_until_close = False  # the body ends where the connection does
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(timeout_s, self._run_out_of_time)
        self._news: asyncio.Future[None] | None = None  # what the reader waits for
        self._chunk = bytearray()  # what has come of the current chunk
        self._waiting: deque[bytes] = deque()
        self._num_waiting_bytes = 0
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)

    # For the caller.

    def header(self, name: str) -> str | None:
        """Return the value of the first field of that name, which is given in lower case."""
        return next((value for other, value in self.headers if other == name), None)

    @property
    def num_header_bytes(self) -> int:
        return sum(len(name) + len(value) + 4 for name, value in self.headers)

    async def receive(self) -> bytes:
        """Return the next chunk, at most MAX_CHUNK_BYTES, or b"" at the end of the body, however it ended.

        A body that is not chunked comes as it arrives. A call that is cancelled loses nothing.
        """
        while not self._waiting and not self._is_over:
            await self._wait()
        if not self._waiting:
            return b""
        chunk = self._waiting.popleft()
        self._num_waiting_bytes -= len(chunk)
        if self._is_paused and self._num_waiting_bytes <= MAX_WAITING_BYTES:
            self._pause(False)
        return chunk

    async def read(self, max_bytes: int = MAX_ANSWER_BYTES) -> bytes:
        """Return the whole body. Raises OutOfTime, or AnswerCut, also for a body of more than `max_bytes`."""
        body = bytearray()
        while chunk := await self.receive():
            body += chunk
            if len(body) > max_bytes:
                raise AnswerCut(f"the answer has more than {max_bytes} bytes")
        if self.fault is not None:
            raise self.fault
        return bytes(body)

    # For the container.

    async def ask(self, request: bytes) -> None:
        """Send the request and wait for the head of the answer. Raises Unreachable or OutOfTime."""
        assert self._transport is not None
        self._transport.write(request)
        while not self._has_head and not self._is_over:
            await self._wait()
        if not self._has_head:
            raise self.fault or Unreachable("the call is over")

    def close(self) -> None:
        """Close the connection at once."""
        self._end()

    async def _wait(self) -> None:
        self._news = self._loop.create_future()
        await self._news

    # For the event loop.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        if self._is_over:  # the time was up before
            transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._is_over:
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._end(self._lost("its answer is not HTTP/1.1"))
        if self._num_waiting_bytes > MAX_WAITING_BYTES:
            self._pause(True)

    def _pause(self, is_paused: bool) -> None:
        """Stop reading, or go on. A connection that is over is left alone."""
        self._is_paused = is_paused
        if self._transport is not None and not self._is_over:
            (self._transport.pause_reading if is_paused else self._transport.resume_reading)()

    def connection_lost(self, error: Exception | None) -> None:
        is_whole = self._has_head and self._is_until_close and error is None
        self._end(None if is_whole else self._lost(str(error) if error else "it closed the connection"))

    def _lost(self, reason: str) -> ContainerFault:
        kind = AnswerCut if self._has_head else Unreachable
        return kind(f"the container did not complete its answer: {reason}")

    def _run_out_of_time(self) -> None:
        self._end(OutOfTime(f"no whole answer within {self.timeout_s:g} s"))

    def _end(self, fault: ContainerFault | None = None) -> None:
        """Close the connection. What came of the body can still be received. Only the first call counts."""
        if self._is_over:
            return
        self._push()
        self._is_over, self.fault = True, fault
        self._timer.cancel()
        if self._transport is not None:
            self._transport.abort()
        self._tell()

    def _push(self) -> None:
        """Hand on what has come of the current chunk."""
        for begin in range(0, len(self._chunk), MAX_CHUNK_BYTES):
            self._waiting.append(bytes(self._chunk[begin : begin + MAX_CHUNK_BYTES]))
        self._num_waiting_bytes += len(self._chunk)
        self._chunk.clear()
        self._tell()

    def _tell(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    # For the parser.

    def on_message_begin(self) -> None:
        self.headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.decode("latin-1").lower(), value.decode("latin-1")))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self._is_interim:
            return
        names = {name for name, _ in self.headers}
        self.is_chunked = "transfer-encoding" in names
        self._is_until_close = not names & {"transfer-encoding", "content-length"}
        self._has_head = True
        self._tell()

    @property
    def _is_interim(self) -> bool:
        """Whether the status is 1xx, so that the answer itself follows."""
        return self.status < 200

    def on_body(self, data: bytes) -> None:
        self._chunk += data
        if not self.is_chunked or len(self._chunk) > MAX_CHUNK_BYTES:
            self._push()

    def on_chunk_complete(self) -> None:
        self._push()

    def on_message_complete(self) -> None:
        if not self._is_interim:
            self._end()
