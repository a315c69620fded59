"""Asks the supervisor to fetch a source, and waits for it. A front end has no secrets and does not use the network."""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lmi.errors import DeadlineExceeded, InvalidRequest, ModelUnusable, SecurityRefused, Unavailable
from lmi.shared.fetches import (
    FAILURE,
    REQUEST,
    RESULT,
    FetchFailure,
    FetchRequest,
    FetchResult,
    WantedSource,
    read,
    write,
)
from lmi.shared.state import Block, Phase

LOOK_S = 0.05
log = logging.getLogger(__name__)

CLIENT_FAULTS = (ModelUnusable.exit_code, SecurityRefused.exit_code)


class Fetches:
    """The fetches that one front end asks for. `folder` is the one that the supervisor looks at."""

    def __init__(self, folder: Path, block: Block) -> None:
        self._folder, self._block = folder, block

    async def fetch(self, wanted: WantedSource, timeout_s: float) -> Path:
        """Return the local folder of a source when it has been fetched.

        Raises InvalidRequest for a source that cannot be used, Unavailable for one that cannot be reached now, and
        DeadlineExceeded.
        """
        with self._asked(FetchRequest(sources=(wanted,), writer=os.getpid())) as folder:
            try:
                async with asyncio.timeout(timeout_s):
                    return await self._answer(folder)
            except TimeoutError:
                said = f"src {wanted.source} was not fetched within model_loading_timeout ({timeout_s:g} s)"
                raise DeadlineExceeded(said) from None

    @contextmanager
    def _asked(self, request: FetchRequest) -> Iterator[Path]:
        """Leave a request for the supervisor, which ends the fetch and removes its folder when the request is gone."""
        folder = self._folder / str(uuid.uuid4())
        try:
            folder.mkdir(parents=True)
            write(folder / REQUEST, request)
        except OSError as error:
            log.error("a fetch cannot be asked for: %s: %s", folder, error.strerror)
            raise Unavailable(f"a fetch cannot be asked for: {error.strerror}") from None
        try:
            yield folder
        finally:
            with suppress(OSError):
                (folder / REQUEST).unlink()

    async def _answer(self, folder: Path) -> Path:
        while folder.exists():
            if (result := read(folder / RESULT, FetchResult)) is not None:
                return Path(result.sources[0].folder)
            if (failure := read(folder / FAILURE, FetchFailure)) is not None:
                kind = InvalidRequest if failure.exit_code in CLIENT_FAULTS else Unavailable
                raise kind(f"src {failure.message}")
            if self._block.supervisor.phase in (Phase.DRAINING, Phase.FAILED):
                raise Unavailable("the server is shutting down, it fetches nothing")
            await asyncio.sleep(LOOK_S)
        raise Unavailable("the fetch of src was given up, see the log")
