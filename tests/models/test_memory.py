"""The memory that is left, from files as the kernel shows them."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmi.models.settings import free_bytes

GB = 1 << 30


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    write(tmp_path / "proc/meminfo", f"MemTotal: {16 << 20} kB\nMemFree: 1 kB\nMemAvailable:   {8 << 20} kB")
    return tmp_path / "proc"


def version_2(folder: Path, limit: object, used: int, cache: int = 0, shared: int = 0) -> None:
    write(folder / "memory.max", limit)
    write(folder / "memory.current", used)
    write(folder / "memory.stat", f"anon 1\nfile {cache}\nshmem {shared}")


def test_without_a_limit_it_is_what_the_machine_has_available(proc: Path, tmp_path: Path) -> None:
    write(proc / "self/cgroup", "0::/")
    assert free_bytes(proc, tmp_path / "groups") == 8 * GB
    version_2(tmp_path / "groups", "max", 7 * GB)
    assert free_bytes(proc, tmp_path / "groups") == 8 * GB


def test_a_group_leaves_its_limit_less_its_use_without_page_cache(proc: Path, tmp_path: Path) -> None:
    write(proc / "self/cgroup", "0::/")
    version_2(tmp_path / "groups", 4 * GB, 3 * GB, cache=2 * GB, shared=GB)
    assert free_bytes(proc, tmp_path / "groups") == 2 * GB, "shared memory is no cache that the kernel gives back"


def test_a_group_around_it_counts_too(proc: Path, tmp_path: Path) -> None:
    write(proc / "self/cgroup", "0::/pod/container")
    version_2(tmp_path / "groups/pod", 5 * GB, 2 * GB)
    version_2(tmp_path / "groups/pod/container", "max", GB)
    assert free_bytes(proc, tmp_path / "groups") == 3 * GB


def test_version_1_is_read_beside_an_empty_version_2(proc: Path, tmp_path: Path) -> None:
    write(proc / "self/cgroup", "9:cpu,cpuacct:/a\n4:memory:/a\n0::/")
    folder = tmp_path / "groups/memory"
    write(folder / "memory.limit_in_bytes", 9223372036854771712)
    write(folder / "a/memory.limit_in_bytes", 2 * GB)
    write(folder / "a/memory.usage_in_bytes", GB)
    write(folder / "a/memory.stat", f"cache 1\ntotal_cache {GB // 2}\ntotal_shmem 0")
    assert free_bytes(proc, tmp_path / "groups") == 3 * GB // 2


def test_a_group_over_its_limit_leaves_nothing(proc: Path, tmp_path: Path) -> None:
    write(proc / "self/cgroup", "0::/")
    version_2(tmp_path / "groups", GB, 2 * GB)
    assert free_bytes(proc, tmp_path / "groups") == 0


def test_this_machine_has_some() -> None:
    assert free_bytes() > 0
