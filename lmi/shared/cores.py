"""Which cores the processes of a server run on.

A small model's engine leaves the last core to the front end. Unless each keeps to its cores, a front end that wakes up
interrupts the engine in the middle of a step, and an engine that moves to another core finds that core's caches cold.
`scripts/bench vllm` measures what keeping to them gains.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass

from lmi.shared import processes

VARIABLE = "LMI_CORES"
CLAIM = "\0lmi.cores"  # an abstract socket: the kernel frees the name when its process ends


@dataclass(frozen=True, slots=True)
class Cores:
    """The cores of each engine, by slot, and those of all other processes."""

    engines: tuple[tuple[int, ...], ...]
    others: tuple[int, ...]

    @classmethod
    def divide(cls, cores: Sequence[int], num_engines: int, num_threads: int, num_others: int) -> Cores | None:
        """None where `num_engines` of `num_threads` each do not leave a core for each of `num_others` processes."""
        first = len(cores) - num_engines * num_threads
        if first < max(1, num_others):
            return None
        starts = range(first, len(cores), num_threads)
        return cls(tuple(tuple(cores[start : start + num_threads]) for start in starts), tuple(cores[:first]))


def usable() -> list[int]:
    """The cores of this process, or none where a quota bounds its time on them: then other containers use them too."""
    cores = sorted(os.sched_getaffinity(0))
    return cores if processes.num_usable_cores() == len(cores) else []


@contextmanager
def claimed(cores: Cores | None) -> Iterator[Cores | None]:
    """The same cores while no other server of this machine keeps to any, else None.

    Two servers that choose the same core for their engines would each be half as fast.
    """
    with closing(socket.socket(socket.AF_UNIX)) as claim:
        try:
            claim.bind(CLAIM)
        except OSError:
            cores = None
        yield cores


def variable(cores: Sequence[int]) -> dict[str, str]:
    """The variable that a child reads in `keep`."""
    return {VARIABLE: ",".join(map(str, cores))}


def keep() -> None:
    """Bind every thread of this process, and those that they start, to the cores that its environment names."""
    named = os.environ.get(VARIABLE)
    if named:
        processes.bind_threads([int(core) for core in named.split(",")])
