"""Finds the files of an adapter that a client names: in a folder that the operator allows, at a hub or in S3.

A front end has no secrets and does not use the network, so it asks the supervisor for a fetch and waits.
"""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lmi.adapters.files import check_files
from lmi.errors import (
    DeadlineExceeded,
    InvalidParameter,
    InvalidRequest,
    ModelUnusable,
    SecurityRefused,
    StartError,
    Unavailable,
    shorten,
    without_paths,
)
from lmi.settings.config import Config
from lmi.settings.kinds import local_path
from lmi.settings.model_choice import wanted_source
from lmi.settings.secure_mode import PLATFORM_FOLDER, check_adapter
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
from lmi.sources.source import remote

SCRIPT = "model.py"
LOOK_S = 0.05
CLIENT_FAULTS = (ModelUnusable.exit_code, SecurityRefused.exit_code)

log = logging.getLogger(__name__)


async def fetch_adapter(src: str, config: Config, fetches: Fetches) -> Path:
    """Return the local folder of a source, after its fetch if it is remote.

    Raises InvalidRequest if it cannot be used, or an error of `Fetches.fetch`. The files may be on a slow disk, so
    another thread looks at them.
    """
    folder = await asyncio.to_thread(find_local, src, config)
    if folder is None:
        folder = await fetches.fetch(wanted_source(src, config, is_adapter=True), config.engine.model_loading_timeout_s)
        await asyncio.to_thread(_check, folder, src, config, is_fetched=True)
    return folder


def find_local(src: str, config: Config) -> Path | None:
    """Return the folder that a source names, or None if it is remote. Raises InvalidRequest if it cannot be used."""
    try:
        folder = (Path(config.model.path) / local_path(src)).resolve()
        is_there = folder.is_dir()
    except (OSError, ValueError, RuntimeError):  # too long, a NUL, links that lead to each other
        raise InvalidParameter("src", "the path of a folder", src) from None
    try:
        if remote(src, exists_locally=is_there, needs_owner=True) is not None:
            return None
    except StartError as error:
        raise InvalidRequest(f"src {error}") from None
    roots = (config.model.path, str(PLATFORM_FOLDER), config.server.download_dir, *config.server.adapter_roots)
    if not any(folder.is_relative_to(Path(root).resolve()) for root in filter(None, roots)):
        rule = f"below the model's folder, {PLATFORM_FOLDER}, download_dir or one of adapter_roots"
        raise InvalidParameter("src", f"a folder {rule}", src)  # whether it exists or not
    if not is_there:
        raise InvalidRequest(f"src {shorten(src, 300)} is no folder")
    _check(folder, src, config)
    return folder


def _check(folder: Path, src: str, config: Config, *, is_fetched: bool = False) -> None:
    try:
        check_adapter(config.server, folder, Path(config.model.path), is_fetched=is_fetched)
        check_files(folder, allow_pickle=config.engine.allow_pickle)
    except StartError as error:
        log.info("src %s: %s", shorten(src, 300), error)
        raise InvalidRequest(f"src {without_paths(str(error), {str(folder): src})}") from None


def warning(folder: Path) -> str | None:
    """Return what the client must know about an adapter that was registered."""
    return f"{SCRIPT} in the adapter's folder is not run" if (folder / SCRIPT).exists() else None


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
