"""What a fetch process is asked, and what it leaves.

In the folder of one fetch lie JSON files, renamed into place:

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
from lmi.settings.handler import announced
from lmi.shared.files import write_whole
from lmi.sources.amounts import readable, readable_s

REQUEST = "request.json"
PROGRESS = "progress.json"
RESULT = "result.json"
FAILURE = "failure.json"
# The stage in which bytes come.
DOWNLOAD = "download"
# A download below this rate is slow.
SLOW_BYTES_PER_S = 100_000
# A download that ends so soon is not slow.
SOON_S = 60.0

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
    def slow_warning(self) -> str | None:
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
