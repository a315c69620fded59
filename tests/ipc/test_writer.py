"""Writes to a connection from a thread that is not the event loop's."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable
from typing import cast

import pytest

from lmi.ipc import ThreadSafeWriter

MAX_UNSENT_BYTES = 8 << 20
PIECE = 100_000


class End(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.lost = asyncio.Event()
        self.writer = ThreadSafeWriter(cast(asyncio.Transport, transport), MAX_UNSENT_BYTES)

    def resume_writing(self) -> None:
        self.writer.resume()

    def connection_lost(self, error: Exception | None) -> None:
        self.writer.close()
        self.lost.set()


def run(play: Callable[[End, socket.socket], Awaitable[None]]) -> None:
    """Run `play` with a writer on a real socket and the other end of that socket."""

    async def main() -> None:
        near_end, theirs = socket.socketpair()
        theirs.settimeout(60)
        loop = asyncio.get_running_loop()
        transport, end = await loop.create_connection(End, sock=near_end)
        try:
            await asyncio.wait_for(play(end, theirs), 60)
        finally:
            transport.abort()
            theirs.close()

    asyncio.run(main())


def read(source: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        data += source.recv(num_bytes - len(data))

    return data


def test_what_the_kernel_takes_is_there_though_the_loop_never_runs() -> None:
    async def play(end: End, theirs: socket.socket) -> None:
        thread = threading.Thread(target=end.writer.write, args=(b"at once",))
        thread.start()
        thread.join()
        # This coroutine has not yielded to the loop
        assert read(theirs, 7) == b"at once"

    run(play)


def test_a_slow_reader_gets_everything_in_order_and_then_the_writes_are_direct_again() -> None:
    pieces = [bytes([number]) * PIECE for number in range(50)]

    async def play(end: End, theirs: socket.socket) -> None:
        def write() -> None:
            for piece in pieces:
                end.writer.write(piece)

        await asyncio.to_thread(write)
        assert await asyncio.to_thread(read, theirs, PIECE * len(pieces)) == b"".join(pieces)

        while end.writer._is_behind:
            await asyncio.sleep(0)

        end.writer.write(b"direct")
        assert read(theirs, 6) == b"direct"

    run(play)


def test_a_reader_that_stops_is_cut_off(caplog: pytest.LogCaptureFixture) -> None:
    async def play(end: End, theirs: socket.socket) -> None:
        for _ in range(20 + MAX_UNSENT_BYTES // PIECE):
            end.writer.write(bytes(PIECE))

        await end.lost.wait()

    run(play)
    assert "stopped reading" in caplog.text


def test_writes_after_the_end_go_nowhere_and_raise_nothing() -> None:
    async def play(end: End, theirs: socket.socket) -> None:
        theirs.close()
        await end.lost.wait()
        await asyncio.to_thread(end.writer.write, b"too late")

    run(play)
