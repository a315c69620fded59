"""WebSocket with limits: uvicorn's protocol, with defences against hostile and broken clients.

The frames are read and written by the package `websockets`: it is kept up by its first author since
2013, has no dependency, is the one that uvicorn builds on, and reads bytes that others have read
from the socket, which HTTP's own limits need. It is imported for the first client that asks.
Nothing is compressed here, as no body of a request is.

Source: RFC 6455, whose close codes are used as in its section 7.4.1 and in IANA's registry.
"""

import asyncio
import logging
from typing import Any, ClassVar

from uvicorn.config import Config
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.frames import CloseCode, Frame
from websockets.server import ServerProtocol

from lmi.http.stalls import ReaderWatch
from lmi.http.websocket_limits import WebSocketLimits

# A message has at most MAX_FRAMES, or one for each LARGE_FRAME_BYTES that have come.
MAX_FRAMES = 1024
LARGE_FRAME_BYTES = 1024
# A client that breaks a rule may send for this long before the connection is cut. To close with
# unread bytes would reset the connection, and the client would lose the reason.
LINGER_S = 1.0
# How long a client may take to say that it has seen the end.
CLOSE_S = 2.0


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """One connection, after its first request has asked for a WebSocket."""

    num_open: ClassVar[int] = 0
    num_partial_bytes: ClassVar[int] = 0
    _reader: ReaderWatch

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        loop: asyncio.AbstractEventLoop,
        limits: WebSocketLimits,
    ) -> None:
        super().__init__(config, server_state, app_state, loop)
        self.conn = ServerProtocol(
            max_size=limits.max_message_bytes, logger=logging.getLogger("uvicorn.error")
        )
        self.ping_interval = limits.ping_s
        self.ping_timeout = limits.ping_s
        self.close_timeout = CLOSE_S
        self._limits = limits

        self._num_messages = 0
        # The frames of the message that has come in part, and their bytes.
        self._num_frames = 0
        self._num_frame_bytes = 0
        # The bytes of it that this connection counts among all.
        self._num_held_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._is_lingering = False

    def take_over(self, transport: asyncio.Transport, head: bytes) -> None:
        """Answer the head of the connection's last request."""
        WebSocketProtocol.num_open += 1
        self._reader = ReaderWatch(transport, self.loop, self._limits.stall_timeout_s)
        self.connection_made(transport)
        super().data_received(head)
        if not self.handshake_initiated:
            # The library has no event for a head that it refuses, as one of very long lines.
            transport.write(b"".join(self.conn.data_to_send()))
            transport.close()

    # Bytes in.

    def data_received(self, data: bytes) -> None:
        if self._is_lingering:
            return

        if not self.handshake_complete:
            # No client may send a message before it was let in.
            self.transport.abort()
            return

        num_before = self._num_messages
        super().data_received(data)
        if self._is_lingering:
            return

        self._hold(len(self.conn.reader.buffer) + self._num_frame_bytes)
        if self._num_messages > num_before or not self._num_held_bytes:
            self._set_timer(None)

        if self._num_held_bytes and self._timer is None:
            self._set_timer(self._limits.message_timeout_s)

    def _hold(self, num_bytes: int) -> None:
        """Count what this connection holds of a message. Too much of all connections ends this
        one.
        """
        WebSocketProtocol.num_partial_bytes += num_bytes - self._num_held_bytes
        self._num_held_bytes = num_bytes
        if WebSocketProtocol.num_partial_bytes > self._limits.max_partial_bytes:
            self._fail(CloseCode.TRY_AGAIN_LATER, "the messages that come now have no room")

    def handle_text(self, event: Frame) -> None:
        self._count_frame(event)
        super().handle_text(event)

    def handle_bytes(self, event: Frame) -> None:
        self._count_frame(event)
        super().handle_bytes(event)

    def handle_cont(self, event: Frame) -> None:
        self._count_frame(event)
        super().handle_cont(event)

    def _count_frame(self, frame: Frame) -> None:
        """Refuse a message of many small frames, each of which costs more than its bytes."""
        if frame.fin:
            self._num_messages += 1
            self._num_frames = 0
            self._num_frame_bytes = 0
            return

        self._num_frames += 1
        self._num_frame_bytes += len(frame.data)
        max_frames = max(MAX_FRAMES, self._num_frame_bytes // LARGE_FRAME_BYTES)
        if self._num_frames > max_frames:
            self._fail(CloseCode.POLICY_VIOLATION, f"a message has at most {MAX_FRAMES} frames")

    def _set_timer(self, delay_s: float | None) -> None:
        """End a message that is late after `delay_s`. With None, none is awaited."""
        if self._timer is not None:
            self._timer.cancel()

        self._timer = None
        if delay_s is not None:
            self._timer = self.loop.call_later(delay_s, self._end_late_message)

    def _end_late_message(self) -> None:
        limit_s = self._limits.message_timeout_s
        if self.read_paused or not self.writable.is_set():
            # The connection was not read, so the client is not to blame.
            self._set_timer(limit_s)
        else:
            self._fail(CloseCode.POLICY_VIOLATION, f"no whole message came within {limit_s:g} s")

    def _fail(self, code: CloseCode, reason: str) -> None:
        """Close the connection because of what the client does."""
        if self.close_sent or self.transport.is_closing():
            return

        self.conn.fail(code, reason)
        self.handle_parser_exception()

    def handle_parser_exception(self) -> None:
        """Tell the application and the client why the connection ends, and read on for a while."""
        close = self.conn.close_sent
        code = CloseCode.ABNORMAL_CLOSURE if close is None else close.code
        self.queue.put_nowait({"type": "websocket.disconnect", "code": code})
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        self._linger()

    def _linger(self) -> None:
        self._is_lingering = True
        self._set_timer(None)
        self._hold(0)
        self.stop_keepalive()
        self.transport.resume_reading()
        # TLS has no such end.
        if self.transport.can_write_eof():
            self.transport.write_eof()

        self.close_timer = self.loop.call_later(LINGER_S, self.transport.abort)

    def keepalive_timeout(self) -> None:
        """End a connection whose client has not answered a ping, unless it may not have read it."""
        is_read = self.writable.is_set() and not self.read_paused
        if is_read and not self._reader.num_unread():
            limit_s = self._limits.ping_s
            self._fail(CloseCode.INTERNAL_ERROR, f"no answer to a ping within {limit_s:g} s")
        else:
            self.pending_ping_payload = None
            self.schedule_ping()

    # Bytes out.

    def pause_writing(self) -> None:
        """Note that the client reads too slowly. It is not read either, because it would get an
        answer to each of its pings.
        """
        super().pause_writing()
        self.transport.pause_reading()
        self._reader.begin()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._reader.end()
        if not self.read_paused and not self.transport.is_closing():
            self.transport.resume_reading()

    async def receive(self) -> Any:
        """Return the next message. The connection is read on when the application has them all."""
        message = await super().receive()
        if not self.writable.is_set() and not self.transport.is_closing():
            self.transport.pause_reading()

        return message

    async def send(self, message: Any) -> None:
        """Send a message. Raises ClientDisconnected if the connection has ended."""
        await self.writable.wait()
        if self.handshake_complete and self.close_sent:
            raise ClientDisconnected

        await super().send(message)
        if self.initial_response is not None and self.close_sent:
            # Else uvicorn would complain in the log that there was no handshake.
            self.handshake_complete = True

    # The end.

    async def run_asgi(self) -> None:
        """Run the application. One that is cancelled, because the process ends, is cut and logs
        nothing.
        """
        app = self.app

        async def cut_if_cancelled(scope: Any, receive: Any, send: Any) -> None:
            try:
                await app(scope, receive, send)
            except asyncio.CancelledError:
                self.handshake_complete = True
                self.transport.close()

        self.app = cut_if_cancelled
        await super().run_asgi()

    def shutdown(self) -> None:
        """Leave an open connection to the application, which closes it after its last answer."""
        if self.close_sent or not self.handshake_complete:
            super().shutdown()

    def on_task_complete(self, task: asyncio.Task[None]) -> None:
        super().on_task_complete(task)
        # What is left to read must be read.
        if self.writable.is_set() and self in self.connections:
            self._reader.begin()

    def connection_lost(self, exc: Exception | None) -> None:
        WebSocketProtocol.num_open -= 1
        self._set_timer(None)
        self._hold(0)
        self._reader.end()
        super().connection_lost(exc)
