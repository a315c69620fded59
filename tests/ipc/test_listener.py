"""Connections between processes that are neither engines nor front ends."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from lmi.ipc import Accepted, Connection, Connections, FrameReader, bind, frame, listen
from lmi.shared.state import Block, Phase

NOBODY = 65534


class Echo(Accepted):
    other_end = "a test"

    def take(self, payload: bytes) -> None:
        self.write(frame(payload))


class Caller(Connection):
    other_end = "an echo"

    def __init__(self) -> None:
        super().__init__()
        self.heard: asyncio.Queue[bytes] = asyncio.Queue()

    def take(self, payload: bytes) -> None:
        self.heard.put_nowait(payload)


def run(play: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await asyncio.wait_for(play(), 60)

    asyncio.run(main())


def test_any_two_processes_can_speak_in_frames(tmp_path: Path) -> None:
    async def play() -> None:
        path = str(tmp_path / "echo.sock")
        records = Block.create(tmp_path / "state", 1, 0).engines
        records[0].phase = Phase.READY
        connections = Connections(Caller, [path], records)
        async with await listen(Echo, path):
            await connections.start()
            await connections.wait_for(lambda: connections.alive)
            connections.alive[0].write(frame(b"hello"))
            assert await connections.alive[0].heard.get() == b"hello"

            await connections.close()

    run(play)


def test_a_socket_is_for_its_user_only_and_replaces_that_of_a_dead_process(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    bind(str(path)).close()
    with bind(str(path)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_process_of_another_user_is_turned_away() -> None:
    async def play() -> None:
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as client:
            path = f"{folder}/echo.sock"
            async with await listen(Echo, path):
                os.chmod(folder, 0o755)
                os.chmod(path, 0o666)
                # setuid() changes all threads of a process, those of other tests too
                child = os.fork()
                if not child:
                    try:
                        os.setuid(NOBODY)
                        client.connect(path)
                        os._exit(0 if client.recv(100) == b"" else 1)
                    finally:
                        os._exit(2)

                assert (await asyncio.to_thread(os.waitpid, child, 0))[1] == 0

    run(play)


def test_a_frame_that_is_too_long_ends_the_connection(tmp_path: Path) -> None:
    async def play() -> None:
        path = str(tmp_path / "echo.sock")
        async with await listen(Echo, path):
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(frame(b"a") + b"\xff" * 8)
            assert list(FrameReader().feed(await reader.read())) == [b"a"]
            writer.close()

    run(play)
