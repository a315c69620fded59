"""What a fetch process is asked, what it leaves, and the folder that it fetches to: its room, its
locks, a full disk.

In the folder of one fetch lie JSON files, renamed into place:

request.json    a `FetchRequest`
progress.json   a `FetchReport`, written anew at most twice a second
result.json     the local folder by source, if every source was fetched
failure.json    an `ErrorInfo`, if one was not
"""

import errno
import fcntl
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar, cast

import msgspec

from lmi.errors import ErrorInfo, ModelUnusable, StartError, from_info
from lmi.settings.config import Config
from lmi.settings.handler import announced
from lmi.shared.files import write_whole

REQUEST = "request.json"
PROGRESS = "progress.json"
RESULT = "result.json"
FAILURE = "failure.json"
# The stage in which bytes come.
DOWNLOAD = "download"
# Bytes that stay free beside what is fetched.
SPARE_BYTES = 1 << 30
SLOW_BYTES_PER_S = 100_000
# A download that ends so soon is not slow.
SOON_S = 60.0
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
REFUSED = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EEXIST,
    errno.EISDIR,
    errno.ENAMETOOLONG,
)

log = logging.getLogger(__name__)

T = TypeVar("T")


class WantedSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One source to fetch."""

    source: str
    # The revision of a hub's repository. None means main.
    revision: str | None = None
    allow_pickle: bool = False
    trust_remote_code: bool = False
    # Where sources of S3 go. Those of a hub go to its client's cache.
    download_dir: str
    is_adapter: bool = False
    # Whether all files are taken, as SageMaker brings a model, and not those of a model alone.
    takes_all: bool = False
    # Whether the engine reads GGUF files.
    reads_gguf: bool = True
    # Hosts to which a hub may redirect, beside its own and public ones.
    opened_hosts: tuple[str, ...] = ()

    @classmethod
    def of(cls, source: str, config: Config, *, is_adapter: bool = False) -> Self:
        """Return what a fetch must know of a source. The revision that an option gives is the
        model's.
        """
        handler = announced().get(config.engine.handler)
        return cls(
            source=source,
            revision=None if is_adapter else config.model.revision,
            allow_pickle=config.engine.allow_pickle,
            trust_remote_code=config.engine.trust_remote_code,
            download_dir=config.server.download_dir,
            is_adapter=is_adapter,
            reads_gguf=handler is not None and handler.reads_gguf,
            opened_hosts=config.server.download_hosts,
        )


class FetchRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    sources: tuple[WantedSource, ...]
    # The process id of the front end that waits for the result. 0 is the process that starts the
    # fetch.
    writer: int = 0


class FetchReport(msgspec.Struct, kw_only=True):
    """How far a fetch is."""

    # `DOWNLOAD` or "unpack".
    stage: str = DOWNLOAD
    source: str = ""
    # The share of the bytes that arrived, 0 to 1.
    share: float = 0.0
    # Bytes that arrived, of `total_bytes`.
    num_bytes: int = 0
    # Bytes that were missing when the fetch began.
    total_bytes: int = 0
    # The rate of the last ten seconds.
    bytes_per_s: float = 0.0
    num_files: int = 0
    total_files: int = 0

    def __str__(self) -> str:
        rate = f"{readable(self.bytes_per_s)}/s"
        if not self.total_files:
            arrived = ""
            if self.num_bytes:
                arrived = f", {readable(self.num_bytes)} of it came, {rate}"

            return f"{self.stage} of {self.source}: waits for the list of its files{arrived}"

        amount = f"{readable(self.num_bytes)} of {readable(self.total_bytes)}, {rate}"
        return (
            f"{self.stage} of {self.source}: {self.share:.0%}, {amount}, {self.num_files} of "
            f"{self.total_files} files"
        )

    @property
    def slow(self) -> str | None:
        """What to say of a download that is slow enough to look like one that hangs, or None."""
        left_bytes = self.total_bytes - self.num_bytes
        if self.stage != DOWNLOAD or left_bytes <= 0 or self.bytes_per_s >= SLOW_BYTES_PER_S:
            return None

        if self.bytes_per_s == 0:
            return (
                f"{self.stage} of {self.source}: no byte came lately, {readable(left_bytes)} "
                f"are missing"
            )

        left_s = left_bytes / self.bytes_per_s
        if left_s < SOON_S:
            return None

        time_left = f"{readable_s(left_s)} for the {readable(left_bytes)} that are missing"
        return f"{self.stage} of {self.source} is slow: {readable(self.bytes_per_s)}/s, {time_left}"


def write(path: Path, value: object) -> None:
    write_whole(path, msgspec.json.encode(value))


def read(path: Path, kind: type[T]) -> T | None:
    """Return what was written to `path`, or None if nothing was."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None


def result(folder: Path) -> dict[str, Path] | None:
    """Return the local folder of each source by its text, or None if they are not fetched."""
    folders = read(folder / RESULT, dict[str, str])
    if folders is None:
        return None

    return {source: Path(path) for source, path in folders.items()}


def failure(folder: Path) -> StartError | None:
    """Return the error that ended what reports in a folder, or None if it has not failed."""
    info = read(folder / FAILURE, ErrorInfo)
    if info is None:
        return None

    return cast(StartError, from_info(info))


def readable(num_bytes: float) -> str:
    """Return a number of bytes for people, in powers of 1000 as disks are sold."""
    if abs(num_bytes) < 1000:
        return f"{num_bytes:.0f} B"

    for unit in ("kB", "MB", "GB"):
        num_bytes /= 1000
        if abs(num_bytes) < 1000:
            return f"{num_bytes:.1f} {unit}"

    return f"{num_bytes / 1000:.1f} TB"


def readable_s(seconds: float) -> str:
    """Return a time for people, in the largest unit that it has two of."""
    for unit, length_s in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.0f} {unit}"

    return f"{seconds:.0f} s"


def default_download_dir(environ: Mapping[str, str]) -> Path:
    """Return where S3's sources go if neither download_dir nor SERVING_DOWNLOAD_DIR is given."""
    cache = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or "/tmp") / ".cache"
    return Path(cache) / "lmi" / "models"


@dataclass(frozen=True, slots=True)
class Place:
    """A folder for `source`, and the variable by which an operator moves it to another disk."""

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
                moved = f"{self.variable} names another folder"
                raise ModelUnusable(f"{self.source}: {path}: {error.strerror} ({moved})") from error

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
        room = f"{readable(needed_bytes)} are needed, {readable(self._free_bytes())} are free"
        return ModelUnusable(
            f"{self.source}: {self.folder} is full: {room} ({self.variable} names another folder)"
        )


def link(file: Path, name: Path) -> None:
    """Give a file a further name. What has the name loses it."""
    name.parent.mkdir(parents=True, exist_ok=True)
    name.unlink(missing_ok=True)
    try:
        name.symlink_to(os.path.relpath(file, name.parent))
    except OSError:
        # The file system has no links.
        shutil.copyfile(file, name)


def size_of(path: Path) -> int | None:
    try:
        return os.stat(path).st_size
    except (FileNotFoundError, NotADirectoryError):
        return None
