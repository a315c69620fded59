"""A WebSocket as the application sees it, and the request that opens it.

The request goes the way of every other: `ErrorMiddleware` checks who may come, and answers what is
refused with the status and in the words of HTTP. Source: ASGI's specification of WebSocket.
"""

import asyncio
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lmi.http.exchange import WEBSOCKET

SCHEMES = {"ws": "http", "wss": "https"}
# The extension of ASGI that answers a request with something else than a WebSocket.
REFUSAL = "websocket.http.response"


async def open_socket(scope: Scope, receive: Receive, send: Send, server: ASGIApp) -> None:
    """Let `server` answer the request that opens a WebSocket, and all that comes on it."""
    connect = await receive()
    assert connect["type"] == "websocket.connect"
    socket = Socket(receive, send, can_refuse=REFUSAL in scope.get("extensions", {}))
    request = {
        **scope,
        "type": "http",
        "method": "GET",
        "scheme": SCHEMES[scope["scheme"]],
        WEBSOCKET: socket,
    }
    await server(request, _nothing, socket.refuse)


async def _nothing() -> Message:
    """The request has no body, and its client is heard by `Socket.receive` alone."""
    return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]


class Socket:
    """One WebSocket."""

    def __init__(self, receive: Receive, send: Send, *, can_refuse: bool) -> None:
        self._receive = receive
        self._send = send
        self._can_refuse = can_refuse
        self._is_closed = False
        # Called when the server shuts down.
        self.on_leave: Callable[[], None] | None = None

    async def refuse(self, message: Message) -> None:
        """Send a part of the response that refuses the WebSocket."""
        if self._can_refuse:
            await self._send({**message, "type": f"websocket.{message['type']}"})
        elif message["type"] == "http.response.start":
            await self._send({"type": "websocket.close"})

    async def accept(self, headers: list[tuple[bytes, bytes]]) -> None:
        await self._send({"type": "websocket.accept", "headers": headers})

    async def receive(self) -> bytes | None:
        """Return the next message, as bytes also if it is text, or None at the end."""
        message = await self._receive()
        if message["type"] == "websocket.disconnect":
            self._is_closed = True
            return None

        text: str | None = message.get("text")
        return bytes(message["bytes"]) if text is None else text.encode()

    async def send(self, message: bytes) -> None:
        """Send a message: as text, unless it is none. One to a client that has gone is dropped."""
        if self._is_closed:
            return

        event: Message = {"type": "websocket.send"}
        try:
            event["text"] = message.decode()
        except UnicodeDecodeError:
            event["bytes"] = message

        try:
            await self._send(event)
        except OSError:
            self._is_closed = True

    async def close(self, code: int, reason: str) -> None:
        if not self._is_closed:
            self._is_closed = True
            await self._send({"type": "websocket.close", "code": code, "reason": reason})

    def leave(self) -> None:
        """Close as soon as nothing runs, because this process ends."""
        if self.on_leave is not None:
            self.on_leave()
