"""The memory, cores and processes that the kernel lets this process have: those of the machine, or
of control groups.

A process is in one group of each hierarchy of control groups, of version 1 or 2, and the limits of
all groups above its own count too. Everything that is sized by the machine asks here. Sources:
cgroups(7), cpuset(7), proc(5), and the kernel's pages on both versions and their memory
controllers.

`scripts/install` asks here before anything is installed, so this module needs only Python.
"""

import os
import re
import resource
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple, Self

PROC = Path("/proc")
# The variable that names to an engine the bytes that it may take, itself included.
SHARE = "LMI_MEMORY"
# Version 1 says a number of about this size where there is no limit.
UNLIMITED = 1 << 62
MB = 1 << 20
# A character of a path in mountinfo.
ESCAPED = re.compile(r"\\([0-7]{3})")

# The names of files, and of lines of memory.stat, by version.
# Above `high` a process hardly runs.
LIMITS = {
    1: ("memory.limit_in_bytes",),
    2: ("memory.max", "memory.high"),
}
USED = {1: "memory.usage_in_bytes", 2: "memory.current"}
# In version 1, also of groups that a container does not see.
OF_ALL_ABOVE = "hierarchical_memory_limit"
CACHED = {1: "total_cache", 2: "file"}
# Parts of the cache that the kernel cannot give back, or only at the cost of programs that run.
KEPT = {1: ("total_shmem", "total_mapped_file"), 2: ("shmem", "file_mapped")}
# What Docker, Podman, Kubernetes, ECS and SageMaker leave in a container.
OF_CONTAINERS = (Path("/.dockerenv"), Path("/run/.containerenv"), Path("/opt/ml"))
CONTAINER_VARIABLES = (
    "KUBERNETES_SERVICE_HOST",
    "ECS_CONTAINER_METADATA_URI_V4",
    "SAGEMAKER_",
    "SM_",
)


class ControlGroup(NamedTuple):
    """A group that limits this process, where the kernel shows its files."""

    folder: Path
    version: int

    def read(self, name: str) -> str:
        """Return the text of one of its files, "" if there is none."""
        with suppress(OSError):
            return (self.folder / name).read_text()

        return ""

    def number(self, name: str) -> int | None:
        """Return the number in one of its files. None: there is none, or no limit."""
        # A ValueError: "max", or no such file.
        with suppress(ValueError):
            number = int(self.read(name))
            return number if number < UNLIMITED else None

        return None

    def statistics(self) -> dict[str, int]:
        """Return the numbers of its memory.stat by name."""
        pairs = (line.split() for line in self.read("memory.stat").splitlines())
        return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}


class MemoryLimit(NamedTuple):
    """How much memory this process may use, and what says so."""

    num_bytes: int
    # The file that says it, or "" for the memory of the machine.
    source: str


class Quota(NamedTuple):
    """The time that a group may compute in each period, None without a quota."""

    quota_us: int | None
    period_us: int | None


def groups(controller: str, proc: Path = PROC) -> list[ControlGroup]:
    """Return the groups with this controller ("memory", "cpu"): this process's own first, then
    those above it.

    `proc` is where the kernel shows its files. A container may not see all of them: of a mount that
    shows another part of the hierarchy only its top counts, which is the container's.
    """
    paths = dict(_groups_of_process(controller, proc))
    # By a dictionary, since a group may be seen through several mounts.
    groups_here = dict[ControlGroup, None]()
    for version, mount_point, top in _mounts(controller, proc):
        if version not in paths:
            continue

        path = paths[version]
        is_visible = ".." not in path.parts and path.is_relative_to(top)
        group = mount_point / path.relative_to(top) if is_visible else mount_point
        for folder in (group, *group.parents):
            if folder.is_relative_to(mount_point):
                groups_here[ControlGroup(folder, version)] = None

    return list(groups_here)


