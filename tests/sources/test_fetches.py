"""What the process that starts a fetch reads back."""

from contextlib import nullcontext
from pathlib import Path

import pytest

from lmi.errors import ModelUnusable, SecurityRefused, SourceUnreachable, StartError
from lmi.sources.fetches import FAILURE, RESULT, WantedSource, failure, result, write
from lmi.sources.job import FetchJob
from lmi.sources.worker import run


@pytest.mark.parametrize("kind", [ModelUnusable, SecurityRefused, SourceUnreachable, StartError])
def test_a_failure_becomes_the_error_that_it_was(tmp_path: Path, kind: type[StartError]) -> None:
    write(tmp_path / FAILURE, kind("a/b: said").info)
    message = failure(tmp_path)
    assert (type(message), str(message)) == (kind, "a/b: said")


def test_an_unexpected_error_is_one_line_and_exit_1(tmp_path: Path) -> None:
    source = WantedSource(source="s3://bucket/fox", download_dir="no\0path")
    assert run([FetchJob(source)], tmp_path, nullcontext(), says_failure=True) == 1
    assert str(failure(tmp_path)) == "the fetch failed: ValueError: embedded null byte"


def test_the_folder_of_each_source_is_found_by_its_text(tmp_path: Path) -> None:
    write(tmp_path / RESULT, {"a/b": "/cache/b"})
    assert result(tmp_path) == {"a/b": Path("/cache/b")}
    assert [path.name for path in tmp_path.iterdir()] == [RESULT]


def test_what_was_not_written_yet_is_none(tmp_path: Path) -> None:
    assert result(tmp_path) is None and failure(tmp_path) is None
