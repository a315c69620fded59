"""Chooses the GGUF file that a text, or a folder without other weights, means.

Such a file is a source that must be opened first, like an archive: a process makes a folder of it
(`sources/gguf/`), and then the settings are resolved again with that folder.
"""

from pathlib import Path

from msgspec.structs import replace

from lmi.errors import ModelUnusable
from lmi.settings.given import OTHER_NAMES, Given
from lmi.settings.handler import ChosenEngine, announced
from lmi.settings.start import StartInputs
from lmi.settings.table import MODEL
from lmi.sources.catalogue import CATALOGUE
from lmi.sources.gguf.find import gguf_path, kept_folder, only_file
from lmi.sources.source import GGUF, parse


def is_gguf(text: str) -> bool:
    """Whether a text is what `with_files` writes for a file."""
    return text.startswith("/") and text.endswith(GGUF)


def with_files(givens: list[Given], start: StartInputs) -> list[Given]:
    """Return `givens`, where a model that is a GGUF file has its absolute path. If no model is
    named, the file in the served folder is added, if there is one.
    """
    folders = (start.folder or start.cwd, start.cwd)
    changed_givens = []
    names_model = False
    for entry in givens:
        if entry.key == MODEL:
            names_model = True
            file = gguf_path(entry.text, *folders)
            if file is not None:
                entry = replace(entry, text=str(file))

        changed_givens.append(entry)

    if start.folder is None or names_model:
        return changed_givens

    file = only_file(start.folder)
    if file is not None:
        changed_givens.append(Given.of(MODEL, str(file), "the folder", OTHER_NAMES))

    return changed_givens


def opened_folder(text: str, download_dir: Path) -> Path | None:
    """Return the folder that was made of a GGUF file before, or None if a process must make it.

    The text means the file: it is what `with_files` writes, or the name of a model of the
    catalogue.
    """
    file = _fetched_file(text, download_dir)
    if file is None:
        return None

    return kept_folder(file, download_dir)


def _fetched_file(text: str, download_dir: Path) -> Path | None:
    """Return the file that a text means, or None if it was not fetched or means something else."""
    if is_gguf(text):
        return Path(text)

    if text not in CATALOGUE:
        return None

    folder = CATALOGUE[text].kept(download_dir)
    if folder is None:
        return None

    return only_file(folder)


def check_engine(missing: tuple[str, ...], engine: ChosenEngine) -> None:
    """Raise ModelUnusable for a file that the chosen engine does not read."""
    if engine.handler.reads_gguf:
        return

    for text in missing:
        if parse(text).names_gguf:
            handlers = announced().items()
            readers = ", ".join(name for name, handler in handlers if handler.reads_gguf)
            raise ModelUnusable(
                f"{text}: {engine.name} does not read GGUF; option.rolling_batch may be {readers}"
            )
