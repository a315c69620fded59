"""The cores and GPUs of this machine, and the number of engines that fit.

GPUs are found without an engine's library. `scripts/install` asks before anything is installed, so this module and what
it imports need only Python.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lmi.errors import BadConfiguration
from lmi.shared import linux


@dataclass(frozen=True, slots=True)
class Machine:
    """Cores and GPUs that this process may use."""

    num_cores: int
    gpus: tuple[str, ...] = ()  # as CUDA_VISIBLE_DEVICES names them

    @classmethod
    def here(cls, environ: Mapping[str, str]) -> Machine:
        num_cores = linux.num_usable_cores()
        present = sorted((path.name[6:] for path in Path("/dev").glob("nvidia[0-9]*")), key=int)
        if not present or not (Path("/dev/nvidiactl").exists() or Path("/proc/driver/nvidia").exists()):
            return cls(num_cores)
        visible = environ.get("CUDA_VISIBLE_DEVICES")
        if visible is None:
            return cls(num_cores, tuple(str(number) for number in range(len(present))))
        names = [name.strip() for name in visible.split(",")]
        invalid = next((i for i, name in enumerate(names) if name in ("", "-1")), len(names))
        return cls(num_cores, tuple(names[:invalid]))  # CUDA too ends the list at the first invalid name


def num_engines(num_gpus: int, gpus_each: int, low: int | None, high: int | None) -> int:
    """Return how many replicas fit, at least `low` and at most `high`. Raises BadConfiguration if `low` do not fit.

    Without GPUs the default is one replica, because one uses all cores.
    """
    if low is not None and high is not None and low > high:
        raise BadConfiguration(f"minWorkers={low}, maxWorkers={high}: allowed is a minWorkers of at most maxWorkers")
    if num_gpus == 0:
        return max(low or 1, min(1, high or 1))
    fit = num_gpus // gpus_each
    if fit < (low or 1):
        raise BadConfiguration(
            f"{low or 1} replicas of {gpus_each} GPUs each do not fit: allowed are {num_gpus} GPUs in all"
        )
    return min(fit, high or fit)


def num_ranks_here(num_ranks: int, nodes: str) -> int:
    """Return how many of an engine's ranks run on this machine. `nodes` is the text of option.nnodes, or ""."""
    return max(1, num_ranks // max(1, int(nodes) if nodes.isdecimal() else 1))
