"""Finds the files of an adapter that a client names: a folder below the folders that the operator allows."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from lmi.errors import InvalidParameter, InvalidRequest, StartError, shorten
from lmi.settings.adapters import check_files
from lmi.settings.config import Config
from lmi.settings.model_urls import local_path
from lmi.settings.secure_mode import check_adapter

PLATFORM = "/opt/ml"  # where SageMaker lays the files of models and adapters
REMOTE = re.compile(r"[a-z][a-z0-9+.-]*://.*|[\w.-]+/[\w.-]+")
SCRIPT = "model.py"


async def fetch_adapter(src: str, config: Config) -> Path:
    """Return the local folder of a source. Raises InvalidRequest if it cannot be used.

    The files may be on a slow disk, so another thread looks at them.
    """
    return await asyncio.to_thread(_find, src, config)


def _find(src: str, config: Config) -> Path:
    try:
        folder = (Path(config.model.path) / local_path(src)).resolve()
        is_there = folder.is_dir()
    except (OSError, ValueError, RuntimeError):  # too long, a NUL, links that lead to each other
        raise InvalidParameter("src", "the path of a folder", src) from None
    if REMOTE.fullmatch(src) and not src.startswith("file:") and not is_there:
        raise InvalidParameter("src", "a folder, because adapters are not fetched from elsewhere yet", src)
    _check_place(folder, src, config)
    try:
        check_adapter(config.server, folder, Path(config.model.path))
        check_files(folder, allow_pickle=config.engine.allow_pickle)
    except StartError as error:
        raise InvalidRequest(f"src {error}") from None
    return folder


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
