"""What keeps tests from disturbing each other: the lock of the machine, and the guard of durations."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.machine import Lock, Measurement, measurements
from tests.system.container import ROOT, free_port, wait_until

HOLDER = """
import sys
from pathlib import Path
from tests.machine import Lock
Lock(Path(sys.argv[1])).acquire(is_exclusive=True)
print("held", flush=True)
sys.stdin.read()
"""


def passes(lock: Lock, is_exclusive: bool, passed: list[bool]) -> Thread:
    """Start a thread that acquires the lock, notes that it did, and releases it."""

    def run() -> None:
        lock.acquire(is_exclusive)
        passed.append(is_exclusive)
        lock.release()

    thread = Thread(target=run)
    thread.start()
    return thread


def is_locked(file: Path) -> bool:
    with file.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def test_many_share_the_machine_and_one_that_needs_the_whole_waits_for_them(tmp_path: Path) -> None:
    file, passed = tmp_path / "lock", list[bool]()
    one, other = Lock(file), Lock(file)
    one.acquire(is_exclusive=False)
    other.acquire(is_exclusive=False)
    assert one.is_held and other.is_held
    thread = passes(Lock(file), True, passed)
    other.release()
    thread.join(0.2)
    assert passed == []
    one.release()
    thread.join()
    assert passed == [True] and not is_locked(file)


def test_who_comes_later_stays_behind_one_that_waits_for_the_whole(tmp_path: Path) -> None:
    file, passed = tmp_path / "lock", list[bool]()
    holder, writer = Lock(file), Lock(file)
    holder.acquire(is_exclusive=False)
    first = passes(writer, True, passed)
    wait_until(lambda: is_locked(writer.turnstile), "it waits")
    later = passes(Lock(file), False, passed)
    later.join(0.2)
    assert passed == []
    holder.release()
    first.join()
    later.join()
    assert passed == [True, False]


def test_a_killed_holder_leaves_the_machine_to_others(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "lock")]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        assert is_locked(tmp_path / "lock")
        holder.kill()
    lock = Lock(tmp_path / "lock")
    lock.acquire(is_exclusive=True)
    lock.release()


def measure(took_s: float, lost_s: float, is_last: bool = False, num_cores: int = 1) -> bool:
    """Bound a block by 2 s that takes `took_s`. Returns whether it asks for another try."""
    times, losses = iter([0.0, took_s]), iter([5.0, 5.0 + lost_s])
    clocks: dict[str, Any] = {"clock_s": lambda: next(times), "lost_s": lambda: next(losses)}
    measurement = Measurement(is_last, num_cores=num_cores, **clocks)
    with measurement.within(2.0):
        pass
    return measurement.is_repeated


def test_a_duration_within_its_bound_is_measured_once() -> None:
    assert not measure(1.9, lost_s=1.9)
    assert len(list(measurements())) == 1


def test_a_duration_is_measured_again_if_cores_were_short_for_what_it_took_too_long() -> None:
    assert measure(3.0, lost_s=1.5)
    assert measure(3.0, lost_s=0.6, num_cores=2), "it may have waited on the only crowded core"


@pytest.mark.parametrize(("lost_s", "is_last"), [(0.0, False), (0.5, False), (3.0, True)])
def test_a_duration_that_is_too_long_fails_on_an_idle_machine_and_at_the_last_try(lost_s: float, is_last: bool) -> None:
    with pytest.raises(AssertionError, match=r"it took 3\.00 s, not 2\.0 s"):
        measure(3.0, lost_s, is_last)


def tries(num_starved: int) -> Iterator[bool]:
    for number, measurement in enumerate(measurements()):
        measurement.is_repeated = number < num_starved
        yield measurement.is_last


def test_there_are_at_most_five_tries() -> None:
    assert list(tries(1)) == [False, False]
    assert list(tries(9)) == [False, False, False, False, True]


def test_no_free_port_is_one_that_the_kernel_gives_away() -> None:
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(1024 < free_port() < lowest for _ in range(20))
