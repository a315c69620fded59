"""Files that other processes read at any time."""

import os
from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Write a file and rename it into place, so that a reader sees the old file or the new one.

    Raises OSError, as on a full disk, and leaves no part of the new file then.
    """
    new = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        new.unlink(missing_ok=True)
        with open(new, "xb") as file:  # follows no link that another user has put there
            file.write(data)
        new.rename(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise
