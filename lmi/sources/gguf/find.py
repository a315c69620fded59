"""Finds the GGUF file that a text or a folder means, and the folder that it was opened into.

Other parts of a server read no GGUF but a folder like those of the hub. So a file is opened: a
fetch process writes its config.json, its tokenizer and links to its weights into a folder of the
download folder (`folder.py`). Later starts use that folder, as long as the file is the same.
"""

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

# The names of the folders that files were opened into begin so.
OPENED_PREFIX = "gguf-"
# The version of the code that opens files. A folder of an earlier one is made anew.
VERSION = 1
OTHER_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth")
# User code. A folder that has it is served by it, and may hold any files.
USER_CODE = "model.py"
# A projector of images, or what was measured to quantise a model, is no model itself.
NO_MODEL = re.compile(r"mmproj|imatrix\.gguf$")


class OpenedFile(msgspec.Struct, frozen=True, array_like=True):
    """A GGUF file as it was when it was opened."""

    path: str
    num_bytes: int
    changed_ns: int


class OpenedFrom(msgspec.Struct, frozen=True):
    """The files that a folder was made of, in the folder as JSON. A split model has several."""

    version: int
    files: list[OpenedFile]

    @classmethod
    def of(cls, file: Path) -> "OpenedFrom":
        """Look at the files of a model. Raises ModelUnusable if one of a split model is missing."""
        files = []
        for part in files_of(file):
            status = part.stat()
            files.append(OpenedFile(str(part.absolute()), status.st_size, status.st_mtime_ns))

        return cls(VERSION, files)

    @classmethod
    def read(cls, folder: Path) -> "OpenedFrom | None":
        """Read what a folder was made of. None: it was made of no GGUF file, or is not readable."""
        try:
            return read(folder / OPENED_GGUF, cls)
        except (OSError, ValueError):
            return None


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
    """Return the GGUF model of a folder, of a split one its first file.

    None: there is none, or the folder has other weights or user code, or was itself made of a GGUF
    file. Raises ModelUnusable if it has several models.
    """
    for pattern in OTHER_WEIGHTS:
        if any(folder.glob(pattern)):
            return None

    if (folder / USER_CODE).is_file() or (folder / OPENED_GGUF).is_file():
        return None

    models = set()
    for file in folder.glob(f"*{GGUF}"):
        if not NO_MODEL.search(file.name):
            models.add(first_part(file))

    if len(models) > 1:
        names = ", ".join(sorted(shown(file.name) for file in models)[:NAMES_SHOWN])
        raise ModelUnusable(f"{folder}: it holds several models, name one of the files: {names}")

    return next(iter(models), None)


def folder_of_file(file: Path, download_dir: Path) -> Path:
    """Return the folder that a file is opened into, which need not be there."""
    digest = hashlib.sha256(str(file.absolute()).encode()).hexdigest()
    return download_dir / f"{OPENED_PREFIX}{digest[:32]}"


def opened_file(folder: Path) -> Path | None:
    """Return the file that was opened into a folder, of a split model its first. None: no file was.

    The name of the folder must be that of the file: a model that somebody brings may hold any JSON.
    """
    opened_from = OpenedFrom.read(folder)
    if opened_from is None or not opened_from.files:
        return None

    file = Path(opened_from.files[0].path)
    return file if folder_of_file(file, folder.parent) == folder else None


def kept_folder(file: Path, download_dir: Path) -> Path | None:
    """Return the folder that a file was opened into. None: it was not, or has changed since.

    Raises ModelUnusable if a file of a split model is missing.
    """
    folder = folder_of_file(file, download_dir)
    if OpenedFrom.read(folder) != OpenedFrom.of(file):
        return None

    return folder
