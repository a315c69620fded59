"""A piece of a streamed response is written before `send` returns, unless the client
reads slowly.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.flow_control import FlowControl

from lmi.http.exchange import SENT
from lmi.http.protocol import Cycle


class Written(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.data = b""

    def write(self, data: Any) -> None:
        self.data += data


def begun(transport: Written, method: str = "POST", version: str = "1.1") -> Cycle:
    """Return a request whose streamed response has begun."""
    none = cast(Any, None)
    cycle = Cycle(
        scope=cast(Any, {"type": "http", "method": method, "http_version": version}),
        transport=transport,
        flow=FlowControl(transport),
        logger=none,
        access_logger=none,
        access_log=False,
        default_headers=[],
        message_event=asyncio.Event(),
        expect_100_continue=False,
        keep_alive=True,
        on_response=lambda: None,
    )
    cycle.more_body = False
    cycle.is_leaving = lambda: False
    return cycle


async def start(cycle: Cycle, transport: Written) -> None:
    await cycle.send({"type": "http.response.start", "status": 200, "headers": []})
    transport.data = b""


def piece(body: bytes) -> dict[str, object]:
    return {"type": "http.response.body", "body": body, "more_body": True}


def test_a_piece_is_one_chunk_that_is_written_before_send_returns() -> None:
    async def test() -> None:
        transport = Written()
        cycle = begun(transport)
        await start(cycle, transport)
        assert cycle.send(piece(b"x" * 18)) is SENT
        assert transport.data == b"12\r\n" + b"x" * 18 + b"\r\n"
        await SENT

    asyncio.run(test())


def test_an_empty_piece_does_not_end_the_stream() -> None:
    async def test() -> None:
        transport = Written()
        cycle = begun(transport)
        await start(cycle, transport)
        await cycle.send(piece(b""))
        assert transport.data == b"" and not cycle.response_complete

    asyncio.run(test())


def test_a_piece_for_a_slow_reader_waits_until_it_reads_on() -> None:
    async def test() -> None:
        transport = Written()
        cycle = begun(transport)
        await start(cycle, transport)
        cycle.flow.pause_writing()
        sent = cycle.send(piece(b"late"))
        waiting = asyncio.ensure_future(sent)
        await asyncio.sleep(0)
        assert transport.data == b"" and not waiting.done()

        cycle.flow.resume_writing()
        await asyncio.wait_for(waiting, 60)

        assert transport.data == b"4\r\nlate\r\n"

    asyncio.run(test())


def test_nothing_is_written_for_a_client_that_has_left_or_asked_for_the_head() -> None:
    async def test() -> None:
        transport = Written()
        gone = begun(transport)
        head = begun(transport, "HEAD")
        await start(gone, transport)
        gone.disconnected = True
        await gone.send(piece(b"nobody"))
        await start(head, transport)
        await head.send(piece(b"nobody"))

        assert transport.data == b""

    asyncio.run(test())


def test_a_piece_for_an_http_1_0_client_has_no_framing() -> None:
    async def test() -> None:
        transport = Written()
        cycle = begun(transport, version="1.0")
        await start(cycle, transport)
        await cycle.send(piece(b"plain"))
        assert transport.data == b"plain"

    asyncio.run(test())
