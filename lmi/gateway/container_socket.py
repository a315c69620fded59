"""The WebSocket of a container, as SageMaker opens it for a stream in both directions.

The package `websockets` reads and writes its frames. Its own connections join the frames of a
message, whose bounds a client of the gateway sees, so they are read here as they come.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from websockets.client import ClientProtocol
from websockets.exceptions import InvalidStatus
from websockets.frames import CloseCode, Frame, Opcode
from websockets.protocol import State
from websockets.uri import WebSocketURI

from lmi.gateway.container import (
    MAX_WAITING_BYTES,
    Container,
    OutOfTime,
    ResponseCut,
    Unreachable,
)
from lmi.gateway.payload_part import PayloadPart
from lmi.http.exchange import Header

# A container that has been silent for so long gets a ping, and is lost after so many without a
# sign of life. As on the platform.
PING_S = 60.0
MAX_PINGS = 5
OF_MESSAGES = (Opcode.CONT, Opcode.TEXT, Opcode.BINARY)
# A container must read on within this time.
STALL_S = 60.0


class SocketRefused(Exception):
    """The container answered the request for a WebSocket with something else."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@asynccontextmanager
async def open_socket(
    container: Container,
    target: str,
    headers: Iterable[Header],
    max_message_bytes: int,
    timeout_s: float,
) -> "AsyncIterator[ContainerSocket]":
    """Yield a WebSocket, once the container has accepted it. Leaving the block cuts it, and ends
    what the container does for it.

    Raises SocketRefused, Unreachable, or OutOfTime where it is not accepted within `timeout_s`.
    """
    deadline_s = asyncio.get_running_loop().time() + timeout_s
    try:
        async with asyncio.timeout_at(deadline_s):
            reader, writer = await container.connect(limit=MAX_WAITING_BYTES)
    except TimeoutError:
        raise OutOfTime(f"no connection to {container.url} within {timeout_s:g} s") from None

    uri = WebSocketURI(False, container.host, container.port, container.path(target), "")
    protocol = ClientProtocol(uri, max_size=max_message_bytes)
    socket = ContainerSocket(protocol, reader, writer)
    try:
        try:
            async with asyncio.timeout_at(deadline_s):
                await socket.open(container.fields(headers))
        except TimeoutError:
            raise OutOfTime(f"no WebSocket within {timeout_s:g} s") from None

        yield socket
    finally:
        writer.transport.abort()


class ContainerSocket:
    """One WebSocket. `close_code` and `close_reason` are there once it has ended."""

    def __init__(
        self,
        protocol: ClientProtocol,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        ping_s: float = PING_S,
    ) -> None:
        self._protocol = protocol
        self._reader = reader
        self._writer = writer
        self._ping_s = ping_s
        self._frames: deque[Frame] = deque()
        # Whether the message that comes is text.
        self._is_text = False
        # Whether the last part that was sent left its message open.
        self._is_message_open = False

    async def open(self, headers: Iterable[Header]) -> None:
        """Wait until the container accepts. Raises SocketRefused or Unreachable."""
        request = self._protocol.connect()
        del request.headers["Host"]
        for name, value in headers:
            request.headers[name] = value

        self._protocol.send_request(request)
        await self._flush()
        while self._is_unanswered and await self._read():
            pass

        error = self._protocol.handshake_exc
        if isinstance(error, InvalidStatus):
            body = error.response.body or b""
            raise SocketRefused(error.response.status_code, body.decode(errors="replace"))

        if error is not None or self._protocol.state is State.CONNECTING:
            raise Unreachable(f"the container opened no WebSocket: {error or 'it closed'}")

    async def send(self, part: PayloadPart) -> None:
        """Send a part of a message. One after the container's end is dropped. Raises ResponseCut if
        the container does not read.
        """
        if self._protocol.state is not State.OPEN:
            return

        if self._is_message_open:
            self._protocol.send_continuation(part.data, part.is_last)
        elif part.is_text:
            self._protocol.send_text(part.data, part.is_last)
        else:
            self._protocol.send_binary(part.data, part.is_last)

        self._is_message_open = not part.is_last
        await self._flush()

    async def receive(self) -> PayloadPart | None:
        """Return the next part, or None at the end. Raises ResponseCut for a container that is
        silent.
        """
        while not self._frames:
            if self._is_over or not await self._read():
                return None

        frame = self._frames.popleft()
        if frame.opcode is not Opcode.CONT:
            self._is_text = frame.opcode is Opcode.TEXT

        return PayloadPart(bytes(frame.data), self._is_text, frame.fin)

    async def close(self) -> None:
        """Tell the container that nothing more will come."""
        if self._protocol.state is State.OPEN:
            self._protocol.send_close(CloseCode.NORMAL_CLOSURE)
            await self._flush()

    @property
    def _is_unanswered(self) -> bool:
        """Whether the container has neither accepted nor refused."""
        is_connecting = self._protocol.state is State.CONNECTING
        return is_connecting and self._protocol.handshake_exc is None

    @property
    def _is_over(self) -> bool:
        """Whether the container has closed, or has sent what is no WebSocket."""
        return self._protocol.close_rcvd is not None or self._protocol.parser_exc is not None

    @property
    def close_code(self) -> int:
        """The code with which the container has closed, ABNORMAL_CLOSURE without one."""
        close = self._protocol.close_rcvd
        return CloseCode.ABNORMAL_CLOSURE if close is None else close.code

    @property
    def close_reason(self) -> str:
        """Why it has closed, or what was wrong with what it sent."""
        close = self._protocol.close_rcvd or self._protocol.close_sent
        return "" if close is None else close.reason

    async def _read(self) -> bool:
        """Read what has come next. Returns False at the end of the connection."""
        data = await self._wait_for_data()
        if data:
            self._protocol.receive_data(data)
        else:
            self._protocol.receive_eof()

        for event in self._protocol.events_received():
            if isinstance(event, Frame) and event.opcode in OF_MESSAGES:
                self._frames.append(event)

        await self._flush()
        return bool(data)

    async def _wait_for_data(self) -> bytes:
        for num_pings in range(MAX_PINGS + 1):
            try:
                async with asyncio.timeout(self._ping_s):
                    return await self._reader.read(MAX_WAITING_BYTES)
            except TimeoutError:
                if self._protocol.state is State.OPEN and num_pings < MAX_PINGS:
                    self._protocol.send_ping(b"")
                    await self._flush()
            except OSError:
                return b""

        raise ResponseCut(f"the container has not answered {MAX_PINGS} pings")

    async def _flush(self) -> None:
        """Write what waits to be sent, and let a container that reads slowly catch up."""
        for data in self._protocol.data_to_send():
            if data:
                self._writer.write(data)

        try:
            async with asyncio.timeout(STALL_S):
                await self._writer.drain()
        except TimeoutError:
            raise ResponseCut(f"the container has read nothing for {STALL_S:g} s") from None
        except OSError:
            # What it has sent before can still be read.
            return
