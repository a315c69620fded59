"""The files of cached blocks: what is written is read by the next process, or left out with a
line.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from handlers.lmi_dist.arrays import Array
from handlers.lmi_dist.block_files import HEADER, BlockFiles

MODEL = bytes(range(32))
BLOCK_BYTES = 4096
FILE_BYTES = HEADER.size + BLOCK_BYTES
ROOM = 1 << 30


def digest(number: int) -> bytes:
    return number.to_bytes(32, "big")


def content(number: int) -> Array:
    return np.full(BLOCK_BYTES, number % 256, np.uint8)


def files_of(folder: Path, max_bytes: int = ROOM, model: bytes = MODEL) -> BlockFiles:
    return BlockFiles(str(folder), model, max_bytes)


def write(folder: Path, *numbers: int, max_bytes: int = ROOM, model: bytes = MODEL) -> None:
    """Write blocks, the first of a sequence each, in a process of their own."""
    files = files_of(folder, max_bytes, model)
    for number in numbers:
        assert files.write(digest(number), 0, content(number))

    files.close()


def read(folder: Path, number: int, model: bytes = MODEL) -> Array | None:
    """What the next process reads of a block."""
    array = np.zeros(BLOCK_BYTES, np.uint8)
    is_there = files_of(folder, model=model).read(digest(number), 0, array)
    return array if is_there else None


def file_of(folder: Path, number: int, model: bytes = MODEL) -> Path:
    return folder / model.hex() / f"{digest(number).hex()}.kv"


def test_the_next_process_reads_what_the_last_one_wrote(tmp_path: Path) -> None:
    write(tmp_path, 1, 2)

    assert len(files_of(tmp_path)) == 2
    for number in (1, 2):
        array = read(tmp_path, number)
        assert array is not None and array.tobytes() == content(number).tobytes()

    assert read(tmp_path, 3) is None


def test_a_block_of_another_model_is_not_found(tmp_path: Path) -> None:
    write(tmp_path, 1)
    assert read(tmp_path, 1, model=digest(7)) is None


def test_only_the_user_of_the_server_can_read_the_files(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "prefixes"
    write(folder, 1)

    file = file_of(folder, 1)
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700
    assert folder.stat().st_mode & 0o777 == 0o700


def cut_in_the_header(file: Path) -> None:
    os.truncate(file, HEADER.size - 1)


def cut_in_the_block(file: Path) -> None:
    os.truncate(file, FILE_BYTES - 100)


def change_a_byte(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[HEADER.size + 99] ^= 1
    file.write_bytes(data)


def take_the_block_of_another_name(file: Path) -> None:
    write(file.parent.parent, 2)
    file_of(file.parent.parent, 2).rename(file)


def take_a_block_of_another_size(file: Path) -> None:
    file.unlink()
    files = files_of(file.parent.parent)
    files.write(digest(1), 0, np.zeros(8, np.uint8))
    files.close()


FAULTS: dict[Callable[[Path], None], str] = {
    cut_in_the_header: "it ends in its header",
    cut_in_the_block: f"it ends after {BLOCK_BYTES - 100} of {BLOCK_BYTES} bytes",
    change_a_byte: "its bytes have changed",
    take_the_block_of_another_name: "it is not the block that its name says",
    take_a_block_of_another_size: f"it is a block of 8 bytes, not of {BLOCK_BYTES}",
}


@pytest.mark.parametrize("spoil", FAULTS, ids=lambda spoil: spoil.__name__)
def test_a_file_that_is_not_whole_is_left_out_with_a_line_and_removed(
    tmp_path: Path, spoil: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, 1)
    file = file_of(tmp_path, 1)
    spoil(file)

    assert read(tmp_path, 1) is None
    assert caplog.messages == [f"{file} is left out and removed: {FAULTS[spoil]}"]
    assert not file.exists()

    write(tmp_path, 1)
    assert read(tmp_path, 1) is not None


def test_a_link_in_the_place_of_a_block_is_not_followed(tmp_path: Path) -> None:
    write(tmp_path, 1)
    file = file_of(tmp_path, 1)
    elsewhere = tmp_path / "elsewhere"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)

    assert read(tmp_path, 1) is None


def test_the_blocks_that_were_used_longest_ago_go_when_the_folder_is_full(tmp_path: Path) -> None:
    write(tmp_path, *range(10))
    now_s = time.time()
    for number in range(10):
        used_s = now_s - 100 + number
        os.utime(file_of(tmp_path, number), (used_s, used_s))

    # A block that is read is used
    assert read(tmp_path, 0) is not None
    write(tmp_path, 10, max_bytes=8 * FILE_BYTES)

    left = {number for number in range(11) if file_of(tmp_path, number).exists()}
    assert left >= {0, 8, 9, 10} and not left & {1, 2, 3}
    assert len(left) * FILE_BYTES <= 8 * FILE_BYTES


def test_the_bound_counts_the_files_of_all_models_and_nothing_else(tmp_path: Path) -> None:
    foreign = tmp_path / "photos" / "holiday.kv"
    foreign.parent.mkdir()
    foreign.write_bytes(bytes(100 * FILE_BYTES))
    write(tmp_path, 1, 2, 3, model=digest(7))

    write(tmp_path, 4, 5, max_bytes=3 * FILE_BYTES)

    assert foreign.exists()
    others = len(files_of(tmp_path, model=digest(7)))
    assert others + len(files_of(tmp_path)) <= 3
    assert file_of(tmp_path, 5).exists()


def test_the_end_of_a_long_prompt_goes_before_its_beginning(tmp_path: Path) -> None:
    files = files_of(tmp_path)
    for place in range(4):
        files.write(digest(place), place, content(place))

    files.close()
    write(tmp_path, 9, max_bytes=4 * FILE_BYTES)

    assert file_of(tmp_path, 0).exists()
    assert not file_of(tmp_path, 3).exists()


def test_what_a_killed_process_left_unfinished_is_removed_after_an_hour(tmp_path: Path) -> None:
    write(tmp_path, 1)
    old = file_of(tmp_path, 2).with_suffix(".kv.new1")
    young = file_of(tmp_path, 3).with_suffix(".kv.new1")
    for file in (old, young):
        file.write_bytes(b"half")

    hours_ago_s = time.time() - 7200
    os.utime(old, (hours_ago_s, hours_ago_s))

    write(tmp_path, 4)
    assert not old.exists()
    assert young.exists()


def test_two_servers_fill_one_folder_at_once_and_neither_loses_a_block(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Both have the same process id, as the engines of two containers may."""
    servers = [files_of(tmp_path), files_of(tmp_path)]
    with caplog.at_level(logging.WARNING):
        for number in range(400):
            for files in servers:
                assert files.write(digest(number), 0, content(number))

        for files in servers:
            files.close()

    assert not caplog.messages
    assert all(read(tmp_path, number) is not None for number in range(400))
    assert len(list(file_of(tmp_path, 0).parent.iterdir())) == 400, "none is unfinished"


def test_a_disk_that_takes_nothing_is_told_once_and_may_take_blocks_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = files_of(tmp_path)
    folder = file_of(tmp_path, 1).parent
    shutil.rmtree(folder)
    with caplog.at_level(logging.WARNING):
        for number in (1, 2, 3):
            files.write(digest(number), 0, content(number))

        files.close()

    [line] = caplog.messages
    assert line.startswith("cached prefixes cannot be written: ")

    write(tmp_path, 4)
    assert read(tmp_path, 4) is not None


def test_a_folder_that_cannot_be_made_is_an_error_of_the_start(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(NotADirectoryError):
        files_of(file / "prefixes")