def _groups_of_process(controller: str, proc: Path) -> Iterator[tuple[int, PurePosixPath]]:
    """Yield the version of each hierarchy that may have the controller, and this process's group in
    it.
    """
    with suppress(OSError):
        for line in (proc / "self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                yield 2, PurePosixPath(path)
            elif controller in controllers.split(","):
                yield 1, PurePosixPath(path)


def _mounts(controller: str, proc: Path) -> Iterator[tuple[int, Path, PurePosixPath]]:
    """Yield the version, the place and the topmost group of each mount of control groups that may
    have it.
    """
    with suppress(OSError):
        for line in (proc / "self/mountinfo").read_text().splitlines():
            of_mount, _, of_system = line.partition(" - ")
            top, mount_point = (ESCAPED.sub(_unescaped, word) for word in of_mount.split()[3:5])
            kind, _, options = of_system.split(" ", 2)
            if kind == "cgroup2":
                yield 2, Path(mount_point), PurePosixPath(top)
            elif kind == "cgroup" and controller in options.split(","):
                yield 1, Path(mount_point), PurePosixPath(top)


def _unescaped(match: re.Match[str]) -> str:
    return chr(int(match[1], 8))


# Memory.


def memory_limit(proc: Path = PROC) -> MemoryLimit:
    """Return the memory of this machine or, if it is less, the smallest limit of a group."""
    limits = [MemoryLimit(_of_machine(proc), "")]
    for group in groups("memory", proc):
        for name in LIMITS[group.version]:
            num_bytes = group.number(name)
            if num_bytes is not None:
                limits.append(MemoryLimit(num_bytes, str(group.folder / name)))

        if group.version == 1:
            of_all_above = group.statistics().get(OF_ALL_ABOVE, UNLIMITED)
            limits.append(MemoryLimit(of_all_above, f"{group.folder}/memory.stat: {OF_ALL_ABOVE}"))

    # Of equal limits the first counts.
    return min(limits, key=lambda limit: limit.num_bytes)


def memory_bytes(proc: Path = PROC) -> int:
    """Return the memory that this process can have at most."""
    return memory_limit(proc).num_bytes


def free_bytes(proc: Path = PROC) -> int:
    """Return the bytes that processes of this container may still take.

    It is the smaller of the machine's available memory and of what each group leaves. The page
    cache of a group counts as free, but for shared memory and for what programs that run have
    mapped.
    """
    bytes_left = [_bytes_left(group) for group in groups("memory", proc)]
    available = _of_meminfo("MemAvailable", proc, UNLIMITED)
    return max(0, min(available, *bytes_left, UNLIMITED))


def share_bytes() -> int:
    """Return the memory that this process may take: what its environment names, else what is free
    now.
    """
    share = os.environ.get(SHARE, "")
    return int(share) if share.isdecimal() else free_bytes()


def _bytes_left(group: ControlGroup) -> int:
    """Return what a group leaves of its own limit."""
    numbers = (group.number(name) for name in LIMITS[group.version])
    limits = [number for number in numbers if number is not None]
    used = group.number(USED[group.version])
    if not limits or used is None:
        return UNLIMITED

    statistics = group.statistics()
    num_cached = statistics.get(CACHED[group.version], 0)
    num_kept = sum(statistics.get(name, 0) for name in KEPT[group.version])
    return min(limits) - used + max(0, num_cached - num_kept)


def _of_machine(proc: Path) -> int:
    return _of_meminfo("MemTotal", proc, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def _of_meminfo(name: str, proc: Path, default: int) -> int:
    with suppress(OSError):
        for line in (proc / "meminfo").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024

    return default


# Cores.


def num_usable_cores(proc: Path = PROC) -> int:
    """Return the number of cores that this process may keep busy, by its CPU mask and the quotas of
    its groups.
    """
    num_cores = len(os.sched_getaffinity(0))
    for group in groups("cpu", proc):
        quota = _quota(group)
        if quota.quota_us is not None and quota.period_us:
            num_cores = min(num_cores, max(1, quota.quota_us // quota.period_us))

    return num_cores


def _quota(group: ControlGroup) -> Quota:
    if group.version == 1:
        quota_us = group.number("cpu.cfs_quota_us")
        if quota_us is not None and quota_us < 0:
            quota_us = None

        return Quota(quota_us, group.number("cpu.cfs_period_us"))

    # Without such a file there are no words, and without a quota the first is "max".
    words = group.read("cpu.max").split()
    if len(words) != 2 or not all(word.isdecimal() for word in words):
        return Quota(None, None)

    return Quota(int(words[0]), int(words[1]))


# Both, for people.


def describe(proc: Path = PROC) -> str:
    """Return one line with both limits, and what sets them where it is not the machine."""
    limit = memory_limit(proc)
    of_group = f" ({limit.source})" if limit.source else ""
    free_mb = free_bytes(proc) // MB

    num_cores = num_usable_cores(proc)
    num_unused = len(os.sched_getaffinity(0)) - num_cores
    cores = "cores" if num_cores > 1 else "core"
    of_quota = f" (a quota keeps it from {num_unused} more)" if num_unused else ""
    return (
        f"{num_cores} {cores}{of_quota}, memory {limit.num_bytes // MB} MB{of_group}, "
        f"of which {free_mb} MB are free"
    )


# Processes and threads.


def num_free_tasks(proc: Path = PROC) -> int | None:
    """Return how many more processes and threads this process's groups and its user's limit allow,
    None: no limit.

    The limit of a user does not hold for root. Source: getrlimit(2), and the kernel's page on the
    pids controller.
    """
    free = []
    for group in groups("pids", proc):
        limit = group.number("pids.max")
        used = group.number("pids.current")
        if limit is not None and used is not None:
            free.append(limit - used)

    of_user, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if of_user != resource.RLIM_INFINITY and os.geteuid() != 0:
        free.append(of_user - _num_tasks_of(os.geteuid(), proc))

    return max(0, min(free)) if free else None


def _num_tasks_of(uid: int, proc: Path) -> int:
    """Return how many processes and threads a user has."""
    num_tasks = 0
    for process in proc.iterdir():
        # An OSError: it has ended.
        with suppress(OSError):
            if process.name.isdigit() and process.stat().st_uid == uid:
                num_tasks += len(os.listdir(process / "task"))

    return num_tasks


@dataclass(frozen=True, slots=True)
class Machine:
    """Cores, GPUs and memory that this process may use."""

    num_cores: int
    # The names that CUDA_VISIBLE_DEVICES has for them.
    gpus: tuple[str, ...] = ()
    is_container: bool = False
    memory_bytes: int = UNLIMITED

    @classmethod
    def here(cls, environ: Mapping[str, str]) -> Self:
        """Return what this process finds."""
        return cls(
            num_usable_cores(),
            cls._gpus(environ),
            is_container(environ),
            memory_bytes(),
        )

    @staticmethod
    def _gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
        present = sorted((path.name[6:] for path in Path("/dev").glob("nvidia[0-9]*")), key=int)
        has_driver = Path("/dev/nvidiactl").exists() or Path("/proc/driver/nvidia").exists()
        if not present or not has_driver:
            return ()

        visible = environ.get("CUDA_VISIBLE_DEVICES")
        if visible is None:
            return tuple(str(number) for number in range(len(present)))

        names = [name.strip() for name in visible.split(",")]
        # CUDA too ends the list at the first invalid name.
        invalid = next((i for i, name in enumerate(names) if name in ("", "-1")), len(names))
        return tuple(names[:invalid])


def unusable_gpu_files(files: Path = Path("/dev")) -> list[Path]:
    """Return the files of NVIDIA's driver that the effective user of this process may not open, and
    CUDA must.
    """
    needed = [files / "nvidiactl", files / "nvidia-uvm", *sorted(files.glob("nvidia[0-9]*"))]
    return [
        file
        for file in needed
        if file.exists() and not os.access(file, os.R_OK | os.W_OK, effective_ids=True)
    ]


def is_container(environ: Mapping[str, str], files: Iterable[Path] = OF_CONTAINERS) -> bool:
    """Return whether this process runs in a container, whose ports only its runtime opens to a
    network.
    """
    is_named = any(name.startswith(CONTAINER_VARIABLES) for name in environ)
    return os.getpid() == 1 or is_named or any(file.exists() for file in files)
