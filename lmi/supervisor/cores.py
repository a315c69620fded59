"""Which cores and how many threads each process of a server gets.

Otherwise a front end that wakes up interrupts the engine in the middle of a step, and an engine
that moves to another core finds cold caches. `scripts/bench vllm` measures the gain.
"""

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from msgspec import Struct

from lmi.settings.config import Config, EngineConfig
from lmi.shared import linux, machine

# An abstract socket: the kernel frees the name when its process ends.
CLAIM = "\0lmi.cores"
# Weights that nearly fit a cache gain nothing from the last core.
SMALL_MODEL_BYTES = 64 << 20
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.gguf")


class Cores(Struct, frozen=True):
    """The cores of each engine, by slot, and the cores of all other processes."""

    engines: tuple[tuple[int, ...], ...]
    others: tuple[int, ...]

    @classmethod
    def of(cls, config: Config, environ: Mapping[str, str], cores: Sequence[int]) -> Self | None:
        """Return which of the cores each process gets, or None if all processes share all cores.

        An engine with several ranks is not bound, because its library binds the ranks. No engine is
        bound if the operator arranges the threads with OMP_NUM_THREADS, in the environment or in
        option.env.
        """
        engine = config.engine
        variables = {**environ, **engine.environ}
        is_arranged = "OMP_NUM_THREADS" in variables and engine.num_threads is None
        is_shared = not engine.bind_cores or bool(engine.device_ids) or config.is_user_code
        has_ranks = engine.num_ranks_here(engine.tensor_parallel_degree) > 1
        if is_shared or is_arranged or has_ranks:
            return None

        num_threads = num_engine_threads(engine, config.model.path, len(cores))
        return cls.divide(cores, engine.num_engines, num_threads, config.server.frontend_workers)

    @classmethod
    def divide(
        cls, cores: Sequence[int], num_engines: int, num_threads: int, num_others: int
    ) -> Self | None:
        """Divide the cores: `num_threads` for each engine, the others for `num_others` processes.

        Returns None unless the engines leave one core for each other process, and at least one.
        """
        first = len(cores) - num_engines * num_threads
        if first < max(1, num_others):
            return None

        of_engines = tuple(
            tuple(cores[start : start + num_threads])
            for start in range(first, len(cores), num_threads)
        )
        return cls(of_engines, tuple(cores[:first]))


def usable() -> list[int]:
    """Return the cores of this process, or none if a quota bounds its time: other containers then
    use them too.
    """
    cores = sorted(os.sched_getaffinity(0))
    return cores if machine.num_usable_cores() == len(cores) else []


def claimed(cores: Cores | None, name: str = CLAIM) -> Cores | None:
    """Return `cores`, or None while another server of this machine holds the claim with this name.

    Two servers that choose the same core for their engines would each be half as fast. This process
    holds the claim to its end.
    """
    if cores is None:
        return None

    with socket.socket(socket.AF_UNIX) as claim:
        try:
            claim.bind(name)
        except OSError:
            return None

        claim.detach()

    return cores


def of_cores(cores: Sequence[int]) -> dict[str, str]:
    """Return the environment of a child that keeps to these cores, or to none in particular if
    there are none.
    """
    return {linux.CORES: ",".join(map(str, cores))} if cores else {}


def of_threads(config: Config, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that set how many threads an engine's kernels use, and how long these
    spin.

    Threads that spin while they wait take the cores that a front end needs, so they spin only
    briefly. The numbers were measured on two cores beside one busy process.
    """
    environ = {**environ, **config.engine.environ}
    engine = config.engine
    model_path = config.model.path
    variables = {"GOMP_SPINCOUNT": environ.get("GOMP_SPINCOUNT", "1000")}
    if engine.num_threads is not None or "OMP_NUM_THREADS" not in environ:
        num_threads = num_engine_threads(engine, model_path, machine.num_usable_cores())
        variables["OMP_NUM_THREADS"] = str(num_threads)
        variables[linux.THREADS_WHY] = _why_fewer(engine, model_path)

    return variables


def _why_fewer(engine: EngineConfig, model_path: str) -> str:
    """Return why the threads of an engine may be fewer than the cores."""
    if engine.num_threads is not None:
        return "option.num_threads"

    if engine.num_engines > 1:
        return f"{engine.num_engines} replicas share them"

    if _is_small(model_path):
        return "beside a small model the front end needs one more"

    return "its ranks share them"


def num_engine_threads(engine: EngineConfig, model_path: str, num_cores: int) -> int:
    """Return option.num_threads, or each rank's share of the cores, less one core in all for a
    small model.

    A small model loses more time waiting for one more thread than the thread saves.
    """
    if engine.num_threads is not None:
        return engine.num_threads

    # Beside a small model the front end needs one core more.
    if _is_small(model_path):
        num_cores -= 1

    num_ranks = engine.num_ranks_here(engine.tensor_parallel_degree)
    return max(1, num_cores // (engine.num_engines * num_ranks))


def _is_small(model_path: str) -> bool:
    num_bytes = 0
    for pattern in WEIGHT_FILES:
        # A link to a file that is gone is the engine's to tell
        files = filter(Path.is_file, Path(model_path).glob(pattern))
        num_bytes += sum(file.stat().st_size for file in files)

    return num_bytes <= SMALL_MODEL_BYTES
