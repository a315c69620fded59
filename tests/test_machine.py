"""What a busy machine does to tests: the guard of durations, how long they wait, and who runs
first.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.machine import Measurement, measurements, pause_after, wait_until
from tests.parts import FIRST, SHARING
from tests.system.container import ROOT, free_port


def measure(took_s: float, lost_s: float, is_last: bool = False, num_cores: int = 1) -> bool:
    """Bound a block by 2 s that takes `took_s`. Returns whether it asks for another try."""
    times = iter([0.0, took_s])
    losses = iter([5.0, 5.0 + lost_s])
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


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("lost_s", [0.0, 0.5])
def test_a_duration_that_is_too_long_for_no_want_of_cores_fails(
    lost_s: float, is_last: bool
) -> None:
    with pytest.raises(AssertionError, match=r"it took 3\.00 s, not 2\.0 s"):
        measure(3.0, lost_s, is_last)


def test_at_the_last_try_the_time_counts_in_which_cores_were_free() -> None:
    assert not measure(3.0, lost_s=1.5, is_last=True)


def tries(num_starved: int) -> Iterator[bool]:
    for number, measurement in enumerate(measurements()):
        measurement.is_repeated = number < num_starved
        yield measurement.is_last


def test_there_are_at_most_three_tries() -> None:
    assert list(tries(1)) == [False, False]
    assert list(tries(9)) == [False, False, True]


def test_no_free_port_is_one_that_the_kernel_gives_away() -> None:
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(1024 < free_port() < lowest for _ in range(20))


def test_a_wait_ends_with_its_condition_or_names_it() -> None:
    polls = iter([False, False, True])
    assert wait_until(lambda: next(polls), "it came", 60.0) >= 0.04
    with pytest.raises(AssertionError, match="it did not happen that it came"):
        wait_until(lambda: False, "it came", 0.05)


def test_what_comes_late_is_looked_for_less_often() -> None:
    assert pause_after(0.1) == pause_after(0.0) == 0.02
    assert pause_after(1.0) == 0.1
    assert pause_after(60.0) == pause_after(600.0) == 0.25


def test_every_part_of_a_run_that_is_named_is_there() -> None:
    files = {path for paths in SHARING.values() for path in paths} | set(FIRST) - set(SHARING)
    assert [file for file in files if not (ROOT / file).exists()] == []
