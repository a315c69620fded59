"""What servers that were killed have left: their runtime folders, which the next server of the same user removes.

A server holds the lock of a file in its folder, which the kernel frees with the process, even after SIGKILL. The file
has the server's URL, so that a health check on this machine finds it wherever its port was set.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

URL = "url"

log = logging.getLogger(__name__)


@contextmanager
def running(folder: Path, url: str) -> Iterator[None]:
    """Show that the server of this folder runs, and where."""
    new = folder / f"{URL}.new"
    with open(new, "w+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(url)
        file.flush()
        new.rename(folder / URL)  # no other server sees it without its lock
        yield


def sweep() -> None:
    """Remove the runtime folders of this user whose server no longer runs."""
    for folder in Path(tempfile.gettempdir()).glob("lmi-*"):
        with suppress(OSError):  # it has no such file, or its server holds the lock
            found = folder.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
                with open(folder / URL, "rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder)
                    log.info("removed %s, which a killed server had left", folder)
