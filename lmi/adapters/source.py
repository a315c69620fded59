"""Finds the files of an adapter that a client names: in a folder that the operator allows, at a hub or in S3."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from lmi.adapters.files import check_files
from lmi.errors import InvalidParameter, InvalidRequest, StartError, shorten, without_paths
from lmi.settings.config import Config
from lmi.settings.kinds import local_path
from lmi.settings.secure_mode import check_adapter
from lmi.shared.fetches import WantedSource
from lmi.sources.client import Fetches
from lmi.sources.source import is_remote

PLATFORM = "/opt/ml"  # where SageMaker lays the files of models and adapters
SCRIPT = "model.py"

log = logging.getLogger(__name__)


async def fetch_adapter(src: str, config: Config, fetches: Fetches) -> Path:
    """Return the local folder of a source, after its fetch if it is remote.

    Raises InvalidRequest if it cannot be used, or an error of `Fetches.fetch`. The files may be on a slow disk, so
    another thread looks at them.
    """
    folder = await asyncio.to_thread(find_local, src, config)
    if folder is None:
        folder = await fetches.fetch(_wanted(src, config), config.engine.model_loading_timeout_s)
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
        if is_remote(src, exists_locally=is_there, needs_owner=True):
            return None
    except StartError as error:
        raise InvalidRequest(f"src {error}") from None
    _check_place(folder, src, config)
    _check(folder, src, config)
    return folder


def _wanted(src: str, config: Config) -> WantedSource:
    return WantedSource(
        source=src,
        allow_pickle=config.engine.allow_pickle,
        trust_remote_code=config.engine.trust_remote_code,
        download_dir=config.server.download_dir,
        is_adapter=True,
    )


def _check(folder: Path, src: str, config: Config, *, is_fetched: bool = False) -> None:
    try:
        check_adapter(config.server, folder, Path(config.model.path), is_fetched=is_fetched)
        check_files(folder, allow_pickle=config.engine.allow_pickle)
    except StartError as error:
        log.info("src %s: %s", shorten(src, 300), error)
        raise InvalidRequest(f"src {without_paths(str(error), {str(folder): src})}") from None


def _check_place(folder: Path, src: str, config: Config) -> None:
    """Raise InvalidParameter for a folder outside the allowed ones, whether it exists or not."""
    roots = (config.model.path, PLATFORM, config.server.download_dir, *config.server.adapter_roots)
    if not any(folder.is_relative_to(Path(root).resolve()) for root in filter(None, roots)):
        rule = f"below the model's folder, {PLATFORM}, download_dir or one of adapter_roots"
        raise InvalidParameter("src", f"a folder {rule}", src)
    if not folder.is_dir():
        raise InvalidRequest(f"src {shorten(src, 300)} is no folder")


def warning(folder: Path) -> str | None:
    """Return what the client must know about an adapter that was registered."""
    return f"{SCRIPT} in the adapter's folder is not run" if (folder / SCRIPT).exists() else None
