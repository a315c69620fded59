"""One HTTP exchange: the request that a route reads, and the response that it writes.

It adds the headers that every response has, bounds all headers, keeps the status for log and
metrics, and raises `ClientGone` when the client leaves. It calls ASGI's `send` directly, without
layers of middleware around it, since that is called for each token.
"""

import asyncio
import logging
import re
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterable
from contextlib import asynccontextmanager
from itertools import accumulate
from typing import Any

import orjson
from starlette.datastructures import Headers, QueryParams
from starlette.types import Receive, Scope, Send

from lmi.errors import ClientGone, DeadlineExceeded, LmiError, shorten
from lmi.http.body import BodyMemory

REQUEST_ID = "x-request-id"
CUSTOM_ATTRIBUTES = "x-amzn-sagemaker-custom-attributes"
# Headers in which a client says how long it waits.
TIMEOUT = "X-Request-Timeout"
TIMEOUT_MS = "x-envoy-expected-rq-timeout-ms"
# The key in the scope for the bytes that a chunked body will at least have: `http/protocol.py` sets
# it when a large chunk begins.
NUM_ANNOUNCED = "lmi.num_announced_bytes"
# The key in the scope of a request that a model's code asks, for the exchange of its client, which
# alone is counted and logged.
OUTER = "lmi.outer"
# The key in the scope of a request that opens a WebSocket, for its socket.
WEBSOCKET = "lmi.websocket"
# The gateway sends it. SageMaker tells a container no name of its endpoint.
ENDPOINT_NAME = "X-Lmi-Endpoint-Name"
# SageMaker's limit.
MAX_ATTRIBUTE_CHARS = 1024
# SageMaker's asynchronous endpoints refuse a response with more.
MAX_HEADER_BYTES = 4096
# How many headers a warning names.
MAX_NAMED = 20
# The status line, and the headers that the HTTP protocol adds.
OTHER_HEADER_BYTES = 256
# The headers that may name a request, the first one first, and the names that they may give it.
REQUEST_IDS = {
    "x-amzn-sagemaker-inference-id": re.compile(r"[\x21-\x7e][\x20-\x7e]{0,63}"),
    REQUEST_ID: re.compile(r"[\x21-\x7e]{1,128}"),
}
SAFE_ATTRIBUTES = re.compile(rf"[\x20-\x7e]{{1,{MAX_ATTRIBUTE_CHARS}}}")

Header = tuple[str, str]

access = logging.getLogger("lmi.access")
log = logging.getLogger(__name__)


class Sent(Awaitable[None]):
    """What `send` returns for data that is written already. It need not be awaited, and to await it
    costs no turn of the event loop.
    """

    def __await__(self) -> Generator[None]:
        yield from ()


SENT = Sent()


