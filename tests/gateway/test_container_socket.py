"""The WebSocket of a container that says nothing more."""

from __future__ import annotations

import asyncio
import time

import pytest
from websockets.client import ClientProtocol
from websockets.frames import Opcode
from websockets.server import ServerProtocol
from websockets.uri import parse_uri

from lmi.gateway.container import ResponseCut
from lmi.gateway.container_socket import MAX_PINGS, ContainerSocket

PING_S = 0.02


class SilentContainer:
    """It accepts a WebSocket, and answers no ping."""

    def __init__(self) -> None:
        self.num_pings = 0
        self.has_ended = asyncio.Event()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        protocol = ServerProtocol()
        while data := await reader.read(1 << 16):
            protocol.receive_data(data)
            for event in protocol.events_received():
                if getattr(event, "opcode", None) is Opcode.PING:
                    self.num_pings += 1
                elif not self.num_pings:
                    protocol.send_response(protocol.accept(event))
                    writer.writelines(protocol.data_to_send())

        writer.close()
        await writer.wait_closed()
        self.has_ended.set()


def test_a_container_that_answers_no_ping_is_lost() -> None:
    container = SilentContainer()

    async def wait_for_part() -> None:
        server = await asyncio.start_server(container, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            uri = parse_uri(f"ws://127.0.0.1:{port}/")
            socket = ContainerSocket(ClientProtocol(uri), reader, writer, PING_S)
            await socket.open([("Host", "a")])
            try:
                await socket.receive()
            finally:
                writer.close()
                await writer.wait_closed()
                await container.has_ended.wait()

    started_s = time.monotonic()
    with pytest.raises(ResponseCut, match=f"has not answered {MAX_PINGS} pings"):
        asyncio.run(wait_for_part())

    assert time.monotonic() - started_s >= PING_S * (MAX_PINGS + 1)
    assert container.num_pings == MAX_PINGS
