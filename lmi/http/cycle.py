"""One request on a connection, and its response. The protocol of the connection makes a cycle for
each request, and its application talks to it in ASGI.

To that of uvicorn ours adds that the pieces of a stream are written at once, and that an answer may
come before the body is whole.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from lmi.http.exchange import SENT

# Up to this many bytes of a body that was answered early are discarded to keep the connection.
MAX_UNREAD_BYTES = 64 << 10


class Cycle(RequestResponseCycle):
    """One request and its response. The protocol sets what it knows of the request."""

    num_head_bytes = 0
    # The bytes of the body that have not arrived. Of a chunked body it is not known.
    num_missing_bytes = 0
    # Whether the body comes in chunks.
    is_chunked = False

    # Whether the answer began before the body was complete, whose last bytes are not awaited then.
    is_early = False
    # Whether the answer ends where the connection does, as one to an HTTP/1.0 client may.
    is_delimited_by_close = False
    # Tells whether the server leaves, and a connection ends with its next answer.
    is_leaving: Callable[[], bool]

    def send(self, message: Any) -> Awaitable[None]:  # type: ignore[override]  # any awaitable does
        """Send a part of the response. A piece of a stream is written before this returns, if the
        client keeps up.
        """
        if message.get("more_body") and self._write_chunk(message["body"]):
            return SENT

        if message["type"] == "http.response.start":
            return self._start(message)

        if self.is_delimited_by_close and message["type"] == "http.response.body":
            self.expected_content_length = len(message.get("body", b""))

        return super().send(message)

    def note_departure(self) -> None:
        """Let the application see that the client has left."""
        self.disconnected = True
        self.message_event.set()

    async def run_asgi(self, app: Any) -> None:
        """Run the application. A request that is cancelled, because the process ends, is cut and
        logs nothing.
        """

        async def cut_if_cancelled(scope: Any, receive: Any, send: Any) -> None:
            try:
                await app(scope, receive, send)
            except asyncio.CancelledError:
                self.disconnected = True
                self.transport.close()

        await super().run_asgi(cut_if_cancelled)

    def _write_chunk(self, body: bytes) -> bool:
        """Write one chunk. Returns False, and writes nothing, where uvicorn has to do it: it waits
        for the client, frames the body otherwise, or raises an error.
        """
        is_open = self.response_started and not self.response_complete
        if not (is_open and self.chunked_encoding and body):
            return False

        if self.flow.write_paused or self.disconnected:
            return False

        self.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        return True

    async def _start(self, message: Any) -> None:
        """Send the head, and decide whether the connection is kept and how its end is marked."""
        is_much_missing = self.waiting_for_100_continue or self.num_missing_bytes > MAX_UNREAD_BYTES
        self.is_early = self.more_body and is_much_missing
        if self.is_early or self.is_leaving():
            self.keep_alive = False

        has_length = any(name == b"content-length" for name, _ in message.get("headers", []))
        if self.scope["http_version"] == "1.0" and not has_length:
            self.is_delimited_by_close = True
            self.chunked_encoding = False

        await super().send(message)
        if self.is_early:
            # The protocol lingers, and closes the connection itself.
            self.keep_alive = True
