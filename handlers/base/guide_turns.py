"""Threads on which guides are compiled, for which clients take turns."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class GuideTurns(Generic[T]):
    """Of those who wait, the client with the fewest guides in work is next, else the one who was not for the longest.

    One thread is kept from each client, so that another's first guide need not wait for one that takes long.
    """

    def __init__(self, num_threads: int) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="guides")
        self._num_threads = num_threads
        self._lock = threading.Lock()  # guards the next two
        self._lines: dict[int | None, deque[tuple[Future[T], Callable[[], T]]]] = {}  # by client, the next one first
        self._num_running: Counter[int | None] = Counter()

    def submit(self, client: int | None, compile: Callable[[], T], future: Future[T] | None = None) -> Future[T]:
        """`future` is that of a guide which waits already, for other clients: it begins when the first of them may."""
        future = future or Future()
        with self._lock:
            self._lines.setdefault(client, deque()).append((future, compile))
            self._start()
        return future

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> None:
        """Begin what may begin. Call it with the lock."""
        most = max(1, self._num_threads - 1)
        while self._num_running.total() < self._num_threads:
            waiting = [client for client in self._lines if self._num_running[client] < most]
            if not waiting:
                return
            client = min(waiting, key=self._num_running.__getitem__)
            line = self._lines.pop(client)
            future, compile = line.popleft()
            if line:
                self._lines[client] = line  # behind the others
            if not (future.running() or future.done()) and future.set_running_or_notify_cancel():
                self._num_running[client] += 1
                self._pool.submit(self._run, client, future, compile)

    def _run(self, client: int | None, future: Future[T], compile: Callable[[], T]) -> None:
        try:
            result = compile()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)
        with self._lock:
            self._num_running -= Counter([client])
            self._start()
