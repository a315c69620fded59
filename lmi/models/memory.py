"""The memory of the host that processes of this container may still take.

It is the smaller of the machine's available memory and of what each control group above this process leaves, version 1
or 2. The page cache of a group counts as free. Source: the kernel's pages on /proc/meminfo and the memory controllers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

UNLIMITED = 1 << 62  # version 1 says a number of about this size where there is no limit


def free_bytes(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that may still be taken. `proc` and `groups` are where the kernel shows its files."""
    return max(0, min(_available(proc), *_left_in_groups(proc, groups), UNLIMITED))


def _available(proc: Path) -> int:
    with suppress(OSError):
        for line in (proc / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return UNLIMITED


def _left_in_groups(proc: Path, groups: Path) -> Iterator[int]:
    with suppress(OSError):
        for line in (proc / "self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                for folder in _upwards(groups, path):
                    yield from _left(folder, "memory.max", "memory.current", "file", "shmem")
            elif "memory" in controllers.split(","):
                names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache", "total_shmem"
                for folder in _upwards(groups / "memory", path):
                    yield from _left(folder, *names)


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    """Yield the folder of a group and of each group around it. In a container the first may not be shown."""
    folder = mount / path.strip("/")
    yield folder
    while folder != mount:
        folder = folder.parent
        yield folder


def _left(folder: Path, limit: str, used: str, cache: str, shared: str) -> Iterator[int]:
    """Yield what is left in one group, or nothing without a limit. Shared memory is part of the cache, but stays."""
    with suppress(OSError, ValueError):  # no such file, or "max"
        limit_bytes = int((folder / limit).read_text())
        if limit_bytes < UNLIMITED:
            lines = (folder / "memory.stat").read_text().splitlines()
            stat = {name: int(value) for name, value in (line.split() for line in lines)}
            yield limit_bytes - int((folder / used).read_text()) + stat.get(cache, 0) - stat.get(shared, 0)
