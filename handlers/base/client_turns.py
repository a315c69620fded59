"""Turns in which the work of clients begins beside the steps, as the reading of images and the
compilation of guides.

Clients share the threads by what their work costs: a client with many large images keeps nobody
else waiting.
"""

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

# So many clients with nothing to do have their share remembered.
MAX_IDLE_CLIENTS = 1000

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class PricedWork(Generic[T]):
    """A piece of work that waits. Of one client the piece with the least `rank` is next."""

    future: Future[T]
    work: Callable[[], T]
    price: float
    rank: float


class ClientTurns(Generic[T]):
    """Of those who wait, the client with the fewest pieces in work is next, of these the one who
    has had the least.

    One thread is kept from each client, so that another's first piece need not wait for one that
    takes long. Of one client a cheap piece goes before an expensive one, unless that has waited for
    as long as it takes.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._num_threads = num_threads

        # It guards what follows.
        self._lock = threading.Lock()
        # The work that waits, by client. No line is empty.
        self._lines: dict[int | None, list[PricedWork[T]]] = {}
        self._num_running: Counter[int | None] = Counter()
        # The sum of the prices that each client has had.
        self._had: dict[int | None, float] = {}
        # The sum of the client who was served last. A new client begins there.
        self._last_had = 0.0
        # The sum of the prices of all that is done.
        self.num_spent = 0.0

    def submit(
        self,
        client: int | None,
        work: Callable[[], T],
        future: Future[T],
        price: float = 1.0,
        since: float | None = None,
    ) -> None:
        """`future` may be that of work which waits for other clients too: it begins when the first
        of them may.

        Work that follows from other work has waited `since` then, which was `num_spent`; None:
        since now.
        """
        with self._lock:
            if client not in self._lines:
                self._let_in(client)

            line = self._lines.setdefault(client, [])
            if not any(piece.future is future for piece in line):
                start = self.num_spent if since is None else since
                line.append(PricedWork(future, work, price, rank=price + start))

            self._start()

    def close(self) -> None:
        """Begin nothing more. What has begun goes on."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _let_in(self, client: int | None) -> None:
        """Let a client begin who has nothing that waits: it has not saved up the time in which it
        asked for nothing.
        """
        least = min((self._had[waiting] for waiting in self._lines), default=self._last_had)
        self._had[client] = max(self._had.get(client, least), least)

        if len(self._had) > MAX_IDLE_CLIENTS:
            busy = {*self._lines, *self._num_running, client}
            remembered: dict[int | None, float] = {}
            for name, had in self._had.items():
                if name in busy or had > least:
                    remembered[name] = had

            self._had = remembered

    def _start(self) -> None:
        """Begin what may begin. Call it with the lock."""
        most = max(1, self._num_threads - 1)
        while self._num_running.total() < self._num_threads:
            waiting = [client for client in self._lines if self._num_running[client] < most]
            if not waiting:
                return

            client = min(waiting, key=lambda client: (self._num_running[client], self._had[client]))
            line = self._lines.pop(client)
            piece = min(line, key=lambda piece: piece.rank)
            line.remove(piece)
            if line:
                # The client goes behind the others.
                self._lines[client] = line

            future = piece.future
            has_begun = future.running() or future.done()
            if not has_begun and future.set_running_or_notify_cancel():
                self._charge(client, piece.price)
                self._pool.submit(self._run, client, piece)

    def _charge(self, client: int | None, price: float) -> None:
        self._num_running[client] += 1
        self._last_had = max(self._last_had, self._had[client])
        self._had[client] += price

    def _run(self, client: int | None, piece: PricedWork[Any]) -> None:
        try:
            result = piece.work()
        except BaseException as error:
            piece.future.set_exception(error)
        else:
            piece.future.set_result(result)

        with self._lock:
            self._num_running -= Counter([client])
            self.num_spent += piece.price
            self._start()
