"""Finds the files of an adapter that a client names: in a folder that the operator allows, at a hub
or in S3.

A front end has no secrets and does not use the network, so it asks the supervisor for a fetch and
waits.
"""

import asyncio
import logging
import os
import uuid
from contextlib import suppress
from pathlib import Path

from lmi import errors
from lmi.adapters.files import check_files
from lmi.server.front_end import FrontEnd
from lmi.settings.config import Config
from lmi.settings.kinds import local_path
from lmi.settings.secure_mode import PLATFORM_ROOT, check_adapter
from lmi.shared.state import Block, Phase
from lmi.sources import fetches
from lmi.sources.fetches import WantedSource
from lmi.sources.source import remote

LOOK_S = 0.05
CLIENT_FAULTS = (errors.ModelUnusable.exit_code, errors.SecurityRefused.exit_code)

log = logging.getLogger(__name__)


async def fetch_adapter(src: str, config: Config, front_end: FrontEnd) -> Path:
    """Return the local folder of a source, perhaps after a fetch. Raises InvalidRequest, or an
    error of `fetch`.
    """
    folder = await asyncio.to_thread(find_local, src, config)
    if folder is not None:
        return folder

    source = WantedSource.of(src, config, is_adapter=True)
    timeout_s = config.engine.model_loading_timeout_s
    folder = await fetch(source, timeout_s, front_end.runtime.fetches(), front_end.block)
    await asyncio.to_thread(_check, folder, src, config, is_fetched=True)
    return folder


def find_local(src: str, config: Config) -> Path | None:
    """Return the folder that a source names, or None if it is remote. Raises InvalidRequest if it
    cannot be used.
    """
    try:
        folder = (Path(config.model.path) / local_path(src)).resolve()
        is_there = folder.is_dir()
    except (OSError, ValueError, RuntimeError):
        # It is too long, has a NUL, or links lead to each other.
        raise errors.InvalidParameter("src", "the path of a folder", src) from None

    try:
        if remote(src, exists_locally=is_there, needs_owner=True) is not None:
            return None
    except errors.StartError as error:
        raise errors.InvalidRequest(f"src {error}") from None

    roots = (
        config.model.path,
        str(PLATFORM_ROOT),
        config.server.download_dir,
        *config.server.adapter_roots,
    )
    if not any(folder.is_relative_to(Path(root).resolve()) for root in filter(None, roots)):
        # The same error whether it exists or not.
        rule = f"below the model's folder, {PLATFORM_ROOT}, download_dir or one of adapter_roots"
        raise errors.InvalidParameter("src", f"a folder {rule}", src)

    if not is_there:
        raise errors.InvalidRequest(f"src {errors.shorten(src, 300)} is no folder")

    _check(folder, src, config)
    return folder


def _check(folder: Path, src: str, config: Config, *, is_fetched: bool = False) -> None:
    try:
        check_adapter(config.server, folder, Path(config.model.path), is_fetched=is_fetched)
        check_files(folder, allow_pickle=config.engine.allow_pickle)
    except errors.StartError as error:
        log.info("src %s: %s", errors.shorten(src, 300), error)
        reason = errors.without_paths(str(error), {str(folder): src})
        raise errors.InvalidRequest(f"src {reason}") from None


async def fetch(
    source: WantedSource, timeout_s: float, place: Path, block: Block, field: str = "src"
) -> Path:
    """Return the local folder of a source when it has been fetched. The supervisor looks at the
    folders in `place`. `field` is what a request calls the source.

    Raises InvalidRequest for a source that cannot be used, Unavailable for one that cannot be
    reached now, and DeadlineExceeded.
    """
    folder = place / str(uuid.uuid4())
    hidden = place / f".{folder.name}"
    request = fetches.FetchRequest(sources=(source,), writer=os.getpid())
    try:
        hidden.mkdir(parents=True)
        fetches.write(hidden / fetches.REQUEST, request)
        hidden.rename(folder)
    except OSError as error:
        log.error("a fetch cannot be asked for: %s: %s", folder, error.strerror)
        raise errors.Unavailable(f"a fetch cannot be asked for: {error.strerror}") from None

    try:
        async with asyncio.timeout(timeout_s):
            return await _result(folder, block, field)
    except TimeoutError:
        limit = f"model_loading_timeout ({timeout_s:g} s)"
        raise errors.DeadlineExceeded(
            f"{field} {source.source} was not fetched within {limit}"
        ) from None
    finally:
        # Without its request the supervisor ends the fetch and removes its folder.
        with suppress(OSError):
            (folder / fetches.REQUEST).unlink()


async def _result(folder: Path, block: Block, field: str) -> Path:
    """Wait for the fetch in a folder. Raises the error that it left."""
    while folder.exists():
        folders = fetches.result(folder)
        if folders is not None:
            return next(iter(folders.values()))

        failure = fetches.failure(folder)
        if failure is not None:
            is_of_client = failure.exit_code in CLIENT_FAULTS
            kind = errors.InvalidRequest if is_of_client else errors.Unavailable
            raise kind(f"{field} {failure.message}")

        if block.supervisor.phase in (Phase.DRAINING, Phase.FAILED):
            raise errors.Draining("the server is shutting down, it fetches nothing")

        await asyncio.sleep(LOOK_S)

    raise errors.Unavailable("the fetch of src was given up, see the log")
