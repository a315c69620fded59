"""One HTTP exchange: the request that a route reads, and the response that it writes.

An Exchange is a thin layer over ASGI's scope, receive and send. It adds the headers that every response has (request
id, echoed Custom-Attributes), keeps the status for log and metrics, and raises `ClientGone` when the client leaves.
Nothing wraps `send`, so a token costs no extra call.
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from lmi.errors import ClientGone, DeadlineExceeded, LmiError, shorten
from lmi.http.body import BodyMemory

REQUEST_ID_HEADERS = ("x-amzn-sagemaker-inference-id", "x-request-id")
KEY_FIELDS = (b"x-api-key", b"api-key")
CUSTOM_ATTRIBUTES = "x-amzn-sagemaker-custom-attributes"
MAX_ATTRIBUTE_CHARS = 1024  # SageMaker's own limit; all response headers together stay under 4 KB
SAFE_ID = re.compile(r"[\x21-\x7e]{1,128}")
SAFE_ATTRIBUTES = re.compile(r"[\x20-\x7e]*")

Header = tuple[str, str]


class BodyTooLarge(LmiError):
    """The body is over `max_request_size`."""

    status = 413
    label = "body_too_large"

    def __init__(self, max_bytes: int) -> None:
        super().__init__(f"the request body must have at most {max_bytes} bytes (max_request_size)")


class UnsupportedEncoding(LmiError):
    status = 415
    label = "unsupported_encoding"

    def __init__(self, given: str) -> None:
        super().__init__(f"content-encoding must be identity, given {shorten(given)}")


class UnsupportedMediaType(LmiError):
    status = 415
    label = "unsupported_media_type"

    def __init__(self, given: str) -> None:
        super().__init__(f"content-type must be application/json, given {shorten(given)}")


class Exchange:
    """One request and its response. `status` is 0 until the response has started."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.headers = Headers(scope=scope)
        self.request_id = self._choose_id()
        self.status = 0
        self.started_s = time.monotonic()
        self.error_label = ""
        self.num_body_bytes = 0  # that were read
        self._kept_body: bytes | None = None  # that `peek` has read and `body` returns
        self._receive, self._send = receive, send

    @property
    def path(self) -> str:
        return str(self.scope["path"])

    @property
    def method(self) -> str:
        return str(self.scope["method"])

    @property
    def has_key(self) -> bool:
        """Whether the client sends an API key. Signatures and passwords do not count, because proxies read them."""
        return any(
            name in KEY_FIELDS or (name == b"authorization" and value[:7].lower() == b"bearer ")
            for name, value in self.headers.raw
        )

    def _choose_id(self) -> str:
        """Return the id that the client sent, if it is short printable ASCII, else a new one."""
        given = (self.headers.get(name, "") for name in REQUEST_ID_HEADERS)
        return next((value for value in given if SAFE_ID.fullmatch(value)), None) or uuid.uuid4().hex

    def check_is_whole(self) -> None:
        """Raise UnsupportedMediaType for a multipart body. Other types pass, because curl labels JSON as a form."""
        given = self.headers.get("content-type", "")
        if given.strip().lower().startswith("multipart/"):
            raise UnsupportedMediaType(given)

    async def peek(self, max_bytes: int, memory: BodyMemory) -> bytes:
        """Read the body, and keep it for the next call of `body`. Raises what that raises."""
        self._kept_body = await self.body(max_bytes, memory)
        return self._kept_body

    async def body(self, max_bytes: int, memory: BodyMemory) -> bytes:
        """Read the whole body. A body whose announced length is too long is refused before a byte is read.

        Its bytes count in `memory` until the caller subtracts `num_body_bytes`. Raises Overloaded if `memory` is full,
        BodyTooLarge, UnsupportedEncoding or ClientGone.
        """
        if self._kept_body is not None:
            return self._kept_body
        encodings = ", ".join(self.headers.getlist("content-encoding"))  # each field may be a list too
        if any(encoding.strip().lower() not in ("identity", "") for encoding in encodings.split(",")):
            raise UnsupportedEncoding(encodings)
        announced = int(self.headers.get("content-length", 0))
        if announced > max_bytes:
            raise BodyTooLarge(max_bytes)
        memory.check_room(0, announced)
        body, has_more = bytearray(), True
        while has_more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone("the client left before its request was complete")
            piece = message.get("body", b"")
            num_before, num_after = len(body), len(body) + len(piece)
            if num_after > max_bytes:
                raise BodyTooLarge(max_bytes)
            memory.check_room(num_before, num_after)
            memory.change(num_before, num_after)
            self.num_body_bytes = num_after
            body += piece
            has_more = message.get("more_body", False)
        return bytes(body)

    async def start(self, status: int, media_type: str, headers: Iterable[Header] = ()) -> None:
        """Send the head, without a content type if `media_type` is ""."""
        fields = [("content-type", media_type), ("x-request-id", self.request_id), *self._echoed(), *headers]
        raw = [(name.encode(), value.encode("latin-1")) for name, value in fields if value or name != "content-type"]
        self.status = status
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    def write(self, data: bytes) -> Awaitable[None]:
        """Send one record without buffering it. The result must be awaited."""
        return self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        await self._send({"type": "http.response.body", "body": data})

    async def send_whole(self, status: int, media_type: str, body: bytes, headers: Iterable[Header] = ()) -> None:
        """Send a whole response with its length."""
        await self.start(status, media_type, [("content-length", str(len(body))), *headers])
        await self.end(body)

    def _echoed(self) -> list[Header]:
        attributes = self.headers.get(CUSTOM_ATTRIBUTES, "")
        if not attributes or len(attributes) > MAX_ATTRIBUTE_CHARS or not SAFE_ATTRIBUTES.fullmatch(attributes):
            return []
        return [(CUSTOM_ATTRIBUTES, attributes)]

    @asynccontextmanager
    async def deadline(self, timeout_s: float | None) -> AsyncIterator[None]:
        """Raise DeadlineExceeded inside the block `timeout_s` after the request arrived, with None never."""
        left_s = None if timeout_s is None else max(0.0, self.started_s + timeout_s - time.monotonic())
        try:
            async with asyncio.timeout(left_s) as timeout:
                yield
        except TimeoutError:
            if not timeout.expired():
                raise
            raise DeadlineExceeded(f"no answer within predict_timeout ({timeout_s:g} s)") from None

    async def run_while_there(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` to its end. If the client leaves first, cancel `work` and raise ClientGone.

        Call this after the body was read, when `receive` can only return the disconnect. `work` runs in its own task,
        which is also faster: a task is resumed through all awaiting frames, and a route has a dozen of them above it.
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
            await asyncio.wait((worker,))  # its resources are free before the caller continues
            del worker  # its error's traceback holds this frame, and the body would wait for the garbage collector

    async def _until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
