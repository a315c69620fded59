"""What a start needs of the system, and what is said where there is less."""

import errno
import resource
from pathlib import Path

import pytest

from lmi.errors import StartError
from lmi.runtime import cannot_write
from lmi.shared import machine
from lmi.supervisor.stages import check_task_limit


def test_a_server_that_could_not_start_its_processes_says_how_many_it_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "num_free_tasks", lambda: 2)
    with pytest.raises(
        StartError,
        match=r"needs 7 more processes and threads, and only 2 may .*pids\.max.*RLIMIT_NP",
    ):
        check_task_limit(num_front_ends=1, num_engines=1)


@pytest.mark.parametrize("num_free", [7, 1000, None])
def test_a_server_with_room_for_its_processes_starts(
    monkeypatch: pytest.MonkeyPatch, num_free: int | None
) -> None:
    monkeypatch.setattr(machine, "num_free_tasks", lambda: num_free)
    check_task_limit(num_front_ends=1, num_engines=1)


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
