"""Finds the folder to serve, the model's folder and the folders of user code, by the rules of LMI's `serve`.

This module reads the names of files and never opens weights.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from lmi.errors import ModelUnusable, shorten
from lmi.settings.handler import announced
from lmi.settings.kinds import local_path
from lmi.sources.files import GGUF, NO_GGUF, fault, listed

PLATFORM_FOLDER = Path("/opt/ml/model")
DEMO = "demo"


def find_folder(asked: str | None, cwd: Path, platform_folder: Path = PLATFORM_FOLDER) -> Path | None:
    """Return the folder to serve: the one asked for, SageMaker's, or the current one. None means the demo.

    If the folder holds only one other folder, that one is served, because archives are often packed so. Raises
    ModelUnusable if the folder that was asked for does not exist.
    """
    if asked is not None:
        folder = cwd / local_path(asked)
        if asked == DEMO and not folder.exists():
            return demo_folder()
        if not folder.is_dir():
            said = NO_GGUF if folder.name.endswith(GGUF) else "is not a folder" if folder.exists() else "does not exist"
            raise ModelUnusable(f"{asked}: {said}{_meant(asked, cwd)}")
    elif platform_folder.is_dir() and any(platform_folder.iterdir()):
        folder = platform_folder
    elif any((cwd / name).is_file() for name in ("serving.properties", "config.json")):
        folder = cwd
    else:
        return None
    inside = list(folder.iterdir())
    return inside[0] if len(inside) == 1 and inside[0].is_dir() else folder


def find_model(model_id: str | None, folder: Path | None, cwd: Path) -> tuple[Path, str]:
    """Return the model's local folder and its name in URLs. Raises ModelUnusable with the reason."""
    path = _model_path(model_id, folder, cwd)
    if not (path / "config.json").is_file():
        there = listed(sorted(entry.name for entry in path.iterdir())) if path.is_dir() else "does not exist"
        raise ModelUnusable(f"{path}: {there}; a model's folder has a config.json")
    if any(path.glob(f"*{GGUF}")) and (found := fault(path)):
        raise ModelUnusable(f"{path}: {found}")
    name = DEMO if path == demo_folder() else model_name(Path(model_id).name if model_id else path.name)
    return path, name


def find_user_code_model(model_id: str | None, folder: Path | None, cwd: Path) -> tuple[Path, str]:
    """Return what `find_model` returns, for user code that is the model.

    The folder may hold only the code, because the code may load its files from anywhere.
    """
    path = user_code_folders(model_id, folder, cwd)[0]
    return path, model_name(Path(model_id).name if model_id else path.name)


def user_code_folders(model_id: str | None, folder: Path | None, cwd: Path) -> list[Path]:
    """Return the folders that may hold user code: the model's, then that of serving.properties."""
    try:
        path = _model_path(model_id, folder, cwd)
    except ModelUnusable:
        path = folder or cwd
    return [path] if folder is None or folder == path else [path, folder]


def model_name(text: str) -> str:
    """Return `text` with each character replaced that has a meaning in a URL's path or in a log line."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", text).lstrip("._-")[:128] or "model"


def demo_folder() -> Path:
    """Return the folder of the model that is served if none is named. Raises ModelUnusable if no engine brings one."""
    demos = [handler.demo for handler in announced().values() if handler.demo is not None]
    if not demos:
        raise ModelUnusable("no engine is installed that brings a demo model")
    return demos[0]


def _meant(asked: str, cwd: Path) -> str:
    """Return a question about a folder whose name is nearly the one that was asked for, or ""."""
    near = difflib.get_close_matches(asked, [DEMO, *(entry.name for entry in cwd.iterdir() if entry.is_dir())], 1, 0.8)
    return f"; did you mean {near[0]}?" if near else ""


def _model_path(model_id: str | None, folder: Path | None, cwd: Path) -> Path:
    if model_id is None:
        return folder or demo_folder()
    model_id = local_path(model_id)
    for base in (folder or cwd, cwd):
        if (base / model_id).is_dir():
            return base / model_id
    if model_id == DEMO:
        return demo_folder()
    if model_id.endswith(GGUF):
        raise ModelUnusable(f"{shorten(model_id)}: {NO_GGUF}")
    raise ModelUnusable(f"{shorten(model_id)}: no such folder in {folder or cwd}")
