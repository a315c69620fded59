"""What a start needs of the system, and what is said where there is less."""

import errno
import resource
from pathlib import Path

import pytest

from lmi.errors import StartError
from lmi.runtime import cannot_write
from lmi.supervisor.stages import check_memory, check_task_limit
from tests.kernel_files import kernel_in, write


def free_tasks(folder: Path, limit: object) -> Path:
    """Return a /proc of a control group in which 100 tasks run, and `limit` may."""
    kernel = kernel_in(folder)
    kernel.own_groups("0::/job")
    group = kernel.mount("unified", "cgroup2") / "job"
    write(group / "pids.max", limit)
    write(group / "pids.current", 100)
    return kernel.proc


def test_a_server_that_could_not_start_its_processes_says_how_many_it_needs(
    tmp_path: Path,
) -> None:
    proc = free_tasks(tmp_path, limit=102)
    with pytest.raises(
        StartError,
        match=r"needs 7 more processes and threads, and only 2 may .*pids\.max.*RLIMIT_NP",
    ):
        check_task_limit(num_front_ends=1, num_engines=1, proc=proc)


@pytest.mark.parametrize("limit", [107, 1100, "max"])
def test_a_server_with_room_for_its_processes_starts(tmp_path: Path, limit: object) -> None:
    check_task_limit(num_front_ends=1, num_engines=1, proc=free_tasks(tmp_path, limit))


def allowed_memory(folder: Path, limit: object) -> Path:
    """Return a /proc of a control group with a limit of memory."""
    kernel = kernel_in(folder)
    kernel.own_groups("0::/job")
    write(kernel.mount("unified", "cgroup2") / "job/memory.max", limit)
    return kernel.proc


def test_a_server_for_which_there_is_no_memory_names_the_limit(tmp_path: Path) -> None:
    with pytest.raises(
        StartError, match=r"needs 64 MB .* only 40 MB are allowed here \(.*/job/memory.max\)"
    ):
        check_memory(allowed_memory(tmp_path, 40 << 20))


@pytest.mark.parametrize("limit", [64 << 20, "max"])
def test_a_server_with_memory_for_itself_starts(tmp_path: Path, limit: object) -> None:
    check_memory(allowed_memory(tmp_path, limit))


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_a_lack_of_descriptors_is_told_as_one_and_not_as_a_fault_of_the_folder(number: int) -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    message = str(cannot_write(Path("/x"), OSError(number, "Too many open files")))
    assert (
        message
        == f"/x: Too many open files: a process has at most {limit} (`ulimit -n`, RLIMIT_NOFILE)"
    )
    assert "TMPDIR" in str(
        cannot_write(Path("/x"), OSError(errno.ENOSPC, "No space left on device"))
    )
