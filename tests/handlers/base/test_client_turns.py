"""The turns in which work of clients, as the compilation of guides, begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from functools import partial
from threading import Event

import pytest

from handlers.base.client_turns import ClientTurns
from tests.machine import wait_until

TIMEOUT_S = 120.0
HOG = 1
LIGHT = 2


class Bench:
    """Guides that take until the test lets them end."""

    def __init__(self, num_threads: int) -> None:
        self.turns: ClientTurns[str] = ClientTurns(num_threads, "guides")
        self.begun: list[str] = []
        self.ends: dict[str, Event] = {}

    def add(
        self, client: int, name: str, future: Future[str] | None = None, price: float = 1.0
    ) -> Future[str]:
        self.ends.setdefault(name, Event())
        future = future or Future()
        self.turns.submit(client, self.compile(name), future, price)
        return future

    def order(self, *futures: Future[str]) -> list[str]:
        """Let all end, and return in which order they began."""
        for end in self.ends.values():
            end.set()

        wait(futures, TIMEOUT_S)
        self.turns.close()
        return self.begun

    def compile(self, name: str) -> Callable[[], str]:
        def run() -> str:
            self.begun.append(name)
            assert self.ends[name].wait(TIMEOUT_S)
            return name

        return run


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench(2)
    yield bench
    for end in bench.ends.values():
        end.set()

    bench.turns.close()


def test_a_first_guide_waits_for_none_of_a_client_who_sent_many(bench: Bench) -> None:
    hogs = [bench.add(HOG, f"costly {number}") for number in range(20)]
    light = bench.add(LIGHT, "light")
    bench.ends["light"].set()
    assert light.result(TIMEOUT_S) == "light"
    assert not any(future.done() for future in hogs)


def test_guides_of_several_clients_begin_in_turns() -> None:
    bench = Bench(1)
    hog_future = bench.add(HOG, "first")
    futures = [
        bench.add(HOG, "a1"),
        bench.add(HOG, "a2"),
        bench.add(LIGHT, "b1"),
        bench.add(LIGHT, "b2"),
    ]
    for end in bench.ends.values():
        end.set()

    wait([hog_future, *futures], TIMEOUT_S)
    assert bench.begun[1:] in (["a1", "b1", "a2", "b2"], ["b1", "a1", "b2", "a2"])

    bench.turns.close()


def test_a_guide_that_a_crowd_has_asked_for_begins_in_the_turn_of_the_first_client_who_may(
    bench: Bench,
) -> None:
    for number in range(20):
        shared = bench.add(HOG, f"costly {number}")

    assert bench.add(LIGHT, "costly 19", shared) is shared

    bench.ends["costly 19"].set()
    assert shared.result(TIMEOUT_S) == "costly 19"

    last = bench.add(HOG, "last")
    for end in bench.ends.values():
        end.set()

    assert last.result(TIMEOUT_S) == "last"
    assert bench.begun.count("costly 19") == 1


def test_a_guide_that_nobody_waits_for_does_not_begin_and_one_that_fails_gives_its_place_back(
    bench: Bench,
) -> None:
    bench.add(HOG, "costly")
    gone = bench.add(HOG, "gone")
    assert gone.cancel()

    failed: Future[str] = Future()
    bench.turns.submit(HOG, partial(int, "x"), failed)  # type: ignore[arg-type]
    last = bench.add(HOG, "last")
    for end in bench.ends.values():
        end.set()

    assert isinstance(failed.exception(TIMEOUT_S), ValueError)
    assert last.result(TIMEOUT_S) == "last" and "gone" not in bench.begun


def test_a_client_has_its_turn_when_it_has_had_the_least_whatever_the_number_of_its_pieces() -> (
    None
):
    bench = Bench(1)
    hog_future = bench.add(HOG, "first", price=100)
    costly = [bench.add(HOG, f"costly {number}", price=100) for number in range(2)]
    cheap = [bench.add(LIGHT, f"cheap {number}", price=1) for number in range(6)]
    order = bench.order(hog_future, *costly, *cheap)

    assert order[1:] == ["costly 0", *(f"cheap {number}" for number in range(6)), "costly 1"]


def test_of_one_client_a_cheap_piece_goes_before_costly_ones_that_have_not_waited_for_longer() -> (
    None
):
    bench = Bench(1)
    hog_future = bench.add(HOG, "first", price=100)
    costly = [bench.add(HOG, f"costly {number}", price=100) for number in range(2)]
    cheap = bench.add(HOG, "cheap", price=1)

    assert bench.order(hog_future, *costly, cheap)[1:] == ["cheap", "costly 0", "costly 1"]


def test_a_costly_piece_is_not_overtaken_for_ever() -> None:
    bench = Bench(1)
    hog_future = bench.add(HOG, "first", price=1)
    costly = bench.add(HOG, "costly", price=3)
    done = [hog_future]
    for number in range(6):
        done.append(bench.add(HOG, f"cheap {number}", price=1))
        bench.ends[bench.begun[-1]].set()
        wait([done[-2]], TIMEOUT_S)
        wait_until(lambda number=number: len(bench.begun) == number + 2, "the next has begun")
        if bench.begun[-1] == "costly":
            break

    assert "costly" in bench.begun and number >= 2

    bench.order(costly, *done)


def test_a_client_who_asked_for_nothing_for_long_has_not_saved_up_turns() -> None:
    bench = Bench(1)
    bench.ends["early"] = Event()
    bench.ends["early"].set()
    assert bench.add(LIGHT, "early").result(TIMEOUT_S) == "early"

    hog_future = bench.add(HOG, "first", price=100)
    wait_until(lambda: "first" in bench.begun, "the first has begun")
    futures = [
        bench.add(HOG, "a1"),
        bench.add(HOG, "a2"),
        bench.add(LIGHT, "b1"),
        bench.add(LIGHT, "b2"),
    ]

    assert bench.order(hog_future, *futures)[2:] in (
        ["a1", "b1", "a2", "b2"],
        ["b1", "a1", "b2", "a2"],
    )


def test_work_that_comes_while_or_after_the_turns_are_closed_is_cancelled_and_none_begins(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench(1)
    running = bench.add(HOG, "first turn")
    wait_until(lambda: "first turn" in bench.begun, "the first turn has begun")
    second_turn: Future[str] = Future()
    running.add_done_callback(lambda _: bench.add(HOG, "second turn", second_turn))
    waiting = bench.add(LIGHT, "waiting")

    bench.turns.close()
    assert waiting.cancelled()

    bench.ends["first turn"].set()
    wait_until(second_turn.cancelled, "the second turn is cancelled")
    assert running.result(TIMEOUT_S) == "first turn"
    assert bench.begun == ["first turn"] and not caplog.records
