"""Reads a file of a model's folder, which is a stranger's: it may be of any size, and no file at
all.
"""

import json
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

# For a model's own JSON, of which the largest that models have are some MB.
MAX_BYTES = 32 << 20


def read_bounded(file: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the bytes of a file. It never waits, as for a pipe. Raises OSError, or ValueError for
    too many.
    """
    fd = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as reader:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ValueError("is no file")

        data = reader.read(max_bytes + 1)

    if len(data) > max_bytes:
        raise ValueError(f"over {max_bytes} bytes")

    return data


def facts(folder: Path) -> Mapping[str, Any]:
    """Return a model's config.json, or nothing if it cannot be read, which the engine reports."""
    with suppress(OSError, ValueError, RecursionError):
        config = json.loads(read_bounded(folder / "config.json"))
        if isinstance(config, dict):
            return config

    return {}
