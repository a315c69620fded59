"""Chooses the GGUF file that a text, or a folder without other weights, means.

Such a file is a source that must be opened first, as an archive is: a process makes a folder of it
(`sources/gguf/`), and the settings are resolved again with that folder.
"""

from dataclasses import replace
from pathlib import Path

from lmi.errors import ModelUnusable
from lmi.settings.handler import Handler, announced
from lmi.settings.values import OTHER_NAMES, Given, Values
from lmi.sources.catalogue import CATALOGUE
from lmi.sources.gguf.find import gguf_path, only_file, opened_before
from lmi.sources.source import GGUF

MODEL = "option.model_id"


def is_gguf(text: str) -> bool:
    """Whether a text is what `with_files` writes for a file."""
    return text.startswith("/") and text.endswith(GGUF)


def with_files(givens: list[Given], values: Values) -> list[Given]:
    """Return `givens` with the absolute path of each GGUF file that one of them means, and with
    that of the served folder, if nothing names a model.
    """
    folders = (values.folder or values.cwd, values.cwd)
    placed = []
    for entry in givens:
        file = gguf_path(entry.text, *folders) if entry.key == MODEL else None
        placed.append(entry if file is None else replace(entry, text=str(file)))

    if values.folder is None or any(entry.key == MODEL for entry in givens):
        return placed

    file = only_file(values.folder)
    if file is not None:
        placed.append(Given.of(MODEL, str(file), "the folder", OTHER_NAMES))

    return placed


def opened_folder(text: str, download_dir: Path) -> Path | None:
    """Return the folder that was made of the file that a text means, of a model of the catalogue
    too, or None if a process must make it.
    """
    model = CATALOGUE.get(text)
    if model is None:
        return opened_before(Path(text), download_dir) if is_gguf(text) else None

    kept = model.kept(download_dir)
    file = None if kept is None else only_file(kept)
    return None if file is None else opened_before(file, download_dir)


def check_engine(missing: tuple[str, ...], name: str, handler: Handler) -> None:
    """Raise ModelUnusable for a file that the chosen engine does not read."""
    for text in missing:
        if (is_gguf(text) or text in CATALOGUE) and not handler.reads_gguf:
            readers = [other for other, record in announced().items() if record.reads_gguf]
            raise ModelUnusable(
                f"{text}: {name} does not read GGUF; option.rolling_batch may be "
                f"{', '.join(readers)}"
            )
