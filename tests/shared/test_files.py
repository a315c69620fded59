"""Files that readers see whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lmi.shared.files import write_whole


def test_a_file_that_cannot_be_written_whole_leaves_the_old_one_and_nothing_else(
    tmp_path: Path,
) -> None:
    file = tmp_path / "a.json"
    write_whole(file, b"old")
    write_whole(file, b"new")
    assert file.read_bytes() == b"new"
    folder = tmp_path / "b.json"
    (folder / "inside").mkdir(parents=True)
    with pytest.raises(OSError):
        write_whole(folder, b"x")

    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "b.json"]


def test_a_link_in_the_place_of_the_new_file_is_not_followed(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    foreign_file = tmp_path / "of_root"
    foreign_file.write_bytes(b"kept")
    (tmp_path / f"a.json.{os.getpid()}").symlink_to(foreign_file)
    write_whole(file, b"new")
    assert (
        file.read_bytes() == b"new"
        and not file.is_symlink()
        and foreign_file.read_bytes() == b"kept"
    )
