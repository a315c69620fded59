"""The memory, cores and processes that the kernel lets this process have: those of the machine, or
of control groups.

A process is in one group of each hierarchy of control groups, of version 1 or 2, and the limits of
all groups above its own count too. Everything that is sized by the machine asks here. Sources:
cgroups(7), cpuset(7), proc(5), and the kernel's pages on both versions and their memory
controllers.
"""

import os
import re
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

PROC = Path("/proc")
SHARE = (
    "LMI_MEMORY"  # the variable that names to an engine the bytes that it may take, itself included
)
UNLIMITED = 1 << 62  # version 1 says a number of about this size where there is no limit
MB = 1 << 20
ESCAPED = re.compile(r"\\([0-7]{3})")  # a character of a path in mountinfo

# The names of files, and of lines of memory.stat, by version.
LIMITS = {
    1: ("memory.limit_in_bytes",),
    2: ("memory.max", "memory.high"),
}  # above `high` a process hardly runs
USED = {1: "memory.usage_in_bytes", 2: "memory.current"}
OF_ALL_ABOVE = (
    "hierarchical_memory_limit"  # in version 1, also of groups that a container does not see
)
CACHED = {1: "total_cache", 2: "file"}
# Parts of the cache that the kernel cannot give back, or only at the cost of programs that run.
KEPT = {1: ("total_shmem", "total_mapped_file"), 2: ("shmem", "file_mapped")}


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
        with suppress(ValueError):  # "max", or no such file
            number = int(self.read(name))
            return number if number < UNLIMITED else None

        return None

    def statistics(self) -> dict[str, int]:
        """Return the numbers of its memory.stat by name."""
        pairs = (line.split() for line in self.read("memory.stat").splitlines())
        return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}


class MemoryLimit(NamedTuple):
    num_bytes: int
    source: str  # the file that says it, or "" for the memory of the machine


def groups(controller: str, proc: Path = PROC) -> list[ControlGroup]:
    """Return the groups with this controller ("memory", "cpu"): this process's own first, then
    those above it.

    `proc` is where the kernel shows its files. A container may not see all of them: of a mount that
    shows another part of the hierarchy only its top counts, which is the container's.
    """
    own = dict(_own_groups(controller, proc))
    found: list[ControlGroup] = []
    for version, mount_point, top in _mounts(controller, proc):
        if version not in own:
            continue

        path = own[version]
        is_shown = ".." not in path.parts and path.is_relative_to(top)
        folder = mount_point / path.relative_to(top) if is_shown else mount_point
        for one in (folder, *folder.parents):
            if one.is_relative_to(mount_point):
                found.append(ControlGroup(one, version))

    return list(dict.fromkeys(found))


def _own_groups(controller: str, proc: Path) -> Iterator[tuple[int, PurePosixPath]]:
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


def _unescaped(found: re.Match[str]) -> str:
    return chr(int(found[1], 8))


# Memory.


def memory_limit(proc: Path = PROC) -> MemoryLimit:
    """Return the memory of this machine or, if it is less, the smallest limit of a group."""
    limits = [MemoryLimit(_of_machine(proc), "")]
    for group in groups("memory", proc):
        for name in LIMITS[group.version]:
            if (num_bytes := group.number(name)) is not None:
                limits.append(MemoryLimit(num_bytes, str(group.folder / name)))

        if group.version == 1:
            of_all_above = group.statistics().get(OF_ALL_ABOVE, UNLIMITED)
            limits.append(MemoryLimit(of_all_above, f"{group.folder}/memory.stat: {OF_ALL_ABOVE}"))

    return min(limits, key=lambda limit: limit.num_bytes)  # of equal ones the first


def memory_bytes(proc: Path = PROC) -> int:
    """Return the memory that this process can have at most."""
    return memory_limit(proc).num_bytes


def free_bytes(proc: Path = PROC) -> int:
    """Return the bytes that processes of this container may still take.

    It is the smaller of the machine's available memory and of what each group leaves. The page
    cache of a group counts as free, but for shared memory and for what programs that run have
    mapped.
    """
    left = [_left(group) for group in groups("memory", proc)]
    return max(0, min(_of_meminfo("MemAvailable", proc, UNLIMITED), *left, UNLIMITED))


def share_bytes() -> int:
    """Return the memory that this process may take: what its environment names, else what is free
    now.
    """
    named = os.environ.get(SHARE, "")
    return int(named) if named.isdecimal() else free_bytes()


def _left(group: ControlGroup) -> int:
    """Return what a group leaves of its own limit."""
    limits = [
        number for name in LIMITS[group.version] if (number := group.number(name)) is not None
    ]
    used = group.number(USED[group.version])
    if not limits or used is None:
        return UNLIMITED

    numbers = group.statistics()
    kept = sum(numbers.get(name, 0) for name in KEPT[group.version])
    reclaimable = max(0, numbers.get(CACHED[group.version], 0) - kept)
    return min(limits) - used + reclaimable


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
        quota_us, period_us = _quota(group)
        if quota_us is not None and period_us:
            num_cores = min(num_cores, max(1, quota_us // period_us))

    return num_cores


def _quota(group: ControlGroup) -> tuple[int | None, int | None]:
    """Return the time that a group may compute in each period, None without a quota, and the
    period.
    """
    if group.version == 1:
        quota_us = group.number("cpu.cfs_quota_us")
        return (None if quota_us is None or quota_us < 0 else quota_us), group.number(
            "cpu.cfs_period_us"
        )

    words = group.read("cpu.max").split()
    if len(words) != 2 or not all(word.isdecimal() for word in words):
        return None, None  # no such file, or "max"

    return int(words[0]), int(words[1])


# Both, for people.


def describe(proc: Path = PROC) -> str:
    """Return one line with both limits, and what sets them where it is not the machine."""
    limit = memory_limit(proc)
    num_cores = num_usable_cores(proc)
    of_group = f" ({limit.source})" if limit.source else ""
    cores = f"{num_cores} core{'s' if num_cores > 1 else ''}"
    num_others = len(os.sched_getaffinity(0)) - num_cores
    of_quota = f" (a quota keeps it from {num_others} more)" if num_others else ""
    free_mb = free_bytes(proc) // MB
    return (
        f"{cores}{of_quota}, memory {limit.num_bytes // MB} MB{of_group}, of which {free_mb} "
        f"MB "
        f"are free"
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
        with suppress(OSError):  # it has ended
            if process.name.isdigit() and process.stat().st_uid == uid:
                num_tasks += len(os.listdir(process / "task"))

    return num_tasks
