"""The machine that all tests share: whether it kept a process from its work, and how long to wait
for a condition.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

MAX_TRIES = 3
# For what comes soon unless the machine is busy
WAIT_S = 60.0
PATIENCE = 4
# Between two looks at a condition, at first
PAUSE_S = 0.02
# Of the time waited so far: looking again costs cores that others need
PAUSE_SHARE = 1 / 10
MAX_PAUSE_S = 0.25
NUM_CORES = os.cpu_count() or 1
# That this process started and that may still run
SERVERS: list[Server] = []
PRESSURE = Path("/proc/pressure/cpu")


class Server(Protocol):
    def account(self) -> str:
        """What is known of it, for the report of a test that fails."""


def own_s() -> float:
    """A clock that leaves out what a process may have waited for the most crowded core. It may run
    backwards.
    """
    return time.monotonic() - NUM_CORES * seconds_lost()


def wait_until(
    condition: Callable[[], Any], what: str, timeout_s: float = WAIT_S, *, pause_s: float = PAUSE_S
) -> float:
    """Poll until `condition` is true; return the seconds that it took.

    Time in which cores were short is extra, up to PATIENCE times `timeout_s`. What comes late is
    looked for less often: see `pause_after`.
    """
    started_s = time.monotonic()
    own_started_s = own_s()
    while not condition():
        took_s = time.monotonic() - started_s
        is_late = took_s > timeout_s and (
            own_s() - own_started_s > timeout_s or took_s > PATIENCE * timeout_s
        )
        assert not is_late, f"in {took_s:.0f} s it did not happen that {what}"
        time.sleep(pause_after(took_s, pause_s))

    return time.monotonic() - started_s


def pause_after(waited_s: float, pause_s: float = PAUSE_S) -> float:
    """The pause between two looks: `pause_s` at first, then a share of the time waited so far."""
    return max(pause_s, min(MAX_PAUSE_S, waited_s * PAUSE_SHARE))


def account() -> str:
    """How busy the machine is, and what is known of each server, for the report of a test that
    fails.
    """
    pressure = PRESSURE.read_text().splitlines()[0] if PRESSURE.exists() else "no /proc/pressure"
    lines = [f"{os.cpu_count()} cores, load {os.getloadavg()}; {pressure}"]
    return "\n".join([*lines, *(server.account() for server in SERVERS)])


def seconds_lost() -> float:
    """For how long, since this machine started, processes waited for a core or a core waited for
    its host.

    It is an average of the cores: a process on the only crowded one waited NUM_CORES times as long.
    """
    return _waiting_s() + _stolen_s()


def _waiting_s() -> float:
    """Seconds in which at least one process was ready to run and had no core; 0 where the kernel
    does not count.
    """
    match = re.search(r"some .*total=(\d+)", PRESSURE.read_text()) if PRESSURE.exists() else None
    return int(match[1]) / 1e6 if match else 0.0


def _stolen_s() -> float:
    """Seconds for which the host ran something else on cores that this machine wanted."""
    stolen = Path("/proc/stat").read_text().split(maxsplit=9)[8]
    return int(stolen) / os.sysconf("SC_CLK_TCK")


@dataclass
class Measurement:
    """One try to measure what a test bounds.

    If the machine was short of cores meanwhile, another try follows. At the last, time in which it
    was short is extra.
    """

    is_last: bool = False
    is_repeated: bool = False
    clock_s: Callable[[], float] = time.monotonic
    lost_s: Callable[[], float] = seconds_lost
    num_cores: int = NUM_CORES

    @contextmanager
    def within(self, bound_s: float) -> Iterator[None]:
        """Fail if the block takes longer and no want of cores explains it."""
        started_s = self.clock_s()
        lost_s = self.lost_s()
        yield
        took_s, lost_s = self.clock_s() - started_s, self.lost_s() - lost_s
        if took_s < bound_s:
            return

        words = (
            f"it took {took_s:.2f} s, not {bound_s} s; in {lost_s:.2f} s of it some process "
            f"waited for a core"
        )
        assert took_s - self.num_cores * lost_s < bound_s, words
        self.is_repeated = not self.is_last


def measurements() -> Iterator[Measurement]:
    """Measure once, and up to twice again where the machine, and not what is measured, may have
    taken too long.

    for measurement in measurements():
        with launch(folder) as server, measurement.within(2.5):
            ...
    """
    for number in range(MAX_TRIES):
        measurement = Measurement(is_last=number == MAX_TRIES - 1)
        yield measurement
        if not measurement.is_repeated:
            return
