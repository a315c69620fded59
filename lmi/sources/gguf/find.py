"""Finds the GGUF file that a text or a folder means, and the folder that was made of it before."""

import hashlib
import re
from pathlib import Path

import msgspec

from lmi.errors import ModelUnusable
from lmi.settings.kinds import local_path
from lmi.shared.gguf_file import files_of, first_part
from lmi.sources.fetches import read
from lmi.sources.paths import shown
from lmi.sources.source import GGUF, NAMES_SHOWN, OPENED_GGUF

# The folders that are made of files have names that begin so.
OPENED_PREFIX = "gguf-"
# A folder that was made with a smaller number is made anew.
VERSION = 1
OTHER_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth")
CODE = "model.py"
# A projector of images, or what was measured to quantise a model, is no model itself.
NO_MODEL = re.compile(r"mmproj|imatrix\.gguf$")


class OpenedFrom(msgspec.Struct, frozen=True):
    """What a folder was made of: each file's path, size and time of its last change."""

    version: int
    files: list[tuple[str, int, int]]

    @classmethod
    def of(cls, file: Path) -> "OpenedFrom":
        """Look at the files of a model. Raises ModelUnusable if one of a split model is missing."""
        files = []
        for part in files_of(file):
            status = part.stat()
            files.append((str(part.absolute()), status.st_size, status.st_mtime_ns))

        return cls(VERSION, files)


def gguf_path(text: str, *bases: Path) -> Path | None:
    """Return the file that a text means, or None if it means something else.

    The text is a path below one of `bases`, to the file or to a folder with it. Raises
    ModelUnusable for a folder with several models.
    """
    for base in bases:
        path = (base / local_path(text)).absolute()
        if path.name.endswith(GGUF) and path.is_file():
            return first_part(path)

        if path.is_dir():
            return only_file(path)

    return None


def only_file(folder: Path) -> Path | None:
    """Return the GGUF file of a folder that has no other weights and no code, or None."""
    for pattern in OTHER_WEIGHTS:
        if any(folder.glob(pattern)):
            return None

    if (folder / CODE).is_file() or (folder / OPENED_GGUF).is_file():
        return None

    files = set()
    for file in folder.glob(f"*{GGUF}"):
        if not NO_MODEL.search(file.name):
            files.add(first_part(file))

    if len(files) > 1:
        names = ", ".join(sorted(shown(file.name) for file in files)[:NAMES_SHOWN])
        raise ModelUnusable(f"{folder}: it holds several models, name one of the files: {names}")

    return next(iter(files), None)


def folder_of_file(file: Path, download_dir: Path) -> Path:
    """Return where the folder of a file lies, or will lie."""
    digest = hashlib.sha256(str(file.absolute()).encode()).hexdigest()
    return download_dir / f"{OPENED_PREFIX}{digest[:32]}"


def opened_file(folder: Path) -> Path | None:
    """Return the file that a folder was made of, the first of a split model, or None if it was
    made of none.
    """
    try:
        opened_from = read(folder / OPENED_GGUF, OpenedFrom)
    except (OSError, ValueError):
        return None

    if opened_from is None or not opened_from.files:
        return None

    file = Path(opened_from.files[0][0])
    return file if folder_of_file(file, folder.parent) == folder else None


def opened_before(file: Path, download_dir: Path) -> Path | None:
    """Return the folder of a file, or None if it is not whole, or not made of the file as it is
    now.
    """
    folder = folder_of_file(file, download_dir)
    try:
        opened_from = read(folder / OPENED_GGUF, OpenedFrom)
    except (OSError, ValueError):
        return None

    return folder if opened_from == OpenedFrom.of(file) else None
