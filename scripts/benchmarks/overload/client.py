"""The clients: in an open loop, which come when they are due, and in a closed one, which ask again
after each answer.

All share one event loop at real-time priority where the system allows it, and keep the bytes of an
answer for later, so that they take little of the cores that the server needs. How much they took is
part of what a phase gives back.
"""

import asyncio
import gc
import math
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import uvloop

from scripts.benchmarks.load import Connection, Meter, realtime
from scripts.benchmarks.overload.door import REFUSALS, RETRY_AFTER, Ask, Asked, Door, Target
from scripts.benchmarks.overload.records import Record

PING_EVERY_S = 0.05
PING_TIMEOUT_S = 10.0
# A connection that was idle for longer may be closed by the server.
MAX_IDLE_S = 2.0
# The least pause after a refusal.
MIN_RETRY_S = 0.1


@dataclass(frozen=True)
class User:
    """A closed-loop client."""

    # Its requests, one after another.
    asks: Iterator[Ask]
    # When it begins.
    begin_s: float = 0.0
    # How long it pauses after an answer.
    pause_s: float = 0.0
    # How long it pauses at most after a refusal.
    max_retry_s: float = 2.0


@dataclass
class Phase:
    """What clients saw in one phase, and what the driver took meanwhile."""

    records: list[Record]
    pings_s: list[float]
    num_bad_pings: int
    # How late the driver sent its requests.
    late_s: list[float]
    # How many cores the driver took.
    driver_cores: float
    # How many all processes took but the driver and the server; NaN unless it was started here.
    foreign_cores: float


class IdleConnection(NamedTuple):
    """A connection that waits for its next request, and since when."""

    since_s: float
    connection: Connection


class Clients:
    """The clients of one phase."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._idle: list[IdleConnection] = []
        self.asked: list[Asked] = []
        self.pings_s: list[float] = []
        self.num_bad_pings = 0

    async def connection(self) -> Connection:
        """Return an idle connection, or a new one."""
        while self._idle:
            idle = self._idle.pop()
            is_fresh = time.perf_counter() - idle.since_s < MAX_IDLE_S
            if idle.connection.is_open and is_fresh:
                return idle.connection

            idle.connection.close()

        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            Connection, self._target.host, self._target.port
        )
        return connection

    async def ask(self, ask: Ask, due_s: float, until_s: float) -> Asked:
        """Ask, and leave at `until_s` if the answer is not whole by then."""
        sent = Asked(ask, due_s, time.perf_counter())
        self.asked.append(sent)
        connection = None
        try:
            async with asyncio.timeout(until_s - sent.sent_s):
                connection = await self.connection()
                await connection.send(ask.payload)
        except TimeoutError:
            sent.has_left = True
        except OSError as error:
            sent.reason = repr(error)

        sent.end_s = time.perf_counter()
        if connection:
            sent.answer = connection.answer
            if sent.has_left or sent.reason:
                connection.close()
            else:
                self._idle.append(IdleConnection(sent.end_s, connection))

        return sent

    async def offer(self, asks: Sequence[Ask], times_s: Sequence[float], patience_s: float) -> None:
        """Run the open loop: each request comes at its time, whatever became of those before."""
        start_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for ask, at_s in zip(asks, times_s, strict=True):
                due_s = start_s + at_s
                await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
                group.create_task(self.ask(ask, due_s, due_s + patience_s))

    async def keep(self, users: Sequence[User], seconds: float, patience_s: float = 0.0) -> None:
        """Run the closed loop: each user asks again after each answer. At the end all leave, after
        `patience_s` at most.
        """
        start_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for user in users:
                group.create_task(self._use(user, start_s + seconds, patience_s))

    async def _use(self, user: User, until_s: float, patience_s: float) -> None:
        await asyncio.sleep(user.begin_s)
        now_s = time.perf_counter()
        while now_s < until_s:
            sent = await self.ask(next(user.asks), now_s, until_s + patience_s)
            if sent.has_left:
                return

            time_left_s = max(0.0, until_s - time.perf_counter())
            await asyncio.sleep(min(_pause_s(user, sent), time_left_s))
            now_s = time.perf_counter()

    async def ping(self) -> None:
        """Ask for the server's health at a steady pace. A late answer makes those due after it late
        too.
        """
        payload = f"GET {self._target.health} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
        due_s = time.perf_counter()
        connection = None
        try:
            while True:
                try:
                    async with asyncio.timeout(PING_TIMEOUT_S):
                        connection = connection or await self.connection()
                        await connection.send(payload)

                    self.num_bad_pings += connection.answer.status != 200
                # TimeoutError is one too.
                except OSError:
                    self.num_bad_pings += 1
                    if connection:
                        connection.close()

                    connection = None

                self.pings_s.append(time.perf_counter() - due_s)
                due_s += PING_EVERY_S
                await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        finally:
            if connection:
                connection.close()

    def close(self) -> None:
        for _, connection in self._idle:
            connection.close()


def _pause_s(user: User, sent: Asked) -> float:
    """Return how long a user pauses after this answer."""
    if sent.answer.status in REFUSALS:
        match = RETRY_AFTER.search(sent.answer.body)
        retry_after_s = float(match[1]) if match else 0.0
        return min(user.max_retry_s, max(MIN_RETRY_S, retry_after_s))

    if sent.answer.status != 200:
        return MIN_RETRY_S

    return user.pause_s


def run(target: Target, door: Door, load: Callable[[Clients], Coroutine[Any, Any, None]]) -> Phase:
    """Run one phase."""
    clients = Clients(target)

    async def with_pings() -> float:
        start_s = time.perf_counter()
        pinging = asyncio.create_task(clients.ping())
        await load(clients)
        pinging.cancel()
        with suppress(asyncio.CancelledError):
            await pinging

        clients.close()
        return start_s

    gc.collect()
    gc.disable()
    meter = Meter(target.roles())
    cpu_from_s = time.process_time()
    from_s = time.perf_counter()
    try:
        with realtime(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            start_s = runner.run(with_pings())
    finally:
        gc.enable()

    driver_cores = (time.process_time() - cpu_from_s) / (time.perf_counter() - from_s)
    foreign_cores = math.nan
    if target.pid:
        # A process of the server may have ended meanwhile.
        with suppress(FileNotFoundError):
            _, foreign_cores = meter.stop()

    return Phase(
        records=[door.record(sent, start_s) for sent in clients.asked],
        pings_s=clients.pings_s,
        num_bad_pings=clients.num_bad_pings,
        late_s=[sent.sent_s - sent.due_s for sent in clients.asked],
        driver_cores=driver_cores,
        foreign_cores=foreign_cores,
    )
