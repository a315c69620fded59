"""Files that say what should be loaded: names, readers that never see half an entry, writers that
die.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from lmi.adapters.files import Adapter
from lmi.errors import InvalidParameter, Unavailable
from lmi.shared.desired_state import Folder, State
from tests.descriptors import no_descriptor_left


def folder(tmp_path: Path) -> Folder[Adapter]:
    return Folder(tmp_path / "adapters", Adapter)


def entry(name: str, path: str = "/adapter", state: State = State.READY) -> Adapter:
    return Adapter(name=name, path=path, state=state)


def test_what_one_process_writes_another_reads(tmp_path: Path) -> None:
    written_entry = entry("formal")
    assert folder(tmp_path).add(written_entry)
    second_process = folder(tmp_path)
    assert second_process.read("formal") == written_entry and second_process.entries() == [
        written_entry
    ]
    assert second_process.read("rude") is None
    assert second_process.remove("formal") and not second_process.remove("formal")
    assert second_process.entries() == []


def test_a_file_that_is_removed_while_the_folder_is_read_hides_no_other(tmp_path: Path) -> None:
    reader = folder(tmp_path)
    formal = entry("formal")
    assert reader.add(formal)
    # Listed, but not there
    (tmp_path / "adapters" / "gone.json").symlink_to("gone")
    assert reader.entries() == [formal]


def test_a_name_is_taken_once_however_many_ask(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        outcomes = list(
            threads.map(lambda n: folder(tmp_path).add(entry("formal", path=f"/{n}")), range(32))
        )

    assert outcomes.count(True) == 1
    [winner] = folder(tmp_path).entries()
    assert winner.path == f"/{outcomes.index(True)}"


@pytest.mark.parametrize(
    "name",
    [
        "",
        "a/b",
        "../a",
        "..",
        ".hid",
        "<b>",
        "a\\b",
        "~",
        "-a",
        "a%2fb",
        "a b",
        "é",
        "a\n",
        "a" * 257,
    ],
)
def test_a_name_that_could_be_anything_else_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidParameter, match="name must be 1 to 256 letters, digits"):
        folder(tmp_path).add(entry(name))

    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize("name", ["a..b", "a:b_c-d", "7", "a" * 256, "CON"])
def test_no_name_is_part_of_a_path(tmp_path: Path, name: str) -> None:
    assert folder(tmp_path).add(entry(name))
    [file] = tmp_path.rglob("*.json")
    assert file.parent == tmp_path / "adapters" and len(file.stem) == 64


def test_a_reader_knows_that_something_changed(tmp_path: Path) -> None:
    state = folder(tmp_path)
    versions = [state.version()]
    for change in (
        lambda: state.add(entry("a")),
        lambda: state.add(entry("b")),
        lambda: state.replace(entry("a", path="/other")),
        lambda: state.remove("b"),
    ):
        change()
        versions.append(state.version())
        assert versions[-1] == state.version()

    assert all(before != after for before, after in zip(versions, versions[1:], strict=False))


def test_a_bad_file_is_reported_once_and_hides_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = folder(tmp_path)
    state.add(entry("good"))
    (tmp_path / "adapters" / "bad.json").write_bytes(b'{"name": 5}')
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            assert [state_entry.name for state_entry in state.entries()] == ["good"]

    assert len(caplog.records) == 1 and "bad.json cannot be read and is left out" in caplog.text


def test_the_name_of_a_writer_that_died_before_it_was_done_is_free(tmp_path: Path) -> None:
    state = folder(tmp_path)
    dead = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True
    )
    abandoned = msgspec.structs.replace(
        entry("formal", state=State.PENDING), writer=int(dead.stdout)
    )

    assert state.add(abandoned) and state.entries() == []
    assert state.add(entry("formal", state=State.PENDING)) and len(state.entries()) == 1
    assert not state.add(entry("formal")), "its writer is alive"
    assert folder(tmp_path).add(msgspec.structs.replace(abandoned, name="rude", state=State.READY))
    assert not state.add(entry("rude")), "its writer was done"


def test_a_change_of_an_entry_that_was_removed_or_changed_meanwhile_does_not_bring_it_back(
    tmp_path: Path,
) -> None:
    entries = folder(tmp_path)
    old = entry("formal")
    new = entry("formal", path="/other")
    assert entries.add(old) and entries.swap(old, new)
    assert not entries.swap(old, entry("formal", path="/third"))
    assert entries.entries() == [new]
    assert entries.remove("formal") and not entries.swap(new, old)
    assert entries.entries() == []


def test_an_entry_that_cannot_be_read_for_a_moment_counts_as_it_did_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = folder(tmp_path)
    first_entry = entry("formal")
    assert state.add(first_entry)

    [file] = tmp_path.rglob("*.json")
    whole = file.read_bytes()

    file.write_bytes(whole[:9])
    for _ in range(3):
        assert state.read("formal") == first_entry and state.entries() == [first_entry]
        assert state.snapshot().version is None, "it is worth another look"

    assert [record.message for record in caplog.records] == [
        f"{file} cannot be read and counts as it did before: Input data was truncated"
    ]
    assert not state.add(entry("formal", path="/other")), "its name is taken"

    file.write_bytes(whole)
    assert state.entries() == [first_entry] and state.snapshot().version == state.version()
    assert state.remove("formal") == first_entry and state.entries() == []


def test_without_a_free_descriptor_a_folder_is_as_it_was_read_last(tmp_path: Path) -> None:
    state = folder(tmp_path)
    first_entry = entry("formal")
    assert state.add(first_entry)
    with no_descriptor_left():
        assert state.version() is None and state.snapshot().version is None
        assert state.entries() == [first_entry] and state.read("formal") == first_entry

    assert state.snapshot().version == state.version() is not None


def test_an_entry_that_was_never_read_is_neither_there_nor_gone_and_a_new_one_may_take_its_place(
    tmp_path: Path,
) -> None:
    assert folder(tmp_path).add(entry("formal"))

    [file] = tmp_path.rglob("*.json")
    file.write_bytes(b"{")

    state = folder(tmp_path)
    with pytest.raises(Unavailable, match="'formal' is loaded here cannot be read now"):
        state.read("formal")

    assert state.read("rude") is None
    assert state.add(entry("formal", path="/other"))
    assert [state_entry.path for state_entry in folder(tmp_path).entries()] == ["/other"]
