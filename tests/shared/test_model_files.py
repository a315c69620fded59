"""The files of a model's folder, of any size and kind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lmi.errors import BadConfiguration, ModelUnusable
from lmi.settings.properties import read
from lmi.shared.model_files import MAX_BYTES, facts, read_bounded
from lmi.text.tokenizer import Tokenizer
from tests.system.container import write_byte_tokenizer


def test_a_file_is_read_up_to_its_bound(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"12345")
    assert read_bounded(file, 5) == b"12345"
    with pytest.raises(ValueError, match="over 4 bytes"):
        read_bounded(file, 4)


def test_what_is_no_file_is_refused_and_nobody_waits_for_it(tmp_path: Path) -> None:
    pipe = tmp_path / "serving.properties"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero"), tmp_path):
        with pytest.raises((ValueError, IsADirectoryError)):
            read_bounded(path)

    with pytest.raises(BadConfiguration, match="serving.properties: cannot be read: is no file"):
        read(pipe)


@pytest.mark.parametrize("name", ["generation_config.json", "config.json", "tokenizer_config.json"])
def test_a_front_end_reads_no_endless_file_beside_a_tokenizer(tmp_path: Path, name: str) -> None:
    write_byte_tokenizer(tmp_path)
    with open(tmp_path / name, "wb") as file:
        file.truncate(MAX_BYTES + 1)

    with pytest.raises(ModelUnusable, match=f"{name}: over {MAX_BYTES} bytes"):
        Tokenizer.load(tmp_path)

    assert facts(tmp_path) == {}


def test_a_deep_file_beside_a_tokenizer_is_one_line(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"a":' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(ModelUnusable, match="generation_config.json: "):
        Tokenizer.load(tmp_path)
