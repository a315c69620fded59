"""Files that are written whole, and files that are there."""

import os
from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Write a file and rename it into place, so that a reader sees the old file or the new one.

    Raises OSError, as on a full disk, and leaves no part of the new file then.
    """
    new = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        new.unlink(missing_ok=True)
        # The mode `x` follows no link that another user has put there.
        with open(new, "xb") as file:
            file.write(data)

        new.rename(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def is_there(path: Path) -> bool:
    """Return whether a file or folder is there, and True where that cannot be seen now, as on a
    disk that fails.
    """
    try:
        path.stat()
    except FileNotFoundError:
        return False
    except OSError:
        return True

    return True
