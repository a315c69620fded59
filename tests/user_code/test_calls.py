"""Both ends of the user code socket, in one process: calls in order, windows, dropped and lost
calls.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Generator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from lmi.errors import EngineLost, RequestTooLarge, Unavailable, UserCodeFailed
from lmi.shared.state import Block, Phase
from lmi.user_code.calls import (
    MAX_CHUNK_BYTES,
    WINDOW,
    Call,
    Feed,
    Handle,
    Head,
    Open,
    UserCodeWorkers,
)
from lmi.user_code.worker import CallConnection, CodeThread


class CountingModel:
    """Answers a number with that many pieces, and counts the pieces that it made."""

    def __init__(self) -> None:
        self.num_made = 0
        self.num_closed = 0
        self.thread: threading.Thread | None = None

    def handle(
        self, properties: Mapping[str, str], query: Mapping[str, str], body: bytes
    ) -> Generator[Head | bytes]:
        self.thread = threading.current_thread()
        if body == b"large":
            yield Head(200, "", {})
            yield b"x" * (2 * MAX_CHUNK_BYTES + 1)
            return

        try:
            yield Head(200, "a/b", {"x": "y"}, True)
            yield from self._numbers(int(body))
        finally:
            self.num_closed += 1

    def _numbers(self, num: int) -> Iterator[bytes]:
        for number in range(num):
            self.num_made += 1
            yield b"%d " % number

    def answers(self, opened: Open, request: Any, request_id: int) -> Any:
        raise KeyError(opened.prompts[0])


@asynccontextmanager
async def working(
    folder: Path,
) -> AsyncIterator[tuple[UserCodeWorkers, CountingModel, asyncio.Server]]:
    model = CountingModel()
    path = str(folder / "code.sock")
    record = Block.create(folder / "state", 0, 0, 1).formatters[0]
    thread = CodeThread(record)
    server = await asyncio.get_running_loop().create_unix_server(
        lambda: CallConnection(model, thread), path
    )
    record.phase = Phase.READY
    workers = UserCodeWorkers([path], [record])
    await workers.start()
    try:
        yield workers, model, server
    finally:
        await workers.close()
        server.close()


def handle(body: bytes) -> Handle:
    return Handle({}, {}, body)


async def all_of(call: Call) -> list[Head | bytes]:
    messages = []
    while (message := await call.take()) is not None:
        messages.append(message)

    return messages


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


def test_calls_come_back_whole_and_are_worked_on_one_after_the_other(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with working(tmp_path) as (workers, model, _):
            calls = [await workers.begin(handle(b"100")) for _ in range(3)]
            head, *pieces = await all_of(calls[0])

            assert head == Head(200, "a/b", {"x": "y"}, True)
            assert len(pieces) == 100
            assert model.num_made <= 100 + WINDOW + 1, (
                "the second waits for its reader, the third for the second"
            )
            assert len(await all_of(calls[1])) == len(await all_of(calls[2])) == 101
            assert model.thread is not threading.main_thread()

    asyncio.run(scenario())


def test_code_makes_no_more_than_a_window_ahead_of_its_reader(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with working(tmp_path) as (workers, model, _):
            call = await workers.begin(handle(b"1000"))
            await until(lambda: model.num_made > WINDOW)
            await asyncio.sleep(0.05)
            assert model.num_made == WINDOW + 1, "one more waits for room"

            call.close()
            await until(lambda: model.num_closed == 1)

            assert len(await all_of(await workers.begin(handle(b"3")))) == 4, (
                "the thread is free for the next"
            )

    asyncio.run(scenario())


def test_a_large_piece_is_cut_and_a_body_that_fits_in_no_frame_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with working(tmp_path) as (workers, _, _):
            _, *pieces = await all_of(await workers.begin(handle(b"large")))
            assert [len(piece) for piece in pieces if isinstance(piece, bytes)] == [
                MAX_CHUNK_BYTES
            ] * 2 + [1]
            with pytest.raises(RequestTooLarge, match="does not fit"):
                await workers.begin(handle(bytes(65 << 20)))

    asyncio.run(scenario())


def test_what_the_code_raises_ends_the_call_and_what_was_sent_after_it_is_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with working(tmp_path) as (workers, _, _):
            call = await workers.begin(Open(["p"], {}, False, False, False))
            call.send(Feed(0, [], "length"))
            with pytest.raises(UserCodeFailed, match="KeyError: 'p'"):
                await call.take()

            with pytest.raises(UserCodeFailed, match="ValueError"):
                await all_of(await workers.begin(handle(b"no number")))

    asyncio.run(scenario())
    raised = [record.exc_info[0] for record in caplog.records if record.exc_info]

    assert raised == [KeyError, ValueError], "the Feed after the failure did nothing"


def test_a_worker_that_goes_ends_its_calls_and_takes_no_more(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with working(tmp_path) as (workers, _, server):
            call = await workers.begin(handle(b"1000"))
            await call.take()
            server.close()
            workers.records[0].phase = Phase.LOST
            workers.open[0].close()
            with pytest.raises(EngineLost):
                await all_of(call)

            await until(lambda: not workers.open)
            with pytest.raises(Unavailable, match="not ready: lost"):
                await workers.begin(handle(b"1"))

    asyncio.run(scenario())


def test_nonsense_on_the_socket_closes_the_connection(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with working(tmp_path) as (workers, _, _):
            reader, writer = await asyncio.open_unix_connection(str(tmp_path / "code.sock"))
            writer.write(b"\x03\x00\x00\x00abc")
            try:
                assert await reader.read() == b""
            except ConnectionResetError:
                pass

            writer.close()
            assert len(await all_of(await workers.begin(handle(b"2")))) == 3, (
                "the others are served on"
            )

    asyncio.run(scenario())
