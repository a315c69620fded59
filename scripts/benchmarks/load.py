"""A lean load of streams over kept-alive connections, and the CPU that all processes use meanwhile.

The client keeps the bytes and the time of each read and parses them after the round. It runs at
real-time priority: on few cores an engine that spins while it waits would keep an ordinary client
off its core for a whole answer, and the times would be those of the client. If the system does not
allow it, the figures say so.
"""

import asyncio
import bisect
import gc
import itertools
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

from scripts.benchmarks import servers

# Ends a chunked body
WHOLE = b"\r\n0\r\n\r\n"
ROUND_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Records:
    """The patterns that find the records of a streamed answer and the number of tokens of any
    answer.
    """

    # Once in every record that carries tokens
    mark: re.Pattern[bytes]
    # The number of tokens: in the last match of an answer, or for each record
    count: re.Pattern[bytes] | int = 1


LMI = Records(re.compile(rb'\{"token": ?\{'))


@dataclass
class Answer:
    """The reads of one answer: their bytes and times."""

    start_s: float
    reads: list[bytes] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)

    def record_times_s(self, mark: re.Pattern[bytes]) -> list[float]:
        ends = list(itertools.accumulate(map(len, self.reads)))
        return [
            self.times_s[bisect.bisect_right(ends, match.start())]
            for match in mark.finditer(self.body)
        ]

    @property
    def body(self) -> bytes:
        """All bytes of the answer, its head too."""
        return b"".join(self.reads)

    @property
    def status(self) -> int:
        """The status, or 0 before it came."""
        match = re.match(rb"HTTP/1\.[01] (\d+)", self.reads[0]) if self.reads else None
        return int(match[1]) if match else 0


class Connection(asyncio.Protocol):
    """A connection that carries one request after another."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def ask(self, request: bytes) -> Answer:
        """The answer. Raises RuntimeError if its status is not 200, ConnectionError if it is not
        whole.
        """
        await self.send(request)
        if self.answer.status != 200:
            raise RuntimeError(f"the server said {self.answer.body[:2000]!r}")

        return self.answer

    async def send(self, request: bytes) -> None:
        """Send a request, and return when its answer, of any status, is whole. `answer` has the
        reads so far.
        """
        self._tail = b""
        # Bytes that a body of known size still lacks
        self._num_missing: int | None = None
        self._done = asyncio.get_running_loop().create_future()
        self.answer = Answer(time.perf_counter())
        if not self.is_open:
            raise ConnectionError("the server closed the connection")

        self._transport.write(request)  # type: ignore[attr-defined]
        await self._done

    @property
    def is_open(self) -> bool:
        return not self._transport.is_closing()

    def data_received(self, data: bytes) -> None:
        # After the answer, or its client has left
        if self._done.done():
            return

        self.answer.times_s.append(time.perf_counter())
        self.answer.reads.append(data)
        if self._num_missing is not None:
            self._num_missing -= len(data)
        elif len(self.answer.reads) == 1:
            # Servers write a head in one write
            head, _, body = data.partition(b"\r\n\r\n")
            if size := re.search(rb"(?i)content-length: *(\d+)", head):
                self._num_missing = int(size[1]) - len(body)

        self._tail = (self._tail + data)[-len(WHOLE) :]
        if self._num_missing == 0 or self._num_missing is None and self._tail == WHOLE:
            self._done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self._done.done():
            self._done.set_exception(error or ConnectionError("the server closed the connection"))

    def close(self) -> None:
        self._transport.close()


def request(path: str, body: bytes, headers: Mapping[str, str] | None = None) -> bytes:
    fields = {
        "Host": "x",
        "Content-Type": "application/json",
        "Content-Length": len(body),
        **(headers or {}),
    }
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body


def invocation(
    num_tokens: int,
    inputs: str = "Tell me a story about a fox.",
    path: str = "/invocations",
    **parameters: object,
) -> bytes:
    """A request for a stream of so many tokens, one in each record of LMI's."""
    fixed = {"max_new_tokens": num_tokens, "ignore_eos_token": True}
    return request(
        path,
        json.dumps({"inputs": inputs, "stream": True, "parameters": fixed | parameters}).encode(),
    )


