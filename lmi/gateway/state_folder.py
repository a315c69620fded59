"""A folder of what a gateway keeps for the next one."""

import fcntl
import os
from pathlib import Path

from lmi.errors import BadConfiguration, cause_line


def lock_folder(folder: Path, flag: str) -> int:
    """Make a folder that only its user may read, and lock it for this process, however that ends.

    Returns the descriptor of the lock. Raises BadConfiguration, which names the flag, if another
    process has the folder or it cannot be used.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Environments, requests and logs may hold secrets.
        folder.chmod(0o700)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BadConfiguration(f"{flag} {folder} belongs to another gateway") from None
    except OSError as error:
        raise BadConfiguration(f"{flag} {folder}: {cause_line(error)}") from None

    return lock
