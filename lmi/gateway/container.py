"""The gateway's side of HTTP: one call to a container, whose response is read as it comes.

A call has its own connection, so closing it ends what the container does for this call and nothing
else. The bounds of chunks are kept, because a streamed response has one record in each, and so is
what came before a cut: aiohttp's client drops that, and needs 1.8 times the CPU for a request.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import httptools

from lmi.http.exchange import Header

# A longer chunk is handed on in pieces of this size.
MAX_CHUNK_BYTES = 1 << 20
# While more bytes of a response wait for their reader, its connection is not read.
MAX_WAITING_BYTES = 256 << 10
MAX_RESPONSE_BYTES = 1 << 30
# Of a response, with the interim answers before it.
MAX_HEAD_BYTES = 64 << 10


class ContainerFault(Exception):
    """A call did not get its whole response. The text is the reason."""


class Unreachable(ContainerFault):
    """The container refused the connection, or lost it before the head of its response."""


class ResponseCut(ContainerFault):
    """The connection was lost in the middle of a response."""


class OutOfTime(ContainerFault):
    """The call took longer than it may."""


class Container:
    """A container at `url`, for example http://127.0.0.1:8080. Raises ValueError if that is no http
    URL.

    `key` is the API key that it wants.
    """

    def __init__(self, url: str, key: str = "") -> None:
        parts = urlsplit(url)
        has_more = parts.username or parts.query or parts.fragment
        if parts.scheme != "http" or not parts.hostname or has_more:
            raise ValueError(f"must be http://HOST[:PORT], given {url}")

        self.url = url.rstrip("/")
        self._key = [("x-api-key", key)] if key else []
        self.host = parts.hostname
        self.port = parts.port or 80
        self._authority = parts.netloc
        self._prefix = parts.path.rstrip("/")

    @asynccontextmanager
    async def call(
        self,
        method: str,
        path: str,
        headers: Iterable[Header] = (),
        body: bytes = b"",
        timeout_s: float = 60.0,
    ) -> "AsyncIterator[ContainerResponse]":
        """Send a request, and yield its response when the head has come. Leaving the block closes
        the connection.

        Host and Content-Length are added. Raises Unreachable or OutOfTime. `timeout_s` counts to
        the response's end.
        """
        head = self._head(method, path, headers, len(body))
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        incoming = Incoming(MAX_WAITING_BYTES // 2)
        try:
            async with asyncio.timeout_at(deadline_s):
                protocol = asyncio.StreamReaderProtocol(incoming)
                transport, _ = await loop.create_connection(lambda: protocol, self.host, self.port)
        except TimeoutError:
            raise OutOfTime(f"no connection to {self.url} within {timeout_s:g} s") from None
        except OSError as error:
            raise _no_connection(self.url, error) from None

        def expire() -> None:
            incoming.set_exception(OutOfTime(f"no whole answer within {timeout_s:g} s"))
            transport.abort()

        timer = loop.call_at(deadline_s, expire)
        response = ContainerResponse(incoming)
        try:
            transport.write(head + body)
            await response.wait_for_head()
            yield response
        finally:
            timer.cancel()
            transport.abort()

    async def connect(self, limit: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return a connection, which is not read while `limit` bytes wait. Raises Unreachable."""
        try:
            return await asyncio.open_connection(self.host, self.port, limit=limit)
        except OSError as error:
            raise _no_connection(self.url, error) from None

    def path(self, path: str) -> str:
        """Return a path as this container knows it."""
        return self._prefix + path

    def fields(self, headers: Iterable[Header]) -> list[Header]:
        """Return the headers of a request to this container."""
        return [("Host", self._authority), *self._key, *headers]

    def _head(self, method: str, path: str, headers: Iterable[Header], num_bytes: int) -> bytes:
        """Return the head of a request whose body has so many bytes."""
        fields = self.fields(headers)
        if method != "GET":
            fields.append(("Content-Length", str(num_bytes)))

        lines = [f"{method} {self.path(path)} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in fields]
        lines += ["", ""]
        return "\r\n".join(lines).encode("latin-1")


def _no_connection(url: str, error: OSError) -> Unreachable:
    return Unreachable(f"no connection to {url}: {error.strerror or error}")


class Incoming(asyncio.StreamReader):
    """What a container sends. `loss` is why the connection has ended; what came before can still be
    read.
    """

    loss: Exception | None = None

    def set_exception(self, exc: Exception) -> None:
        self.loss = self.loss or exc
        self.feed_eof()


class ContainerResponse:
    """A container's response. `status` and `headers` are there when the call yields it; the body
    comes in chunks.

    `fault` says why the body ended early. It is None while the body comes, and for a body that is
    complete.
    """

    def __init__(self, incoming: Incoming) -> None:
        # It is 0 or 1xx until the head is complete.
        self.status = 0
        # Names are in lower case.
        self.headers: list[Header] = []
        self.is_chunked = False
        self.fault: ContainerFault | None = None

        self._incoming = incoming
        self._is_over = False
        self._num_head_bytes = 0

        # What has come of the current chunk.
        self._chunk = bytearray()
        self._chunks: deque[bytes] = deque()
        self._parser = httptools.HttpResponseParser(self)

    def header(self, name: str) -> str:
        """Return the value of the first field of that name, or ""."""
        for field_name, value in self.headers:
            if field_name == name.lower():
                return value

        return ""

    async def wait_for_head(self) -> None:
        """Raises Unreachable or OutOfTime."""
        while not self._has_head and not self._is_over:
            await self._read()

        if not self._has_head and self.fault is not None:
            raise self.fault

    async def receive(self) -> bytes:
        """Return the next chunk, at most MAX_CHUNK_BYTES, or b"" at the end of the body, however it
        ended.

        A body that is not chunked comes as it arrives. A call that is cancelled loses nothing.
        """
        while not self._chunks and not self._is_over:
            await self._read()

        return self._chunks.popleft() if self._chunks else b""

    async def read(self, max_bytes: int = MAX_RESPONSE_BYTES) -> bytes:
        """Return the whole body. Raises OutOfTime, or ResponseCut, also for a body of more than
        `max_bytes`.
        """
        body = bytearray()
        while chunk := await self.receive():
            body += chunk
            if len(body) > max_bytes:
                raise ResponseCut(f"the answer has more than {max_bytes} bytes")

        if self.fault is not None:
            raise self.fault

        return bytes(body)

    @property
    def _has_head(self) -> bool:
        return self.status >= 200

    async def _read(self) -> None:
        """Read what has come next, or note that the connection has ended."""
        data = await self._incoming.read(MAX_WAITING_BYTES)
        if not data:
            self._note_close()
            return

        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._lose("its answer is not HTTP/1.1")

        if not self._has_head:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self._lose(f"the head of its answer has over {MAX_HEAD_BYTES} bytes")

    def _note_close(self) -> None:
        """Note that the connection has ended, which may be the end of the body."""
        loss = self._incoming.loss
        ends_with_connection = not self.is_chunked and not self.header("content-length")
        if loss is None and self._has_head and ends_with_connection:
            self._end()
        elif isinstance(loss, OutOfTime):
            self._end(loss)
        else:
            self._lose(str(loss or "it closed the connection"))

    def _lose(self, reason: str) -> None:
        kind = ResponseCut if self._has_head else Unreachable
        self._end(kind(f"the container did not complete its answer: {reason}"))

    def _end(self, fault: ContainerFault | None = None) -> None:
        """What came of the body can still be received. Only the first call counts."""
        if not self._is_over:
            self._push()
            self._is_over = True
            self.fault = fault

    # For the parser.

    def on_message_begin(self) -> None:
        self.headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        # After the head it is a trailer.
        if not self._has_head:
            self.headers.append((name.decode("latin-1").lower(), value.decode("latin-1")))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self.is_chunked = bool(self.header("transfer-encoding"))

    def on_body(self, data: bytes) -> None:
        self._chunk += data
        if not self.is_chunked or len(self._chunk) > MAX_CHUNK_BYTES:
            self._push()

    def on_chunk_complete(self) -> None:
        self._push()

    def on_message_complete(self) -> None:
        if self._has_head:
            self._end()

    def _push(self) -> None:
        for begin in range(0, len(self._chunk), MAX_CHUNK_BYTES):
            self._chunks.append(bytes(self._chunk[begin : begin + MAX_CHUNK_BYTES]))

        self._chunk.clear()
