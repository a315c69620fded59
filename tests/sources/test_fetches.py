"""What the process that starts a fetch reads back."""

from pathlib import Path

import pytest

from lmi.errors import ModelUnusable, SecurityRefused, SourceUnreachable, StartError
from lmi.sources.fetches import FAILURE, RESULT, FetchedSource, FetchFailure, FetchResult, read, write


@pytest.mark.parametrize("kind", [ModelUnusable, SecurityRefused, SourceUnreachable, StartError])
def test_a_failure_becomes_the_error_that_it_was(tmp_path: Path, kind: type[StartError]) -> None:
    write(tmp_path / FAILURE, FetchFailure.of(kind("a/b: said")))
    failure = read(tmp_path / FAILURE, FetchFailure)
    assert failure is not None
    assert (type(failure.error), str(failure.error), failure.exit_code) == (kind, "a/b: said", kind.exit_code)


def test_an_unexpected_error_is_one_line_and_exit_1() -> None:
    failure = FetchFailure.of(RuntimeError("two\nlines"))
    assert (failure.exit_code, failure.message) == (1, "the fetch failed: RuntimeError: two lines")


def test_the_folder_of_each_source_is_found_by_its_text(tmp_path: Path) -> None:
    fetched = FetchedSource(source="a/b", folder="/cache/b", revision="c0ffee")
    write(tmp_path / RESULT, FetchResult(sources=(fetched,)))
    result = read(tmp_path / RESULT, FetchResult)
    assert result is not None and result.folders == {"a/b": Path("/cache/b")}
    assert [path.name for path in tmp_path.iterdir()] == [RESULT]


def test_what_was_not_written_yet_is_none(tmp_path: Path) -> None:
    assert read(tmp_path / RESULT, FetchResult) is None
