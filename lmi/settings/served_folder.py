"""Finds the folder to serve, by the rules of LMI's `serve`."""

import difflib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from lmi.errors import ModelUnusable
from lmi.settings.annexes import MODELS, NamedModel
from lmi.settings.given import collect
from lmi.settings.handler import announced
from lmi.settings.kinds import local_path
from lmi.settings.properties import Properties
from lmi.settings.table import MODEL
from lmi.sources.catalogue import CATALOGUE

DEMO = "demo"
PLATFORM_FOLDER = Path("/opt/ml/model")


def find_folder(
    text: str | None, cwd: Path, platform_folder: Path = PLATFORM_FOLDER
) -> Path | None:
    """Return the folder to serve: the one that `text` names, SageMaker's, or the current one. None
    means the demo.

    If the folder holds nothing but another folder, that one is served, as many archives are packed
    so. Raises ModelUnusable if the folder that `text` names does not exist.
    """
    if text is not None:
        folder = cwd / local_path(text)
        if text == DEMO and not folder.exists():
            return demo_folder()

        if not folder.is_dir():
            raise _no_folder(text, folder, cwd)
    elif platform_folder.is_dir() and any(platform_folder.iterdir()):
        folder = platform_folder
    elif any((cwd / name).is_file() for name in ("serving.properties", "config.json")):
        folder = cwd
    else:
        return None

    entries = list(folder.iterdir())
    if len(entries) == 1 and entries[0].is_dir():
        return entries[0]

    return folder


def _no_folder(text: str, folder: Path, cwd: Path) -> ModelUnusable:
    """Return the error for a text that names no folder, with a hint at one that is spelt nearly
    like it.
    """
    names = [DEMO, *CATALOGUE, *(entry.name for entry in cwd.iterdir() if entry.is_dir())]
    near = difflib.get_close_matches(text, names, 1, 0.8)
    meant = f"; did you mean {near[0]}?" if near else ""

    reason = "does not exist"
    if folder.exists():
        reason = "is not a folder"

    return ModelUnusable(f"{text}: {reason}{meant}")


def named_folder(environ: Mapping[str, str], flags: Mapping[str, str], cwd: Path) -> str | None:
    """Return the folder that `load_models` names. None: it names none, or one that is not there
    while option.model_id is given too.
    """
    entries = sorted(collect(Properties(), environ, flags), key=lambda entry: entry.rank)
    texts = [entry.text for entry in entries if entry.key == "load_models"]
    models: tuple[NamedModel, ...] = ()
    if texts:
        # A bad text is reported later, as that of any option.
        with suppress(ValueError):
            models = MODELS.parse(texts[0])

    if not models:
        return None

    url: str = models[0].url
    has_model_id = any(entry.key == MODEL for entry in entries)
    if has_model_id and not (cwd / local_path(url)).is_dir():
        return None

    return url


def demo_folder() -> Path:
    """Return the folder of the model that is served if none is named. Raises ModelUnusable if no
    engine brings one.
    """
    demos = [handler.demo for handler in announced().values() if handler.demo is not None]
    if not demos:
        raise ModelUnusable("no engine is installed that brings a demo model")

    return demos[0]
