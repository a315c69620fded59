"""The files of a model's folder: one that must be there, and one that is JSON."""

import json
from pathlib import Path
from typing import Any

from lmi.errors import ModelUnusable, cause_line
from lmi.shared.model_files import read_bounded


def existing_file(folder: Path, name: str) -> Path:
    """Return the path of a file of a folder. Raises ModelUnusable if it is not there."""
    if not folder.is_dir():
        raise ModelUnusable(f"{folder}: the model folder does not exist")

    file = folder / name
    if file.is_file():
        return file

    if not any(folder.iterdir()):
        raise ModelUnusable(f"{folder}: the model folder is empty")

    raise ModelUnusable(f"{file}: missing")


def read_json(file: Path, kind: type = dict) -> Any:
    """Return the object in a file, or the array if the kind is list. Raises ModelUnusable."""
    try:
        content = json.loads(read_bounded(file))
    except (ValueError, OSError, RecursionError) as error:
        raise ModelUnusable(f"{file}: not JSON: {cause_line(error)}") from error

    if not isinstance(content, kind):
        raise ModelUnusable(f"{file}: not a JSON {'object' if kind is dict else 'array'}")

    return content
