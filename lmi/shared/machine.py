"""How much memory, how many cores and how many processes the kernel lets this process have: those
of the machine, or fewer by the limits of control groups.

Everything that is sized by the machine asks here. Control groups have hierarchies, of version 1 or
2. A process is in one group of each hierarchy, and the limits of all groups above that one count
too. Sources: cgroups(7), cpuset(7), proc(5), and the kernel's pages on both versions and their
memory controllers.

`scripts/install` asks here before anything is installed, so this module needs only Python.
"""

import functools
import os
import re
import resource
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple, Self

PROC = Path("/proc")
# The variable that tells an engine how many bytes it may take, itself included.
SHARE = "LMI_MEMORY"
# Where there is no limit, version 1 has a number of about this size.
UNLIMITED = 1 << 62
MB = 1 << 20
# A character of a path in mountinfo.
ESCAPED = re.compile(r"\\([0-7]{3})")

# These files have the limits of a group's memory, by version. Above `high` a process hardly runs.
LIMITS = {
    1: ("memory.limit_in_bytes",),
    2: ("memory.max", "memory.high"),
}
# The file with the memory that a group uses, by version.
USED = {
    1: "memory.usage_in_bytes",
    2: "memory.current",
}
# The line of memory.stat with the smallest limit of a group and of all above it, also of those that
# a container does not see. Only version 1 has it.
LIMIT_OF_ALL_ABOVE = "hierarchical_memory_limit"
# The line with the page cache, by version.
CACHED = {
    1: "total_cache",
    2: "file",
}
# The lines with the parts of the cache that the kernel cannot give back, or only at the cost of
# programs that run.
KEPT = {
    1: ("total_shmem", "total_mapped_file"),
    2: ("shmem", "file_mapped"),
}
# Files and variables that Docker, Podman, Kubernetes, ECS and SageMaker leave in a container.
CONTAINER_FILES = (Path("/.dockerenv"), Path("/run/.containerenv"), Path("/opt/ml"))
CONTAINER_VARIABLES = (
    "KUBERNETES_SERVICE_HOST",
    "ECS_CONTAINER_METADATA_URI_V4",
    "SAGEMAKER_",
    "SM_",
)


class ControlGroup(NamedTuple):
    """A group that limits this process. The kernel shows its files in a folder."""

    folder: Path
    version: int

    def read(self, name: str) -> str:
        """Return the text of one of its files, "" if there is none."""
        with suppress(OSError):
            return (self.folder / name).read_text()

        return ""

    def number(self, name: str) -> int | None:
        """Return the number in one of its files, or None if there is no file or no limit."""
        # The text is no number if it is "max", or if there is no file.
        with suppress(ValueError):
            number = int(self.read(name))
            return number if number < UNLIMITED else None

        return None

    def statistics(self) -> dict[str, int]:
        """Return the numbers of its memory.stat by name."""
        pairs = (line.split() for line in self.read("memory.stat").splitlines())
        return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}


class MemoryLimit(NamedTuple):
    """How much memory this process may use."""

    num_bytes: int
    # The file that has the limit, or "" for the memory of the machine.
    source: str


class Quota(NamedTuple):
    """The time that the processes of a group may compute in each period. Both are None without a
    quota.
    """

    quota_us: int | None
    period_us: int | None


def groups(controller: str, proc: Path = PROC) -> list[ControlGroup]:
    """Return the groups with this controller ("memory", "cpu"): this process's own first, then
    those above it. `proc` is where the kernel shows its files.

    A container may not see all groups. Of a mount that shows another part of the hierarchy only the
    top counts, which is the group of the container.
    """
    paths = dict(_groups_of_process(controller, proc))
    # A dictionary keeps each group once, since it may be seen through several mounts.
    found_groups = dict[ControlGroup, None]()
    for mount in _mounts(controller, proc):
        path = paths.get(mount.version)
        if path is None:
            continue

        group = _own_folder(mount, path)
        for folder in (group, *group.parents):
            if folder.is_relative_to(mount.folder):
                found_groups[ControlGroup(folder, mount.version)] = None

    return list(found_groups)


