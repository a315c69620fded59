"""How a front end waits for a fetch. The test is the supervisor."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from lmi.adapters.source import fetch
from lmi.errors import (
    DeadlineExceeded,
    InvalidRequest,
    LmiError,
    ModelUnusable,
    SecurityRefused,
    SourceUnreachable,
    StartError,
    Unavailable,
)
from lmi.shared.state import Block, Phase
from lmi.sources.fetches import FAILURE, REQUEST, RESULT, FetchRequest, WantedSource, read, write

WANTED = WantedSource(source="writers/fox", download_dir="/d", is_adapter=True)


class FrontEnd:
    """A front end that wants one source, and the folder that the supervisor looks at."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "fetches"
        self.block = Block.create(folder / "state", 0, 1)

    def fetch(self, answer: Callable[[Path], object], timeout_s: float = 30.0) -> Path:
        """The result of a fetch. `answer` does what the supervisor does in the folder of the
        request.
        """
        return asyncio.run(self._fetch(answer, timeout_s))

    async def _fetch(self, answer: Callable[[Path], object], timeout_s: float) -> Path:
        fetching = asyncio.create_task(fetch(WANTED, timeout_s, self.folder, self.block))
        await asyncio.sleep(0)
        [folder] = self.folder.iterdir()
        assert read(folder / REQUEST, FetchRequest) == FetchRequest(
            sources=(WANTED,), writer=os.getpid()
        )
        answer(folder)
        return await _without_request(fetching, folder)


async def _without_request(fetching: Awaitable[Path], folder: Path) -> Path:
    try:
        return await fetching
    finally:
        assert not (folder / REQUEST).exists(), "the supervisor must see that nobody waits"


@pytest.fixture
def front_end(tmp_path: Path) -> FrontEnd:
    return FrontEnd(tmp_path)


def test_a_fetched_source_is_a_folder(front_end: FrontEnd) -> None:
    assert front_end.fetch(
        lambda folder: write(folder / RESULT, {"writers/fox": "/cache/fox"})
    ) == Path("/cache/fox")


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        (StartError, Unavailable),
        (ModelUnusable, InvalidRequest),
        (SecurityRefused, InvalidRequest),
        (SourceUnreachable, Unavailable),
    ],
)
def test_a_failure_is_an_error_with_its_line(
    front_end: FrontEnd, said: type[LmiError], kind: type[LmiError]
) -> None:
    failure = said("writers/fox: the line").info
    with pytest.raises(kind, match="^src writers/fox: the line$") as caught:
        front_end.fetch(lambda folder: write(folder / FAILURE, failure))

    assert type(caught.value) is kind


def test_a_fetch_that_takes_too_long_is_given_up(front_end: FrontEnd) -> None:
    message = r"^src writers/fox was not fetched within model_loading_timeout \(0.1 s\)$"
    with pytest.raises(DeadlineExceeded, match=message):
        front_end.fetch(lambda folder: None, timeout_s=0.1)


def test_a_fetch_whose_folder_is_gone_is_given_up(front_end: FrontEnd) -> None:
    with pytest.raises(Unavailable, match="the fetch of src was given up"):
        front_end.fetch(lambda folder: folder.rename(folder.with_name("gone")))


@pytest.mark.parametrize("phase", [Phase.DRAINING, Phase.FAILED])
def test_nobody_waits_for_a_fetch_when_the_server_ends(front_end: FrontEnd, phase: Phase) -> None:
    def stop(folder: Path) -> None:
        front_end.block.supervisor.phase = phase

    with pytest.raises(Unavailable, match="shutting down"):
        front_end.fetch(stop)


def test_a_request_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "fetches").write_text("no folder")
    block = Block.create(tmp_path / "state", 0, 1)
    with pytest.raises(Unavailable, match="^a fetch cannot be asked for: Not a directory$"):
        asyncio.run(fetch(WANTED, 1.0, tmp_path / "fetches", block))
