"""The order in which the work of clients begins, on threads beside the steps.

Such work is the reading of images and the compilation of guides. Clients share the threads by what
their work costs: a client with many large images keeps nobody else waiting.
"""

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from msgspec import Struct

# Of more clients, those are forgotten who have nothing to do and have not had more than others.
MAX_CLIENTS = 1000

T = TypeVar("T")


class PricedWork(Struct, Generic[T], eq=False):
    """A piece of work that waits. Of one client's pieces that with the least `rank` is next."""

    future: Future[T]
    work: Callable[[], T]
    price: float
    rank: float


class ClientTurns(Generic[T]):
    """Threads that clients share.

    Of the clients who wait, the one with the fewest pieces in work is next; among equals the one
    whose work has cost least so far. No client has all threads, so that another's first piece need
    not wait for one that takes long. Of one client's pieces a cheap one goes before an expensive
    one, unless that has waited for as long as it takes.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._num_threads = num_threads

        # It guards what follows.
        self._lock = threading.Lock()
        # Whether nothing more begins.
        self._is_closed = False
        # By client: the work that waits. No line is empty.
        self._lines: dict[int | None, list[PricedWork[T]]] = {}
        # By client: how many of its pieces are in work.
        self._num_running: Counter[int | None] = Counter()
        # By client: the sum of the prices of its work that has begun.
        self._cost: dict[int | None, float] = {}
        # The highest cost of a client when its work began. A new client begins there.
        self._highest_cost = 0.0
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
        """Let `work` wait for its turn. `future` gets what it returns or raises, and is cancelled
        where the turns are closed before.

        Several clients may submit work with the same future: it begins with the first turn of any.
        `since`: what `num_spent` was when the wait of the work began. None: it begins now.
        """
        with self._lock:
            is_closed = self._is_closed
            if not is_closed:
                start = self.num_spent if since is None else since
                self._add(client, PricedWork(future, work, price, rank=price + start))
                self._start()

        # Outside the lock, because what waits for it may submit more.
        if is_closed:
            future.cancel()

    def close(self) -> None:
        """Begin nothing more, and cancel what waits. What has begun goes on."""
        with self._lock:
            self._is_closed = True
            lines = self._lines
            self._lines = {}

        self._pool.shutdown(wait=False)
        for line in lines.values():
            for piece in line:
                piece.future.cancel()

    def _add(self, client: int | None, piece: PricedWork[T]) -> None:
        """Let a piece wait, unless the client waits for its future already."""
        if client not in self._lines:
            self._let_in(client)

        line = self._lines.setdefault(client, [])
        if not any(waiting.future is piece.future for waiting in line):
            line.append(piece)

    def _let_in(self, client: int | None) -> None:
        """Let a client begin who has nothing that waits.

        It has saved nothing by asking for nothing: its cost becomes the least of those who wait.
        """
        costs = [self._cost[waiting] for waiting in self._lines]
        least_cost = min(costs, default=self._highest_cost)
        self._cost[client] = max(self._cost.get(client, least_cost), least_cost)

        if len(self._cost) > MAX_CLIENTS:
            busy = {*self._lines, *self._num_running, client}
            remembered: dict[int | None, float] = {}
            for known_client, cost in self._cost.items():
                if known_client in busy or cost > least_cost:
                    remembered[known_client] = cost

            self._cost = remembered

    def _start(self) -> None:
        """Begin what may begin. Call it with the lock."""
        max_of_client = max(1, self._num_threads - 1)
        while self._num_running.total() < self._num_threads:
            waiting: list[int | None] = []
            for client in self._lines:
                if self._num_running[client] < max_of_client:
                    waiting.append(client)

            if not waiting:
                return

            client = min(waiting, key=self._rank_of)
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

    def _rank_of(self, client: int | None) -> tuple[int, float]:
        """Return what the client has least of that is next."""
        return self._num_running[client], self._cost[client]

    def _charge(self, client: int | None, price: float) -> None:
        """Note that a piece of a client's work begins."""
        self._num_running[client] += 1
        self._highest_cost = max(self._highest_cost, self._cost[client])
        self._cost[client] += price

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