class _Mount(NamedTuple):
    """A mount of control groups."""

    version: int
    folder: Path
    # The group that the folder shows; those below it lie in the folder.
    top: PurePosixPath


def _groups_of_process(controller: str, proc: Path) -> Iterator[tuple[int, PurePosixPath]]:
    """Yield the version of each hierarchy that may have the controller, and the path of this
    process's group in it.
    """
    with suppress(OSError):
        for line in (proc / "self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                yield 2, PurePosixPath(path)
            elif controller in controllers.split(","):
                yield 1, PurePosixPath(path)


def _mounts(controller: str, proc: Path) -> Iterator[_Mount]:
    """Yield each mount of control groups that may have the controller."""
    with suppress(OSError):
        for line in (proc / "self/mountinfo").read_text().splitlines():
            mount_fields, _, system_fields = line.partition(" - ")
            words = mount_fields.split()
            top, folder = (ESCAPED.sub(_unescaped, word) for word in words[3:5])
            kind, _, options = system_fields.split(" ", 2)
            if kind == "cgroup2":
                yield _Mount(2, Path(folder), PurePosixPath(top))
            elif kind == "cgroup" and controller in options.split(","):
                yield _Mount(1, Path(folder), PurePosixPath(top))


def _unescaped(match: re.Match[str]) -> str:
    return chr(int(match[1], 8))


def _own_folder(mount: _Mount, path: PurePosixPath) -> Path:
    """Return the folder of this process's group in a mount, or the mount's own folder if the group
    is not in it. `path` is that of the group in this process's namespace.
    """
    if ".." in path.parts:
        return mount.folder

    if path.is_relative_to(mount.top):
        return mount.folder / path.relative_to(mount.top)

    # The mount is older than the namespace, and its top is so many groups above.
    _, *names_above = mount.top.parts
    if set(names_above) == {".."}:
        below = path.relative_to("/")
        return _folder_of_pid(mount.folder, len(names_above), below, os.getpid()) or mount.folder

    return mount.folder


@functools.cache
def _folder_of_pid(
    top: Path, num_groups_between: int, below: PurePosixPath, pid: int
) -> Path | None:
    """Return the folder of a process's group that lies so many groups, whose names nobody tells,
    and then `below` under the top, or None if there is none.
    """
    for folder in top.glob("/".join("*" * num_groups_between)):
        group = folder / below
        with suppress(OSError):
            if str(pid) in (group / "cgroup.procs").read_text().split():
                return group

    return None


# Memory.


def memory_limit(proc: Path = PROC) -> MemoryLimit:
    """Return the memory of this machine or, if it is less, the smallest limit of a group."""
    limits = [MemoryLimit(_machine_bytes(proc), "")]
    for group in groups("memory", proc):
        for name in LIMITS[group.version]:
            num_bytes = group.number(name)
            if num_bytes is not None:
                limits.append(MemoryLimit(num_bytes, str(group.folder / name)))

        if group.version == 1:
            num_bytes = group.statistics().get(LIMIT_OF_ALL_ABOVE, UNLIMITED)
            source = f"{group.folder}/memory.stat: {LIMIT_OF_ALL_ABOVE}"
            limits.append(MemoryLimit(num_bytes, source))

    # Of equal limits the first counts.
    return min(limits, key=lambda limit: limit.num_bytes)


def memory_bytes(proc: Path = PROC) -> int:
    """Return the memory that this process can have at most."""
    return memory_limit(proc).num_bytes


def free_bytes(proc: Path = PROC) -> int:
    """Return the bytes that processes of this container may still take: what the machine has
    available, or what a group leaves, if that is less.

    The page cache of a group counts as free, without shared memory and files that running programs
    have mapped.
    """
    bytes_left = [_bytes_left(group) for group in groups("memory", proc)]
    available = _bytes_in_meminfo("MemAvailable", proc, UNLIMITED)
    return max(0, min(available, *bytes_left, UNLIMITED))


def share_bytes(proc: Path = PROC) -> int:
    """Return the memory that this process may take: its share, which the supervisor has set in its
    environment, or else what is free now.
    """
    share = os.environ.get(SHARE, "")
    if share.isdecimal():
        return int(share)

    return free_bytes(proc)


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


def _machine_bytes(proc: Path) -> int:
    """Return the memory of the machine."""
    default = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return _bytes_in_meminfo("MemTotal", proc, default)


def _bytes_in_meminfo(name: str, proc: Path, default: int) -> int:
    """Return what a line of /proc/meminfo says, or `default` if there is no such line."""
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
    return min(len(os.sched_getaffinity(0)), quota_cores(proc))


def quota_cores(proc: Path = PROC) -> int:
    """Return the number of cores that the quotas of this process's groups are worth, at least 1."""
    num_cores = UNLIMITED
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
    """Return one line with the cores and the memory, and what limits them if it is not the
    machine.
    """
    num_cores = num_usable_cores(proc)
    cores = f"{num_cores} cores" if num_cores > 1 else f"{num_cores} core"
    num_unused = len(os.sched_getaffinity(0)) - num_cores
    if num_unused:
        cores += f" (a quota keeps it from {num_unused} more)"

    limit = memory_limit(proc)
    memory = f"memory {limit.num_bytes // MB} MB"
    if limit.source:
        memory += f" ({limit.source})"

    return f"{cores}, {memory}, of which {free_bytes(proc) // MB} MB are free"


# Processes and threads.


def num_free_tasks(proc: Path = PROC) -> int | None:
    """Return how many more processes and threads this process's groups and its user's limit allow,
    or None if there is no limit.

    The limit of a user does not hold for root. Source: getrlimit(2), and the kernel's page on the
    pids controller.
    """
    numbers_left = []
    for group in groups("pids", proc):
        limit = group.number("pids.max")
        num_used = group.number("pids.current")
        if limit is not None and num_used is not None:
            numbers_left.append(limit - num_used)

    user_limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if user_limit != resource.RLIM_INFINITY and os.geteuid() != 0:
        numbers_left.append(user_limit - _num_tasks_of(os.geteuid(), proc))

    if not numbers_left:
        return None

    return max(0, min(numbers_left))


def _num_tasks_of(uid: int, proc: Path) -> int:
    """Return how many processes and threads a user has."""
    num_tasks = 0
    for process in proc.iterdir():
        # The process may have ended.
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
        """Return what this process may use, in its environment."""
        return cls(
            num_cores=num_usable_cores(),
            gpus=cls._gpus(environ),
            is_container=is_container(environ),
            memory_bytes=memory_bytes(),
        )

    @staticmethod
    def _gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
        present = list(Path("/dev").glob("nvidia[0-9]*"))
        has_driver = Path("/dev/nvidiactl").exists() or Path("/proc/driver/nvidia").exists()
        if not present or not has_driver:
            return ()

        visible = environ.get("CUDA_VISIBLE_DEVICES")
        if visible is None:
            return tuple(str(number) for number in range(len(present)))

        names: list[str] = []
        for text in visible.split(","):
            name = text.strip()
            # CUDA too ends the list at the first invalid name.
            if name in ("", "-1"):
                break

            names.append(name)

        return tuple(names)


def unusable_gpu_files(files: Path = Path("/dev")) -> list[Path]:
    """Return the files of NVIDIA's driver that CUDA has to open and the effective user of this
    process may not.
    """
    unusable = []
    for file in (files / "nvidiactl", files / "nvidia-uvm", *sorted(files.glob("nvidia[0-9]*"))):
        if file.exists() and not os.access(file, os.R_OK | os.W_OK, effective_ids=True):
            unusable.append(file)

    return unusable


def is_container(environ: Mapping[str, str], files: Iterable[Path] = CONTAINER_FILES) -> bool:
    """Return whether this process runs in a container, whose ports no network reaches unless its
    runtime opens them.
    """
    is_named = any(name.startswith(CONTAINER_VARIABLES) for name in environ)
    return os.getpid() == 1 or is_named or any(file.exists() for file in files)