@dataclass(frozen=True)
class Round:
    """The results of one round."""

    num_tokens: int
    num_records: int
    seconds: float
    # From request to first token, of each answer
    first_s: tuple[float, ...]
    # Between two tokens of an answer; 0 where they came in one read
    gaps_s: tuple[float, ...]
    cpu_s: dict[str, float]  # by role
    # Cores that all other processes used
    foreign: float

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    def us_per_token(self, role: str) -> float:
        return self.cpu_s.get(role, 0.0) / self.num_tokens * 1e6


class Meter:
    """A meter measures the CPU of some processes by role, and of all others, from when
    it is made.
    """

    def __init__(self, roles: Mapping[int, str]) -> None:
        self._roles = dict(roles)
        self._before = self._now()

    def _now(self) -> tuple[float, float, dict[int, float]]:
        cpu_s = {pid: servers.cpu_s(pid) for pid in {*self._roles, os.getpid()}}
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
        # Idle and waiting for disks
        idle_s = (int(fields[4]) + int(fields[5])) / os.sysconf("SC_CLK_TCK")
        return time.perf_counter(), idle_s, cpu_s

    def stop(self) -> tuple[dict[str, float], float]:
        """The CPU seconds by role, and the cores that foreign processes used."""
        (from_s, idle_from_s, cpu_from_s), (to_s, idle_to_s, cpu_to_s) = self._before, self._now()
        used_s = {pid: cpu_to_s[pid] - cpu_from_s[pid] for pid in cpu_to_s}
        by_role: dict[str, float] = {}
        for pid, role in self._roles.items():
            by_role[role] = by_role.get(role, 0.0) + used_s[pid]

        num_cores = os.cpu_count() or 1  # those of /proc/stat
        busy_s = num_cores * (to_s - from_s) - (idle_to_s - idle_from_s)
        return by_role, max(0.0, busy_s - sum(used_s.values())) / (to_s - from_s)


@contextmanager
def realtime() -> Iterator[bool]:
    """Run this thread at real-time priority. Yields whether the system allows it. Children do not
    inherit it.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    except PermissionError:
        yield False
        return

    try:
        yield True
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def run_round(
    port: int, requests: list[list[bytes]], records: Records, roles: Mapping[int, str]
) -> Round:
    """Run one round. Each list of requests is a user who sends them one after another."""
    gc.collect()
    gc.disable()
    meter = Meter(roles)
    try:
        with realtime(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            seconds, answers = runner.run(ask_all(port, requests))
    finally:
        gc.enable()

    cpu_s, foreign = meter.stop()
    times_s = [answer.record_times_s(records.mark) for answer in answers]
    return Round(
        num_tokens=sum(_num_tokens(answer, records) for answer in answers),
        num_records=sum(map(len, times_s)),
        seconds=seconds,
        first_s=tuple(
            times[0] - answer.start_s for times, answer in zip(times_s, answers, strict=True)
        ),
        gaps_s=tuple(
            after - before for times in times_s for before, after in itertools.pairwise(times)
        ),
        cpu_s=cpu_s,
        foreign=foreign,
    )


async def ask_all(port: int, requests: list[list[bytes]]) -> tuple[float, list[Answer]]:
    async with asyncio.timeout(ROUND_TIMEOUT_S):
        loop = asyncio.get_running_loop()
        openings = [loop.create_connection(Connection, "127.0.0.1", port) for _ in requests]
        connections = [connection for _, connection in await asyncio.gather(*openings)]

        async def user(connection: Connection, bodies: list[bytes]) -> list[Answer]:
            return [await connection.ask(body) for body in bodies]

        start_s = time.perf_counter()
        answers = await asyncio.gather(*map(user, connections, requests))
        seconds = time.perf_counter() - start_s
        for connection in connections:
            connection.close()

    return seconds, [answer for user_answers in answers for answer in user_answers]


def _num_tokens(answer: Answer, records: Records) -> int:
    if isinstance(records.count, int):
        return records.count * len(records.mark.findall(answer.body))

    return int(records.count.findall(answer.body)[-1])