class BodyTooLarge(LmiError, label="body_too_large", status=413):
    """The body is over `max_request_size`."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(f"the request body must have at most {max_bytes} bytes (max_request_size)")


class UnsupportedEncoding(LmiError, label="unsupported_encoding", status=415):
    """The body is compressed."""


class UnsupportedMediaType(LmiError, label="unsupported_media_type", status=415):
    """The body is a form in parts."""


class Exchange:
    """One request and its response. `status` is 0 until the response has started."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.headers = Headers(scope=scope)
        self.request_id = self._choose_id()
        # The names of the response's headers that show this id.
        self.id_headers = [REQUEST_ID]
        self.status = 0
        self.started_s = time.monotonic()
        # Whose request it is, where its key or a trusted gateway says so.
        self.client = ""
        self.error_label = ""
        # The model that answers, or the adapter.
        self.model = ""
        # Further numbers for its line in the access log, by name.
        self.log_fields: defaultdict[str, float] = defaultdict(int)
        # The bytes of the body, or of what was made of it, as they count in the memory of bodies.
        self.num_held_bytes = 0
        # The error that `end_early` was called with.
        self.early_end: LmiError | None = None

        # Answers an error in the form of the route, if it has one.
        self.refuse: Callable[[LmiError], Awaitable[None]] | None = None
        # Returns headers that are known only when the head is sent.
        self.late_headers: Callable[[], Iterable[Header]] | None = None
        # What was written last.
        self._written = b""
        # The body that `peek` has read and `body` returns.
        self._peeked_body: bytes | None = None
        self._memory: BodyMemory | None = None
        self._receive = receive
        self._send = send
        # The deadlines that run, the outermost first.
        self._deadlines: list[asyncio.Timeout] = []

    @property
    def path(self) -> str:
        return str(self.scope["path"])

    @property
    def method(self) -> str:
        return str(self.scope["method"])

    @property
    def query(self) -> dict[str, str]:
        """The parameters of the query. A name that comes twice has its last value."""
        return dict(QueryParams(self.scope.get("query_string", b"")))

    @property
    def has_begun(self) -> bool:
        """Whether a part of the response was sent."""
        return self.status != 0

    def attribute(self, name: str) -> str | None:
        """Return one of the client's attributes, None if it is missing. Their header has them as
        `route=/v1/completions; model_name=b`.
        """
        for pair in self.headers.get(CUSTOM_ATTRIBUTES, "").split(";"):
            key, _, value = pair.partition("=")
            if key.strip() == name:
                return value.strip()

        return None

    def _choose_id(self) -> str:
        """Return the id that the client sent, if it is short printable ASCII, else a new one."""
        for name, allowed in REQUEST_IDS.items():
            request_id = self.headers.get(name, "")
            if allowed.fullmatch(request_id):
                return request_id

        return uuid.uuid4().hex

    def check_is_whole(self) -> None:
        """Raise UnsupportedMediaType for a multipart body. Other types pass, because curl labels
        JSON as a form.
        """
        media_type = self.headers.get("content-type", "")
        if media_type.strip().lower().startswith("multipart/"):
            raise UnsupportedMediaType(
                f"content-type must be application/json, given {shorten(media_type)}"
            )

    async def peek(self, max_bytes: int, memory: BodyMemory) -> bytes:
        """Read the body, and keep it for the next call of `body`. Raises what that raises."""
        self._peeked_body = await self.body(max_bytes, memory)
        return self._peeked_body

    async def body(self, max_bytes: int, memory: BodyMemory) -> bytes:
        """Read the whole body. A body whose announced length is too long is refused before a byte
        is read.

        Its bytes count in `memory` until the caller says with `hold` how many are left, 0 at the
        end. Raises Overloaded if `memory` is full, BodyTooLarge, UnsupportedEncoding or ClientGone.
        """
        if self._peeked_body is not None:
            peeked_body = self._peeked_body
            self._peeked_body = None
            return peeked_body

        self._check_is_plain()
        num_announced = int(self.headers.get("content-length", 0))
        if num_announced > max_bytes:
            raise BodyTooLarge(max_bytes)

        memory.check_room(0, num_announced)
        self._memory = memory

        body = bytearray()
        has_more = True
        while has_more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone("the client left before its request was complete")

            piece = message.get("body", b"")
            num_after = len(body) + len(piece)
            if max(num_after, self.scope.get(NUM_ANNOUNCED, 0)) > max_bytes:
                raise BodyTooLarge(max_bytes)

            self.hold(num_after)
            body += piece
            has_more = message.get("more_body", False)

        return bytes(body)

    def _check_is_plain(self) -> None:
        """Raise UnsupportedEncoding if the body is compressed."""
        # Each of several fields may be a list too.
        encodings = ", ".join(self.headers.getlist("content-encoding"))
        for encoding in encodings.split(","):
            if encoding.strip().lower() not in ("identity", ""):
                raise UnsupportedEncoding(
                    f"content-encoding must be identity, given {shorten(encodings)}"
                )

    def hold(self, num_bytes: int) -> None:
        """Count what this request holds of its body now. Raises Overloaded if that is more than
        before and there is no room.
        """
        if self._memory is None or num_bytes == self.num_held_bytes:
            return

        if num_bytes > self.num_held_bytes:
            self._memory.check_room(self.num_held_bytes, num_bytes)

        self._memory.change(self.num_held_bytes, num_bytes)
        self.num_held_bytes = num_bytes

    async def start(self, status: int, media_type: str, headers: Iterable[Header] = ()) -> None:
        """Send the head, without a content type if `media_type` is ""."""
        await self._start(status, media_type, headers)

    def write(self, data: bytes) -> Awaitable[None]:
        """Send one record without buffering it. Unless the result is SENT, it must be awaited."""
        self._written = data or self._written
        return self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        await self._send({"type": "http.response.body", "body": data})

    def line_end(self) -> bytes:
        """Return a newline if what was written last does not end with one, else b""."""
        return b"" if self._written[-1:] in (b"", b"\n") else b"\n"

    def note_failure(self, status: int, headers: Iterable[Header] = ()) -> None:
        """Note that a stream fails. Its head is sent, so it cannot show this status and these
        headers any more; `BufferedExchange` can.
        """

    async def send_whole(
        self, status: int, media_type: str, body: bytes, headers: Iterable[Header] = ()
    ) -> None:
        """Send a whole response with its length."""
        await self._start(status, media_type, headers, length=len(body))
        await self._send({"type": "http.response.body", "body": body})

    async def send_json(self, value: object, status: int = 200) -> None:
        """Send the JSON of a value as a whole response."""
        await self.send_whole(status, "application/json", orjson.dumps(value))

    def log_access(self, duration_s: float, **more: str) -> None:
        """Write this exchange's line of the access log, with `more` fields."""
        fields: dict[str, object] = {
            "request_id": self.request_id,
            "status": self.status,
            "duration_ms": round(duration_s * 1000, 1),
            **self.log_fields,
        }
        if self.model:
            fields["model"] = self.model

        if self.error_label:
            fields["error_label"] = self.error_label

        client = self.scope.get("client")
        if client:
            fields["client"] = client[0]

        fields.update(more)
        access.info("%s %s", self.method, self.path, extra=fields)

    async def _start(
        self, status: int, media_type: str, headers: Iterable[Header], length: int | None = None
    ) -> None:
        """Send the head. Where not all headers have room, the optional ones lose it, the last ones
        first.
        """
        optional = list(headers)
        if media_type:
            optional.insert(0, ("content-type", media_type))

        if self.late_headers is not None:
            optional += self.late_headers()

        ids = [(name, self.request_id) for name in self.id_headers]
        required = [*ids, *self._echoed_attributes(optional)]
        if length is not None:
            required.append(("content-length", str(length)))

        max_bytes = MAX_HEADER_BYTES - OTHER_HEADER_BYTES - num_bytes(required)
        fields = [*self._fitting(optional, max_bytes), *required]
        raw = [(name.encode(), value.encode("latin-1")) for name, value in fields]

        self.status = status
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    def _fitting(self, headers: list[Header], max_bytes: int) -> list[Header]:
        """Return as many of the headers, from the first one on, as have room. User code may add any
        number of them.
        """
        totals = accumulate(num_bytes([header]) for header in headers)
        num_fitting = sum(total <= max_bytes for total in totals)

        dropped = [shorten(name) for name, _ in headers[num_fitting:]]
        if dropped:
            log.warning(
                "response headers have at most %d bytes together, without room for: %s",
                MAX_HEADER_BYTES,
                ", ".join(dropped[:MAX_NAMED]),
                extra={"request_id": self.request_id},
            )

        return headers[:num_fitting]

    def _echoed_attributes(self, headers: list[Header]) -> list[Header]:
        """Return the client's attributes, which are sent back unless the response has its own."""
        attributes = self.headers.get(CUSTOM_ATTRIBUTES, "")
        has_its_own = any(name.lower() == CUSTOM_ATTRIBUTES for name, _ in headers)
        if not attributes or has_its_own:
            return []

        if SAFE_ATTRIBUTES.fullmatch(attributes):
            return [(CUSTOM_ATTRIBUTES, attributes)]

        rule = f"at most {MAX_ATTRIBUTE_CHARS} printable ASCII characters are sent back"
        log.warning("%s: %s", CUSTOM_ATTRIBUTES, rule, extra={"request_id": self.request_id})
        return []

    @asynccontextmanager
    async def deadline(
        self,
        timeout_s: float | None,
        since_s: float | None = None,
        why: str = "the server's predict_timeout",
    ) -> AsyncIterator[None]:
        """Raise DeadlineExceeded inside the block, `timeout_s` after `since_s`. A `timeout_s` of
        None is no deadline.

        By default `since_s` is when the request arrived. `why` tells the client whose deadline it
        is.
        """
        if since_s is None:
            since_s = self.started_s

        remaining_s = None
        if timeout_s is not None:
            remaining_s = max(0.0, since_s + timeout_s - time.monotonic())

        self.check_goes_on()
        try:
            async with asyncio.timeout(remaining_s) as timeout:
                self._deadlines.append(timeout)
                try:
                    if remaining_s == 0.0:
                        # The timeout ends it here, so what is late already does not begin.
                        await asyncio.sleep(0)

                    yield
                finally:
                    self._deadlines.remove(timeout)
        except TimeoutError:
            if not timeout.expired():
                raise

            self.check_goes_on()
            raise DeadlineExceeded(f"no answer within {timeout_s:g} s, {why}") from None

    def end_early(self, error: LmiError) -> None:
        """Raise `error` in the blocks of `deadline` that run inside the outermost one, which is
        ErrorMiddleware's.

        If there are none, raise it in the outermost, unless a response has begun, which goes on.
        """
        self.early_end = error
        timeouts = self._deadlines[1:]
        if not timeouts and not self.status:
            timeouts = self._deadlines[:1]

        for timeout in timeouts:
            if not timeout.expired():
                timeout.reschedule(asyncio.get_running_loop().time())

    def check_goes_on(self) -> None:
        """Raise the error of `end_early` if that was called."""
        if self.early_end is not None:
            raise self.early_end

    async def run_while_there(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` to its end. If the client leaves first, cancel `work` and raise ClientGone.

        Call this after the body was read, when `receive` can only return the disconnect. `work`
        runs in its own task, which is also faster: a task is resumed through all awaiting frames,
        and a route has a dozen of them above it.
        """
        worker = asyncio.create_task(work)
        departure = asyncio.create_task(self._until_gone())
        try:
            await asyncio.wait((worker, departure), return_when=asyncio.FIRST_COMPLETED)
            if not worker.done():
                raise ClientGone("the client closed its connection")

            worker.result()
        finally:
            departure.cancel()
            worker.cancel()
            # Its resources are free before the caller continues.
            await asyncio.wait((worker,))
            # The traceback of its error holds this frame, and the body would wait for the garbage
            # collector.
            del worker

    async def _until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass


def num_bytes(headers: Iterable[Header]) -> int:
    """Return the bytes that the headers have on the wire."""
    return sum(len(name) + len(value) + len(": \r\n") for name, value in headers)
