"""Connections that read in turns, on a real event loop with real sockets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from lmi.http.flow import FairFlow

NUM = 5
PIECE_BYTES = 1024


class Turns:
    """Counts the turns of the loop, and notes in which of them each connection read."""

    def __init__(self) -> None:
        self.number = 0
        self.reads: list[tuple[int, int]] = []  # turn, connection
        self._next()

    def _next(self) -> None:
        self.number += 1
        asyncio.get_running_loop().call_soon(self._next)


class Reader(asyncio.BufferedProtocol):
    """Reads a piece, pauses, and asks to read on, as a server does with a large body."""

    flow: FairFlow

    def __init__(self, number: int, turns: Turns) -> None:
        self.number = number
        self.turns = turns
        self.buffer = bytearray(PIECE_BYTES)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self.flow = FairFlow(transport, asyncio.get_running_loop())
        self.flow.pause_reading()

    def get_buffer(self, sizehint: int) -> bytearray:
        return self.buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.turns.reads.append((self.turns.number, self.number))
        self.flow.pause_reading()
        self.flow.resume_reading()


@asynccontextmanager
async def readers() -> AsyncIterator[tuple[Turns, list[Reader]]]:
    """Connections with more pieces in the kernel than the tests read."""
    turns = Turns()
    readers_made = []
    far_ends = []
    for number in range(NUM):
        near_end, theirs = socket.socketpair()
        theirs.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                theirs.send(bytes(PIECE_BYTES))

        loop = asyncio.get_running_loop()
        readers_made.append(
            (
                await loop.create_connection(
                    lambda number=number: Reader(number, turns), sock=near_end
                )
            )[1]
        )  # type: ignore[misc]
        far_ends.append(theirs)

    try:
        yield turns, readers_made
    finally:
        for reader, far_end in zip(readers_made, far_ends, strict=True):
            reader.transport.abort()
            far_end.close()


async def read(turns: Turns, num: int) -> list[int]:
    """The connections of the next reads."""
    turns.reads.clear()
    async with asyncio.timeout(60):
        while len(turns.reads) < num:
            await asyncio.sleep(0)

    return [connection for _, connection in turns.reads[:num]]


def test_one_connection_reads_on_in_a_turn_and_all_in_their_order() -> None:
    async def run() -> None:
        async with readers() as (turns, readers_made):
            for reader in readers_made:
                reader.flow.resume_reading()

            assert await read(turns, 4 * NUM) == 4 * list(range(NUM))
            numbers = [number for number, _ in turns.reads]
            assert len(set(numbers)) == len(numbers), "two read in one turn"

    asyncio.run(run())


def test_a_connection_that_pauses_again_or_closes_loses_its_turn() -> None:
    async def run() -> None:
        async with readers() as (turns, readers_made):
            for reader in readers_made:
                reader.flow.resume_reading()

            readers_made[1].flow.pause_reading()
            readers_made[2].transport.abort()
            assert await read(turns, 6) == 2 * [0, 3, 4]

            readers_made[1].flow.resume_reading()
            assert 1 in await read(turns, 4)

    asyncio.run(run())
