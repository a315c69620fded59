"""Sequences that wait beside the steps for what another thread makes."""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Event
from typing import Generic, TypeVar

from handlers.base.token_sequence import AnySequence

# The longest sleep of the engine: a request may time out meanwhile.
WAIT_S = 0.1

T = TypeVar("T")


class Waiting(Generic[AnySequence, T]):
    """Sequences that wait for what another thread makes of their requests: a guide, or pixels.

    Each has the future of what it waits for. All belongs to the engine's thread, but any thread may
    ask for `waiting` and call `wake`.
    """

    def __init__(self, wake_engine: Callable[[], None] = lambda: None) -> None:
        """`wake_engine` is called when something is made, on the thread that made it."""
        # Whether the engine sleeps, because it has nothing else to do.
        self.is_waiting = False
        self._wake_engine = wake_engine
        self._futures: dict[AnySequence, Future[T]] = {}
        # Set by what ends a sleep.
        self._woken = Event()

    @property
    def waiting(self) -> list[AnySequence]:
        """The sequences that wait; any thread may ask."""
        return list(self._futures.copy())

    def add_waiting(self, sequence: AnySequence, future: Future[T]) -> None:
        """Let a sequence wait for a future."""
        self._futures[sequence] = future
        future.add_done_callback(self._note_done)

    def drop_waiting(self, sequence: AnySequence) -> Future[T] | None:
        """Forget a sequence that has ended. Returns what it waited for if nobody else does."""
        future = self._futures.pop(sequence, None)
        if future in self._futures.values():
            return None

        return future

    def take_done(self) -> list[tuple[AnySequence, Future[T]]]:
        """Take the sequences whose wait is over, each with its future."""
        # Each is asked once, so that all sequences that share one are taken together.
        done_futures = {future for future in self._futures.values() if future.done()}
        done: list[tuple[AnySequence, Future[T]]] = []
        for sequence, future in self._futures.items():
            if future in done_futures:
                done.append((sequence, future))

        for sequence, _ in done:
            del self._futures[sequence]

        return done

    def wait(self) -> None:
        """Sleep until something is made, `wake` is called, or some time has passed."""
        self.is_waiting = True
        self._woken.wait(WAIT_S)
        self._woken.clear()
        self.is_waiting = False

    def wake(self) -> None:
        """End a sleep of `wait`; any thread may call it."""
        self._woken.set()

    def _note_done(self, _: Future[T]) -> None:
        self.wake()
        self._wake_engine()
