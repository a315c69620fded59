"""The machine that all tests share: who may run beside whom, and whether it kept a process from its work.

A test that starts servers or bounds time holds the machine shared. A test with several ranks of vLLM, which keep every
core busy for seconds, holds it exclusively. A turnstile makes the lock fair: whoever waits keeps later ones behind it.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

MAX_TRIES = 5
NUM_CORES = os.cpu_count() or 1
SERVERS: list[Server] = []  # that this process started and that may still run
PRESSURE = Path("/proc/pressure/cpu")


class Server(Protocol):
    def account(self) -> str:
        """What is known of it, for the report of a test that fails."""


@dataclass
class Lock:
    """A fair readers-writer lock among processes, in two files. The kernel opens it when its holder dies."""

    file: Path
    _room: int | None = field(default=None, init=False)

    @property
    def turnstile(self) -> Path:
        return self.file.with_suffix(".turnstile")

    @property
    def is_held(self) -> bool:
        return self._room is not None

    def acquire(self, is_exclusive: bool) -> None:
        turnstile = _opened(self.turnstile)
        fcntl.flock(turnstile, fcntl.LOCK_EX)
        self._room = _opened(self.file)
        fcntl.flock(self._room, fcntl.LOCK_EX if is_exclusive else fcntl.LOCK_SH)
        _leave(turnstile)

    def release(self) -> None:
        if self._room is not None:
            _leave(self._room)
            self._room = None


def _opened(file: Path) -> int:
    """A descriptor of a file to lock, which no program that is started inherits."""
    return os.open(file, os.O_RDWR | os.O_CREAT, 0o600)


def _leave(lock: int) -> None:
    fcntl.flock(lock, fcntl.LOCK_UN)  # closing would not do: a forked process may have the descriptor too
    os.close(lock)


def own_s() -> float:
    """A clock that stands still while processes wait for a core."""
    return time.monotonic() - seconds_lost()


def account() -> str:
    """How busy the machine is, and what is known of each server, for the report of a test that fails."""
    pressure = PRESSURE.read_text().splitlines()[0] if PRESSURE.exists() else "no /proc/pressure"
    lines = [f"{os.cpu_count()} cores, load {os.getloadavg()}; {pressure}"]
    return "\n".join([*lines, *(server.account() for server in SERVERS)])


def seconds_lost() -> float:
    """For how long, since this machine started, processes waited for a core or a core waited for its host.

    It is an average of the cores: a process on the only crowded one waited NUM_CORES times as long.
    """
    return _waiting_s() + _stolen_s()


def _waiting_s() -> float:
    """Seconds in which at least one process was ready to run and had no core; 0 where the kernel does not count."""
    found = re.search(r"some .*total=(\d+)", PRESSURE.read_text()) if PRESSURE.exists() else None
    return int(found[1]) / 1e6 if found else 0.0


def _stolen_s() -> float:
    """Seconds for which the host ran something else on cores that this machine wanted."""
    stolen = Path("/proc/stat").read_text().split(maxsplit=9)[8]
    return int(stolen) / os.sysconf("SC_CLK_TCK")


@dataclass
class Measurement:
    """One try to measure what a test bounds."""

    is_last: bool = False
    is_repeated: bool = False
    clock_s: Callable[[], float] = time.monotonic
    lost_s: Callable[[], float] = seconds_lost
    num_cores: int = NUM_CORES

    @contextmanager
    def within(self, bound_s: float) -> Iterator[None]:
        """Fail if the block takes longer. If the machine was short of cores meanwhile, ask for another try instead."""
        started_s, lost_s = self.clock_s(), self.lost_s()
        yield
        took_s, lost_s = self.clock_s() - started_s, self.lost_s() - lost_s
        if took_s < bound_s:
            return
        self.is_repeated = not self.is_last and took_s - self.num_cores * lost_s < bound_s
        words = f"it took {took_s:.2f} s, not {bound_s} s; in {lost_s:.2f} s of it some process waited for a core"
        assert self.is_repeated, words


def measurements() -> Iterator[Measurement]:
    """Measure once, and up to four times again where the machine, and not what is measured, may have taken too long.

    for measurement in measurements():
        with launch(folder) as server, measurement.within(2.5):
            ...
    """
    for number in range(MAX_TRIES):
        measurement = Measurement(is_last=number == MAX_TRIES - 1)
        yield measurement
        if not measurement.is_repeated:
            return
