"""Facts that are read from a file's text, without running it."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmi.errors import ModelUnusable
from lmi.settings.user_code import outline


def test_names_and_marks_are_read_from_the_top_level_and_nothing_is_run(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(
        "import os as system\nfrom a import b\nraise SystemExit\nx = y = 1\nclass C:\n    def inner(self): ...\n"
        "@output_formatter\ndef f(): ...\n@input_parser.input_formatter\nasync def g(): ...\n@other()\ndef h(): ...\n"
    )
    found = outline(path)
    assert found.names == {"system", "b", "x", "y", "C", "f", "g", "h"}
    assert found.marks == {"output_formatter", "input_formatter"}


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (b"\n def f(:", "line 2"),
        (b"x = '\xff'", "model.py: "),
        (b"x = 1\0", "model.py: "),
        (b"(" * 10_000, "model.py: "),
    ],
)
def test_a_file_that_is_not_python_is_told_with_its_line(tmp_path: Path, source: bytes, said: str) -> None:
    (tmp_path / "model.py").write_bytes(source)
    with pytest.raises(ModelUnusable, match=said):
        outline(tmp_path / "model.py")
