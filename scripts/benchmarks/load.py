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
from typing import NamedTuple

import uvloop

from scripts.benchmarks import servers

# The end of a chunked body.
WHOLE = b"\r\n0\r\n\r\n"
ROUND_TIMEOUT_S = 60.0
STATUS = re.compile(rb"HTTP/1\.[01] (\d+)")
CONTENT_LENGTH = re.compile(rb"(?i)content-length: *(\d+)")


@dataclass(frozen=True)
class Records:
    """The patterns that find the records of a streamed answer and the number of tokens of any
    answer.
    """

    # It is once in every record that has tokens.
    mark: re.Pattern[bytes]
    # How many tokens a record has, or a pattern whose last match says how many an answer has.
    count: re.Pattern[bytes] | int = 1


LMI = Records(re.compile(rb'\{"token": ?\{'))


@dataclass
class Answer:
    """The reads of one answer: their bytes and times."""

    # When its request was sent.
    start_s: float
    reads: list[bytes] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)

    def record_times_s(self, mark: re.Pattern[bytes]) -> list[float]:
        """Return when each record was read: the read in which its mark begins."""
        ends = list(itertools.accumulate(map(len, self.reads)))
        times_s: list[float] = []
        for match in mark.finditer(self.body):
            read = bisect.bisect_right(ends, match.start())
            times_s.append(self.times_s[read])

        return times_s

    @property
    def body(self) -> bytes:
        """All bytes of the answer, its head too."""
        return b"".join(self.reads)

    @property
    def status(self) -> int:
        """The status, or 0 before it came."""
        if not self.reads:
            return 0

        match = STATUS.match(self.reads[0])
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
        # The last bytes that were read.
        self._tail = b""
        # How many bytes a body of known size still lacks.
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
        if self._done.done():
            # The answer is over, or its client has left.
            return

        self.answer.times_s.append(time.perf_counter())
        self.answer.reads.append(data)
        if self._num_missing is not None:
            self._num_missing -= len(data)
        elif len(self.answer.reads) == 1:
            # Servers write a head in one write.
            head, _, body = data.partition(b"\r\n\r\n")
            size = CONTENT_LENGTH.search(head)
            if size:
                self._num_missing = int(size[1]) - len(body)

        self._tail = (self._tail + data)[-len(WHOLE) :]
        is_whole = self._tail == WHOLE if self._num_missing is None else self._num_missing == 0
        if is_whole:
            self._done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self._done.done():
            self._done.set_exception(error or ConnectionError("the server closed the connection"))

    def close(self) -> None:
        self._transport.close()


def request(path: str, body: bytes, headers: Mapping[str, str] | None = None) -> bytes:
    """Return the bytes of a POST."""
    fields = {
        "Host": "x",
        "Content-Type": "application/json",
        "Content-Length": len(body),
        **(headers or {}),
    }
    lines = [f"POST {path} HTTP/1.1"]
    for name, value in fields.items():
        lines.append(f"{name}: {value}")

    return "\r\n".join([*lines, "", ""]).encode() + body


def invocation(
    num_tokens: int,
    inputs: str = "Tell me a story about a fox.",
    path: str = "/invocations",
    **parameters: object,
) -> bytes:
    """Return a request for a stream of so many tokens, one in each record of LMI's."""
    all_parameters = {"max_new_tokens": num_tokens, "ignore_eos_token": True, **parameters}
    body = {"inputs": inputs, "stream": True, "parameters": all_parameters}
    return request(path, json.dumps(body).encode())


@dataclass(frozen=True)
class Round:
    """The results of one round."""

    num_tokens: int
    num_records: int
    seconds: float
    # From request to first token, of each answer.
    first_s: tuple[float, ...]
    # Between two tokens of an answer; 0 where they came in one read.
    gaps_s: tuple[float, ...]
    # By role.
    cpu_s: dict[str, float]
    # How many cores all other processes used.
    foreign: float

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    def us_per_token(self, role: str) -> float:
        return self.cpu_s.get(role, 0.0) / self.num_tokens * 1e6


class CpuTimes(NamedTuple):
    """What the clocks say at one moment."""

    at_s: float
    # Of all cores together, idle or waiting for disks.
    idle_s: float
    # By process.
    used_s: dict[int, float]


class Meter:
    """Measures the CPU of some processes by role, and of all others, from when it is made."""

    def __init__(self, roles: Mapping[int, str]) -> None:
        self._roles = dict(roles)
        self._start = self._now()

    def _now(self) -> CpuTimes:
        pids = {*self._roles, os.getpid()}
        used_s = {pid: servers.cpu_s(pid) for pid in pids}

        first_line = Path("/proc/stat").read_text().partition("\n")[0]
        fields = first_line.split()
        idle_ticks = int(fields[4])
        waiting_ticks = int(fields[5])
        idle_s = (idle_ticks + waiting_ticks) / os.sysconf("SC_CLK_TCK")
        return CpuTimes(time.perf_counter(), idle_s, used_s)

    def stop(self) -> tuple[dict[str, float], float]:
        """Return the CPU seconds by role, and how many cores foreign processes used."""
        start = self._start
        end = self._now()
        used_s: dict[int, float] = {}
        for pid, until_s in end.used_s.items():
            used_s[pid] = until_s - start.used_s[pid]

        by_role: dict[str, float] = {}
        for pid, role in self._roles.items():
            by_role[role] = by_role.get(role, 0.0) + used_s[pid]

        # Those of /proc/stat.
        num_cores = os.cpu_count() or 1
        seconds = end.at_s - start.at_s
        busy_s = num_cores * seconds - (end.idle_s - start.idle_s)
        foreign_s = max(0.0, busy_s - sum(used_s.values()))
        return by_role, foreign_s / seconds


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
    num_tokens = 0
    num_records = 0
    first_s: list[float] = []
    gaps_s: list[float] = []
    for answer in answers:
        times_s = answer.record_times_s(records.mark)
        num_tokens += _num_tokens(answer, records)
        num_records += len(times_s)
        first_s.append(times_s[0] - answer.start_s)
        for before, after in itertools.pairwise(times_s):
            gaps_s.append(after - before)

    return Round(
        num_tokens=num_tokens,
        num_records=num_records,
        seconds=seconds,
        first_s=tuple(first_s),
        gaps_s=tuple(gaps_s),
        cpu_s=cpu_s,
        foreign=foreign,
    )


async def ask_all(port: int, requests: list[list[bytes]]) -> tuple[float, list[Answer]]:
    """Let each list of requests be a user. Returns the seconds that all took, and all answers."""
    async with asyncio.timeout(ROUND_TIMEOUT_S):
        loop = asyncio.get_running_loop()
        openings = [loop.create_connection(Connection, "127.0.0.1", port) for _ in requests]
        connections = [connection for _, connection in await asyncio.gather(*openings)]

        async def user(connection: Connection, bodies: list[bytes]) -> list[Answer]:
            return [await connection.ask(body) for body in bodies]

        start_s = time.perf_counter()
        answers_of_users = await asyncio.gather(*map(user, connections, requests))
        seconds = time.perf_counter() - start_s
        for connection in connections:
            connection.close()

    return seconds, list(itertools.chain.from_iterable(answers_of_users))


def _num_tokens(answer: Answer, records: Records) -> int:
    """Return how many tokens an answer has."""
    if isinstance(records.count, int):
        return records.count * len(records.mark.findall(answer.body))

    counts = records.count.findall(answer.body)
    return int(counts[-1])
