"""Divides the cores among the processes of a server and binds a process to its cores.

Otherwise a front end that wakes up interrupts the engine in the middle of a step, and an engine that moves to another
core finds cold caches. `scripts/bench vllm` measures the gain.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass

from lmi.shared import linux

VARIABLE = "LMI_CORES"
CLAIM = "\0lmi.cores"  # an abstract socket: the kernel frees the name when its process ends


@dataclass(frozen=True, slots=True)
class Cores:
    """The cores of each engine, by slot, and the cores of all other processes."""

    engines: tuple[tuple[int, ...], ...]
    others: tuple[int, ...]

    @classmethod
    def divide(cls, cores: Sequence[int], num_engines: int, num_threads: int, num_others: int) -> Cores | None:
        """Divide the cores: `num_threads` for each engine, the others for `num_others` processes.

        Returns None unless the engines leave one core for each other process, and at least one.
        """
        first = len(cores) - num_engines * num_threads
        if first < max(1, num_others):
            return None
        starts = range(first, len(cores), num_threads)
        return cls(tuple(tuple(cores[start : start + num_threads]) for start in starts), tuple(cores[:first]))


def usable() -> list[int]:
    """Return the cores of this process, or none if a quota bounds its time: other containers then use them too."""
    cores = sorted(os.sched_getaffinity(0))
    return cores if linux.num_usable_cores() == len(cores) else []


@contextmanager
def claimed(cores: Cores | None, name: str = CLAIM) -> Iterator[Cores | None]:
    """Yield `cores`, or None while another server of this machine holds the claim with this name.

    Two servers that choose the same core for their engines would each be half as fast.
    """
    with closing(socket.socket(socket.AF_UNIX)) as claim:
        try:
            if cores is not None:
                claim.bind(name)
        except OSError:
            cores = None
        yield cores


def variable(cores: Sequence[int]) -> dict[str, str]:
    """Return the environment variable that `keep` reads in a child."""
    return {VARIABLE: ",".join(map(str, cores))}


def keep() -> None:
    """Bind every thread of this process, and those that they start, to the cores that its environment names."""
    named = os.environ.get(VARIABLE)
    if named:
        linux.bind_threads([int(core) for core in named.split(",")])
