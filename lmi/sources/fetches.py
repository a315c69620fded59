"""What a fetch process is asked and what it leaves: JSON files in the folder of one fetch, renamed into place.

request.json    a `FetchRequest`
progress.json   a `FetchReport`, written anew at most twice a second
result.json     the local folder by source, if every source was fetched
failure.json    an `ErrorInfo`, if one was not
"""

from pathlib import Path
from typing import Self, TypeVar, cast

import msgspec

from lmi.errors import ErrorInfo, StartError, from_info
from lmi.settings.config import Config
from lmi.shared.files import write_whole

REQUEST, PROGRESS, RESULT, FAILURE = "request.json", "progress.json", "result.json", "failure.json"


class WantedSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One source to fetch."""

    source: str
    revision: str | None = None  # of a hub's repository; None: main
    allow_pickle: bool = False
    trust_remote_code: bool = False
    download_dir: str  # where sources of S3 go; those of a hub go to its client's cache
    is_adapter: bool = False

    @classmethod
    def of(cls, source: str, config: Config, *, is_adapter: bool = False) -> Self:
        """Return what a fetch must know of a source. The revision that an option gives is the model's."""
        return cls(
            source=source,
            revision=None if is_adapter else config.model.revision,
            allow_pickle=config.engine.allow_pickle,
            trust_remote_code=config.engine.trust_remote_code,
            download_dir=config.server.download_dir,
            is_adapter=is_adapter,
        )


class FetchRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    sources: tuple[WantedSource, ...]
    writer: int = 0  # the front end that waits for the result; 0: the process that starts the fetch


class FetchReport(msgspec.Struct, kw_only=True):
    """How far a fetch is."""

    stage: str = "download"  # or "unpack"
    source: str = ""
    share: float = 0.0  # of the bytes, 0 to 1
    num_bytes: int = 0  # that arrived, of `total_bytes`
    total_bytes: int = 0  # that were missing when the fetch began
    bytes_per_s: float = 0.0  # of the last ten seconds
    num_files: int = 0
    total_files: int = 0

    def __str__(self) -> str:
        if not self.total_files:
            return f"{self.stage} of {self.source}: waits for the list of its files"
        amount = f"{readable(self.num_bytes)} of {readable(self.total_bytes)}, {readable(self.bytes_per_s)}/s"
        return (
            f"{self.stage} of {self.source}: {self.share:.0%}, {amount}, {self.num_files} of {self.total_files} files"
        )


T = TypeVar("T")


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
    return None if folders is None else {source: Path(path) for source, path in folders.items()}


def failure(folder: Path) -> StartError | None:
    """Return the error that ended what reports in a folder, or None if it has not failed."""
    info = read(folder / FAILURE, ErrorInfo)
    return None if info is None else cast(StartError, from_info(info))


def readable(num_bytes: float) -> str:
    """Return a number of bytes for people, in powers of 1000 as disks are sold."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(num_bytes) < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"
