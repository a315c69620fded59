"""The event loop of an engine in other processes, with tasks that stand for sequences."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

from handlers.driven.loop import EngineLoop
from handlers.driven.outputs import SequenceOutput

WAIT_S = 30.0


@pytest.fixture
def loop() -> Iterator[EngineLoop]:
    loop = EngineLoop("test")
    yield loop
    loop.cancel_all(WAIT_S)
    loop.end_loop(WAIT_S)
    assert not loop._thread.is_alive()


async def follow(loop: EngineLoop, name: str, is_shared: asyncio.Event | None = None) -> None:
    """Wait for the common step, put one output, and wait for ever."""
    if is_shared is not None:
        await is_shared.wait()

    loop.put(SequenceOutput(name, [7]))
    await asyncio.Event().wait()


async def number() -> int:
    return 4


async def fail() -> None:
    raise ValueError("no such adapter")


def test_outputs_of_one_turn_stay_together(loop: EngineLoop) -> None:
    step = asyncio.Event()
    for name in ("1.0", "2.0", "3.0"):
        loop.begin(name, follow(loop, name, step))

    assert loop.take(0.0) == []

    async def make_a_step() -> None:
        step.set()

    loop.run(make_a_step())
    assert [output.id for output in loop.take(WAIT_S)] == ["1.0", "2.0", "3.0"]


def test_a_wake_ends_the_wait_for_outputs(loop: EngineLoop) -> None:
    loop.wake()
    started = time.monotonic()
    assert loop.take(WAIT_S) == [] and time.monotonic() - started < WAIT_S


def test_a_cancelled_task_leaves_nothing_behind_even_if_it_had_not_begun(loop: EngineLoop) -> None:
    loop.begin("1.0", follow(loop, "1.0"))
    assert loop.take(WAIT_S)
    loop.begin("2.0", follow(loop, "2.0"))
    loop.abort(["1.0", "2.0", "never"])
    deadline = time.monotonic() + WAIT_S
    while loop._tasks:
        assert time.monotonic() < deadline, "a task is left"
        assert loop.run(number()) == 4


def test_a_task_that_begins_again_by_its_name_can_be_cancelled(loop: EngineLoop) -> None:
    loop.begin("1.0", follow(loop, "1.0"))
    assert loop.take(WAIT_S)
    loop.abort(["1.0"])
    loop.begin("1.0", follow(loop, "1.0"))
    assert loop.take(WAIT_S), "the second one has begun, and the first has ended"
    assert list(loop._tasks) == ["1.0"]


def test_what_a_coroutine_raises_is_raised_here(loop: EngineLoop) -> None:
    with pytest.raises(ValueError, match="no such adapter"):
        loop.run(fail())
