"""A folder to which files are fetched: its room, its locks, a full disk."""

import errno
import fcntl
import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from msgspec import Struct

from lmi.errors import ModelUnusable
from lmi.sources.amounts import readable

# Bytes that stay free beside what is fetched.
SPARE_BYTES = 1 << 30
# The numbers of the errors of a full disk.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Those of a folder that cannot be written.
REFUSED = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EEXIST,
    errno.EISDIR,
    errno.ENAMETOOLONG,
)

# The log names the module that its readers know.
log = logging.getLogger("lmi.sources.fetches")


def default_download_dir(environ: Mapping[str, str]) -> Path:
    """Return where S3's sources go if neither download_dir nor SERVING_DOWNLOAD_DIR is given."""
    cache = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or "/tmp") / ".cache"
    return Path(cache) / "lmi" / "models"


class Place(Struct, frozen=True):
    """A folder for `source`, and the variable by which an operator moves it to another disk.

    Errors name both.
    """

    folder: Path
    variable: str
    source: object
    spare_bytes: int = SPARE_BYTES

    def check_room(self, needed_bytes: int) -> None:
        """Raise ModelUnusable unless so many bytes and the spare ones are free."""
        if self._free_bytes() < needed_bytes + self.spare_bytes:
            raise self._full(needed_bytes + self.spare_bytes)

    @contextmanager
    def writing(self, needed_bytes: int = 0) -> Iterator[None]:
        """Turn the errors of a disk that is full or cannot be written into ModelUnusable."""
        try:
            yield
        except OSError as error:
            if error.errno in FULL:
                raise self._full(needed_bytes) from error

            if error.errno in REFUSED:
                path = error.filename or self.folder
                raise ModelUnusable(
                    f"{self.source}: {path}: {error.strerror} ({self._way_out()})"
                ) from error

            raise

    @contextmanager
    def only_one(self, lock: Path) -> Iterator[None]:
        """Hold the lock of the source, which one process has at a time. The kernel frees it when
        that process ends.
        """
        with self.writing():
            lock.parent.mkdir(parents=True, exist_ok=True)
            file = open(lock, "ab")

        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                log.info("%s: another process fetches it, this one waits", self.source)
                fcntl.flock(file, fcntl.LOCK_EX)

            yield

    def _free_bytes(self) -> int:
        existing = next(path for path in (self.folder, *self.folder.parents) if path.exists())
        return shutil.disk_usage(existing).free

    def _full(self, needed_bytes: int) -> ModelUnusable:
        room = f"{readable(self._free_bytes())} are free"
        if needed_bytes:
            room = f"{readable(needed_bytes)} are needed, {room}"

        return ModelUnusable(f"{self.source}: {self.folder} is full: {room} ({self._way_out()})")

    def _way_out(self) -> str:
        return f"set {self.variable} to a folder on another disk"
