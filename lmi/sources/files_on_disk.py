"""Gives files on this disk further names, and looks how large they are."""

import os
import shutil
from pathlib import Path


def link(file: Path, name: Path) -> None:
    """Give a file a further name, by a link. A file that has this name already is removed."""
    name.parent.mkdir(parents=True, exist_ok=True)
    name.unlink(missing_ok=True)
    try:
        name.symlink_to(os.path.relpath(file, name.parent))
    except OSError:
        # The file system has no links.
        shutil.copyfile(file, name)


def size_of(path: Path) -> int | None:
    """Return the bytes of a file, or None if there is none."""
    try:
        return os.stat(path).st_size
    except (FileNotFoundError, NotADirectoryError):
        return None
