"""What a fetch process is asked and what it leaves: JSON files in the folder of one fetch.

    request.json    a `FetchRequest`
    progress.json   a `FetchReport`, written anew at most twice a second
    result.json     a `FetchResult`, if every source was fetched
    failure.json    a `FetchFailure`, if one was not

Each file is written whole and renamed into place.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from lmi.errors import ErrorInfo, StartError, cause_line, from_info
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


class FetchRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    sources: tuple[WantedSource, ...]
    writer: int = 0  # the front end that waits for the result; 0: the process that starts the fetch


class FetchedSource(msgspec.Struct, frozen=True, kw_only=True):
    source: str
    folder: str
    revision: str = ""  # the commit, of a hub's repository


class FetchResult(msgspec.Struct, frozen=True, kw_only=True):
    """The local folder of each source, in the order of the request."""

    sources: tuple[FetchedSource, ...]

    @property
    def folders(self) -> dict[str, Path]:
        """The local folder by the text of its source."""
        return {each.source: Path(each.folder) for each in self.sources}


class FetchFailure(msgspec.Struct, frozen=True, kw_only=True):
    label: str
    exit_code: int
    message: str

    @classmethod
    def of(cls, error: Exception) -> FetchFailure:
        if isinstance(error, StartError):
            return cls(label=error.label, exit_code=error.exit_code, message=str(error))
        message = f"the fetch failed: {type(error).__name__}: {cause_line(error)}"
        return cls(label=StartError.label, exit_code=StartError.exit_code, message=message)

    @property
    def error(self) -> StartError:
        error = from_info(ErrorInfo(self.label, self.message))
        return error if isinstance(error, StartError) else StartError(self.message)


T = TypeVar("T")


def write(path: Path, value: msgspec.Struct) -> None:
    write_whole(path, msgspec.json.encode(value))


def read(path: Path, kind: type[T]) -> T | None:
    """Return what was written to `path`, or None if nothing was."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
