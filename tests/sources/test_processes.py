"""The fetches that front ends ask for, as the supervisor sees them. Their processes do not start
here.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmi.errors import ModelUnusable, StartError
from lmi.runtime import ServerRuntime
from lmi.settings.config import ServerConfig
from lmi.sources.fetches import FAILURE, REQUEST, FetchRequest, WantedSource, failure, write
from lmi.sources.processes import MAX_AT_ONCE, FetchProcesses
from lmi.supervisor.child import Child, Failure

LOST = Failure(
    code=1, cause="start_failed", stage="fetch process", message="fetch process died 3 times"
)


class Asker:
    """What front ends do in the folder of the fetches."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def ask(self, name: str, writer: int = os.getpid()) -> Path:
        folder = self._folder / name
        folder.mkdir(parents=True)
        wanted_source = WantedSource(source=f"writers/{name}", download_dir="/d", is_adapter=True)
        write(folder / REQUEST, FetchRequest(sources=(wanted_source,), writer=writer))
        return folder


@pytest.fixture
def runtime() -> Iterator[ServerRuntime]:
    runtime = ServerRuntime.create(ServerConfig())
    yield runtime
    runtime.remove()


@pytest.fixture
def asker(runtime: ServerRuntime) -> Asker:
    return Asker(runtime.fetches())


@pytest.fixture
def fetches(runtime: ServerRuntime) -> FetchProcesses:
    return FetchProcesses(runtime)


def folder_of(child: Child) -> str:
    *_, request, folder = [word for word in child.kind.argv(0) if word.startswith("/")]
    assert request == f"{folder}/{REQUEST}"
    return Path(folder).name


def dead_pid() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_nothing_is_asked_for_at_first(fetches: FetchProcesses) -> None:
    fetches.look()
    assert list(fetches) == []


def test_a_request_that_cannot_be_read_for_a_moment_is_begun_when_it_can(
    asker: Asker, fetches: FetchProcesses
) -> None:
    folder = asker.ask("late")
    (folder / REQUEST).rename(folder / "away")
    # Opening it fails, and not because it is not there
    (folder / REQUEST).mkdir()
    asker.ask("other")
    fetches.look()
    assert [folder_of(child) for child in fetches] == ["other"] and folder.is_dir()

    (folder / REQUEST).rmdir()
    (folder / "away").rename(folder / REQUEST)
    fetches.look()

    assert {folder_of(child) for child in fetches} == {"late", "other"}


def test_the_oldest_requests_come_first_and_the_others_wait(
    asker: Asker, fetches: FetchProcesses
) -> None:
    folders = {}
    for number in range(MAX_AT_ONCE + 2):
        folders[str(number)] = asker.ask(str(number))
        fetches.look()

    assert [folder_of(child) for child in fetches] == list("0123")
    (folders["1"] / REQUEST).unlink()
    fetches.look()
    assert [folder_of(child) for child in fetches] == list("0234")
    assert not folders["1"].exists()


def test_a_failure_is_left_for_the_front_end_and_the_next_request_has_its_turn(
    asker: Asker, fetches: FetchProcesses
) -> None:
    folders = [asker.ask(str(number)) for number in range(MAX_AT_ONCE + 1)]
    fetches.look()
    first, *_ = fetches
    folder = next(folder for folder in folders if folder.name == folder_of(first))
    first.fail(LOST)
    fetches.look()
    assert first not in fetches and len(list(fetches)) == MAX_AT_ONCE

    start_error = failure(folder)
    assert (
        type(start_error) is StartError
        and start_error.message == f"'writers/{folder.name}': fetch process died 3 times"
    )

    (folder / REQUEST).unlink()
    fetches.look()

    assert not folder.exists()


def test_the_reason_that_the_process_itself_gave_stays(
    asker: Asker, fetches: FetchProcesses
) -> None:
    folder = asker.ask("gated")
    fetches.look()
    write(folder / FAILURE, ModelUnusable("writers/gated: accept its licence").info)
    next(iter(fetches)).fail(LOST)
    assert type(failure(folder)) is ModelUnusable


def test_a_failure_that_nobody_waits_for_is_only_logged(
    asker: Asker, fetches: FetchProcesses
) -> None:
    folder = asker.ask("gone")
    fetches.look()
    child = next(iter(fetches))
    for file in folder.iterdir():
        file.unlink()

    folder.rmdir()
    child.fail(LOST)
    fetches.look()
    assert list(fetches) == []


def test_a_request_of_a_front_end_that_died_is_removed(
    asker: Asker, fetches: FetchProcesses
) -> None:
    folder = asker.ask("orphan", writer=dead_pid())
    fetches.look()
    assert list(fetches) == [] and not folder.exists()


def test_a_folder_without_a_request_is_removed_unless_it_is_still_hidden(
    runtime: ServerRuntime, fetches: FetchProcesses
) -> None:
    hidden = runtime.fetches() / ".new"
    withdrawn = runtime.fetches() / "old"
    for folder in (hidden, withdrawn):
        folder.mkdir(parents=True)

    fetches.look()
    assert hidden.exists() and not withdrawn.exists() and list(fetches) == []


def test_a_request_that_cannot_be_read_is_removed(asker: Asker, fetches: FetchProcesses) -> None:
    folder = asker.ask("damaged")
    (folder / REQUEST).write_bytes(b"{\xff")
    fetches.look()
    assert list(fetches) == [] and not folder.exists()
