"""The limits of memory and cores, from files as the kernel shows them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lmi.shared.machine import (
    MB,
    describe,
    free_bytes,
    groups,
    memory_bytes,
    memory_limit,
    num_free_tasks,
    num_usable_cores,
)
from tests.kernel_files import GB, Kernel, kernel_in, write

UNLIMITED_V1 = 9223372036854771712


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    return kernel_in(tmp_path)


def version_2(
    folder: Path, limit: object, used: int, cache: int = 0, shared: int = 0, mapped: int = 0
) -> None:
    write(folder / "memory.max", limit)
    write(folder / "memory.current", used)
    write(folder / "memory.stat", f"anon 1\nfile {cache}\nshmem {shared}\nfile_mapped {mapped}")


def version_1(
    folder: Path, limit: int, used: int, cache: int = 0, of_all_above: int = UNLIMITED_V1
) -> None:
    write(folder / "memory.limit_in_bytes", limit)
    write(folder / "memory.usage_in_bytes", used)
    numbers = (
        f"cache 1\nhierarchical_memory_limit {of_all_above}\ntotal_cache {cache}\ntotal_shmem 0"
    )
    write(folder / "memory.stat", numbers)


# What is left.


def test_without_a_limit_it_is_what_the_machine_has_available(kernel: Kernel) -> None:
    kernel.own_groups("0::/")
    assert free_bytes(kernel.proc) == 8 * GB
    version_2(kernel.mount("unified", "cgroup2"), "max", 7 * GB)
    assert free_bytes(kernel.proc) == 8 * GB


def test_a_group_leaves_its_limit_less_its_use_without_page_cache(kernel: Kernel) -> None:
    kernel.own_groups("0::/")
    version_2(kernel.mount("unified", "cgroup2"), 4 * GB, 3 * GB, cache=2 * GB, shared=GB)
    assert free_bytes(kernel.proc) == 2 * GB, "shared memory is no cache that the kernel gives back"


def test_what_programs_have_mapped_does_not_count_as_free(kernel: Kernel) -> None:
    kernel.own_groups("0::/")
    version_2(kernel.mount("unified", "cgroup2"), 4 * GB, 3 * GB, cache=2 * GB, mapped=GB)
    assert free_bytes(kernel.proc) == 2 * GB


def test_a_group_around_it_counts_too(kernel: Kernel) -> None:
    kernel.own_groups("0::/pod/container")
    place = kernel.mount("unified", "cgroup2")
    version_2(place / "pod", 5 * GB, 2 * GB)
    version_2(place / "pod/container", "max", GB)
    assert free_bytes(kernel.proc) == 3 * GB


def test_version_1_is_read_beside_an_empty_version_2(kernel: Kernel) -> None:
    kernel.own_groups("9:cpu,cpuacct:/a\n4:memory:/a\n0::/")
    kernel.mount("unified", "cgroup2")
    place = kernel.mount("memory", "cgroup", "rw,memory")
    version_1(place, UNLIMITED_V1, 7 * GB)
    version_1(place / "a", 2 * GB, GB, cache=GB // 2)
    assert free_bytes(kernel.proc) == 3 * GB // 2


def test_a_group_over_its_limit_leaves_nothing(kernel: Kernel) -> None:
    kernel.own_groups("0::/")
    version_2(kernel.mount("unified", "cgroup2"), GB, 2 * GB)
    assert free_bytes(kernel.proc) == 0


# The limit, and where it comes from.


def test_without_a_group_the_limit_is_the_memory_of_the_machine(kernel: Kernel) -> None:
    kernel.own_groups("0::/")
    assert memory_limit(kernel.proc) == (16 * GB, "")
    version_2(kernel.mount("unified", "cgroup2"), 32 * GB, GB)
    assert memory_limit(kernel.proc) == (16 * GB, "")


def test_the_smallest_limit_of_all_groups_above_counts(kernel: Kernel) -> None:
    """As in a slice of systemd, or a job of Slurm, without a namespace of control groups."""
    kernel.own_groups("0::/lmi.slice/job/step")
    place = kernel.mount("unified", "cgroup2")
    version_2(place / "lmi.slice", 2 * GB, GB)
    version_2(place / "lmi.slice/job", 3 * GB, GB)
    version_2(place / "lmi.slice/job/step", "max", GB)
    assert memory_limit(kernel.proc) == (2 * GB, str(place / "lmi.slice/memory.max"))


def test_the_limit_from_which_on_processes_are_held_up_counts_too(kernel: Kernel) -> None:
    kernel.own_groups("0::/")
    place = kernel.mount("unified", "cgroup2")
    version_2(place, 3 * GB, GB)
    write(place / "memory.high", 2 * GB)
    assert memory_limit(kernel.proc) == (2 * GB, str(place / "memory.high"))
    assert free_bytes(kernel.proc) == GB


def test_version_1_counts_its_own_hierarchy(kernel: Kernel) -> None:
    kernel.own_groups("9:cpu,cpuacct:/other\n4:memory:/docker/abc\n0::/")
    place = kernel.mount("memory", "cgroup", "rw,memory")
    version_1(place, UNLIMITED_V1, GB)
    version_1(place / "docker", 5 * GB, GB)
    version_1(place / "docker/abc", 4 * GB, GB)
    assert memory_bytes(kernel.proc) == 4 * GB


def test_version_1_tells_of_a_limit_above_what_a_container_sees(kernel: Kernel) -> None:
    kernel.own_groups("4:memory:/kubepods/pod/abc")
    place = kernel.mount("memory", "cgroup", "rw,memory", top="/kubepods/pod/abc")
    version_1(place, UNLIMITED_V1, GB, of_all_above=2 * GB)
    assert memory_bytes(kernel.proc) == 2 * GB


@pytest.mark.parametrize(
    ("own", "top"),
    [
        # Version 1 in a container: the mount shows only its group
        ("/docker/abc", "/docker/abc"),
        # And a process in a group below it
        ("/docker/abc/inner", "/docker/abc"),
        # A namespace of control groups
        ("/", "/"),
        # A mount that was made before the namespace, of a group above it
        ("/", "/../.."),
        # A process that has left its namespace
        ("/../other", "/"),
        # A container in a container
        ("/docker/outer/docker/abc", "/docker/abc"),
    ],
)
def test_the_group_is_found_where_a_container_shows_another_part_of_the_tree(
    kernel: Kernel, own: str, top: str
) -> None:
    kernel.own_groups(f"0::{own}")
    place = kernel.mount("unified", "cgroup2", top=top)
    version_2(place, GB, GB // 4)
    assert memory_bytes(kernel.proc) == GB
    assert free_bytes(kernel.proc) == 3 * GB // 4


@pytest.mark.parametrize("below", ["", "worker"])
def test_the_group_is_found_in_a_mount_that_is_older_than_its_namespace(
    kernel: Kernel, below: str
) -> None:
    """As `unshare --cgroup` leaves it: no file names the groups above."""
    kernel.own_groups(f"0::/{below}")
    place = kernel.mount("unified", "cgroup2", top="/../..")
    version_2(place / "pods/other", GB // 2, GB // 4)
    write(place / "pods/other" / below / "cgroup.procs", os.getppid())
    version_2(place / "pods/own", GB, GB // 4)
    write(place / "pods/own" / below / "cgroup.procs", f"1\n{os.getpid()}")
    assert memory_limit(kernel.proc) == (GB, str(place / "pods/own/memory.max"))
    assert free_bytes(kernel.proc) == 3 * GB // 4


def test_own_groups_come_first_and_none_lies_above_its_mount(kernel: Kernel) -> None:
    kernel.own_groups("0::/a/b")
    place = kernel.mount("unified", "cgroup2")
    assert [group.folder for group in groups("memory", kernel.proc)] == [
        place / "a/b",
        place / "a",
        place,
    ]


def test_without_proc_there_is_no_limit(tmp_path: Path) -> None:
    assert memory_bytes(tmp_path) == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert groups("memory", tmp_path) == []


# Cores.


# Of this machine, as every test has them.
NUM_CORES = len(os.sched_getaffinity(0))
PERIOD_US = 100_000


@pytest.mark.parametrize(
    ("quota", "num_cores"),
    [
        (f"max {PERIOD_US}", NUM_CORES),
        (f"{2 * NUM_CORES * PERIOD_US} {PERIOD_US}", NUM_CORES),
        (f"{NUM_CORES * PERIOD_US - 1} {PERIOD_US}", max(1, NUM_CORES - 1)),
        (f"{PERIOD_US // 2} {PERIOD_US}", 1),
    ],
)
def test_cores_are_those_of_the_mask_within_the_quota(
    kernel: Kernel, quota: str, num_cores: int
) -> None:
    kernel.own_groups("0::/job")
    write(kernel.mount("unified", "cgroup2") / "job/cpu.max", quota)
    assert num_usable_cores(kernel.proc) == num_cores


def test_a_mask_of_fewer_cores_counts_more_than_a_larger_quota(kernel: Kernel) -> None:
    kernel.own_groups("0::/job")
    write(kernel.mount("unified", "cgroup2") / "job/cpu.max", f"max {PERIOD_US}")
    cores = os.sched_getaffinity(0)
    # Of this thread alone.
    os.sched_setaffinity(0, {min(cores)})
    try:
        assert num_usable_cores(kernel.proc) == 1
    finally:
        os.sched_setaffinity(0, cores)


def test_the_quota_of_a_group_above_bounds_the_cores(kernel: Kernel) -> None:
    kernel.own_groups("0::/slice/job")
    place = kernel.mount("unified", "cgroup2")
    write(place / "slice/cpu.max", f"{PERIOD_US} {PERIOD_US}")
    write(place / "slice/job/cpu.max", f"max {PERIOD_US}")
    assert num_usable_cores(kernel.proc) == 1


@pytest.mark.parametrize(
    ("quota_us", "num_cores"),
    [
        (-1, NUM_CORES),
        (NUM_CORES * PERIOD_US - 1, max(1, NUM_CORES - 1)),
        (PERIOD_US // 5, 1),
    ],
)
def test_version_1_has_its_quota_in_two_files(
    kernel: Kernel, quota_us: int, num_cores: int
) -> None:
    kernel.own_groups("9:cpu,cpuacct:/a\n4:memory:/b")
    place = kernel.mount("cpu", "cgroup", "rw,cpu,cpuacct")
    write(place / "a/cpu.cfs_quota_us", quota_us)
    write(place / "a/cpu.cfs_period_us", PERIOD_US)
    assert num_usable_cores(kernel.proc) == num_cores


def test_usable_cores_are_those_of_the_mask() -> None:
    assert 1 <= num_usable_cores() <= len(os.sched_getaffinity(0))


# Both, here and for people.


def test_this_machine_has_some() -> None:
    assert 0 < free_bytes() <= memory_bytes()


@pytest.mark.skipif(NUM_CORES == 1, reason="a quota keeps no core from a machine with one")
def test_people_are_told_both_limits_and_what_sets_them(kernel: Kernel) -> None:
    kernel.own_groups("0::/")
    place = kernel.mount("unified", "cgroup2")
    version_2(place, 700 * MB, 200 * MB)
    write(place / "cpu.max", f"{PERIOD_US} {PERIOD_US}")
    description = describe(kernel.proc)
    assert description == (
        f"1 core (a quota keeps it from {NUM_CORES - 1} more), "
        f"memory 700 MB ({place}/memory.max), of which 500 MB are free"
    )


# Processes and threads.


@pytest.mark.parametrize(
    ("kind", "own"),
    [("cgroup", "8:pids:/slice/own"), ("cgroup2", "0::/slice/own")],
    ids=["version 1", "version 2"],
)
def test_the_least_number_of_tasks_of_a_group_and_those_above_it_counts(
    kernel: Kernel, kind: str, own: str
) -> None:
    kernel.own_groups(own)
    mount = kernel.mount("pids", kind, "rw,pids")
    assert num_free_tasks(kernel.proc) is None

    write(mount / "slice/own/pids.max", "max")
    write(mount / "slice/own/pids.current", 3)
    assert num_free_tasks(kernel.proc) is None

    write(mount / "slice/pids.max", 12)
    write(mount / "slice/pids.current", 5)
    assert num_free_tasks(kernel.proc) == 7

    write(mount / "slice/own/pids.max", 4)
    assert num_free_tasks(kernel.proc) == 1

    write(mount / "slice/own/pids.current", 9)
    assert num_free_tasks(kernel.proc) == 0
