"""One repository in the cache of the hub's client, what a revision means there, and the files on their way into it.

    models--OWNER--NAME/blobs/ID                    the bytes of a file
    models--OWNER--NAME/snapshots/COMMIT/PATH       a link to them
    models--OWNER--NAME/refs/main                   the commit of a revision, written when its snapshot is whole
    .locks/models--OWNER--NAME/lmi.lock             one process fetches at a time

What arrived of a file stays beside the blobs, and the next try or process asks only for the rest. Sources: the
documentation of the hub's cache, and huggingface_hub 2.4.
"""

import hashlib
import re
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedWriter
from pathlib import Path
from typing import NamedTuple, Self

from huggingface_hub import RepoFile, constants, get_session, hf_raise_for_status

from lmi.errors import shorten
from lmi.shared.files import write_whole
from lmi.sources.job import Damaged, Progress

COMMIT = re.compile(r"[0-9a-f]{40}")
ID = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
PART = ".lmi.incomplete"  # its end is that of the parts of the hub's client, which lists them for who cleans the cache
RANGE_BYTES = 40_000_000_000  # of one answer, because some hosts of a hub's files send no more at once
READ_BYTES = 1 << 20


class HubCache:
    def __init__(self, folder: Path, id: str, revision: str) -> None:
        storage = folder / f"models--{id.replace('/', '--')}"
        self.folder = folder
        self.blobs = storage / "blobs"
        self.lock = folder / ".locks" / storage.name / "lmi.lock"
        self._snapshots = storage / "snapshots"
        self._revision = revision
        self._ref = storage / "refs" / revision

    def snapshot(self, commit: str) -> Path:
        return self._snapshots / commit

    def commit(self) -> str | None:
        """Return the commit that the revision means here, if it means one."""
        if COMMIT.fullmatch(self._revision):
            return self._revision
        with suppress(OSError):
            return self._ref.read_text().strip()
        return None

    def name_revision(self, commit: str) -> None:
        """Let the revision mean this commit, for a start without a network."""
        with suppress(OSError):  # the cache may be read-only
            if self.commit() == commit:
                return
            self._ref.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._ref, commit.encode())


class HubFile(NamedTuple):
    """A file as the hub's listing describes it."""

    path: str
    size: int
    id: str  # of its bytes, which names its blob: their SHA-256, or the id that git gives them
    sha256: str | None = None  # of its bytes, if the listing has it

    @classmethod
    def of(cls, file: RepoFile) -> Self:
        sha256 = file.lfs.sha256 if file.lfs is not None else None
        id = sha256 or file.blob_id
        if not ID.fullmatch(id):  # it becomes the name of a file
            raise ValueError(f"it lists {shorten(file.path)} with the id {shorten(id)}")
        return cls(file.path, file.size, id, sha256)


@dataclass
class Download:
    """One file on its way into the folder of blobs."""

    file: HubFile
    url: str
    headers: dict[str, str]
    folder: Path
    progress: Progress
    range_bytes: int = RANGE_BYTES
    furthest = 0  # how many bytes were here at most
    _num_bytes = 0  # in the part, of which the hash is

    def __post_init__(self) -> None:
        self.whole, self.part = self.folder / self.file.id, self.folder / f"{self.file.id}{PART}"
        self._hash = hashlib.sha256()

    def bring(self) -> None:
        """Fetch what is missing. What arrived stays if the connection breaks.

        Raises the errors of the client, Damaged or Stopped.
        """
        try:
            with open(self.part, "ab") as out:
                if out.tell() != self._num_bytes:
                    self._take_up(out)
                while self._num_bytes < self.file.size:
                    self._read(out)
            found = self._hash.hexdigest()
            if self.file.sha256 not in (None, found):
                raise Damaged(wanted=f"SHA-256 {self.file.sha256}", found=found)
        except Damaged:
            self._forget()
            self.part.unlink(missing_ok=True)
            raise
        self.part.replace(self.whole)

    def _take_up(self, out: BufferedWriter) -> None:
        """Hash what an earlier process left."""
        self._forget()
        if out.tell() > self.file.size:
            out.truncate(0)
            return
        with open(self.part, "rb") as left:
            while data := left.read(READ_BYTES):
                self._count(data)

    def _read(self, out: BufferedWriter) -> None:
        """Ask once, for the rest of the file or the next part of a very large one."""
        first, end = self._num_bytes, min(self._num_bytes + self.range_bytes, self.file.size)
        headers = self.headers | {"Accept-Encoding": "identity"}
        if first or end < self.file.size:
            headers["Range"] = f"bytes={first}-{'' if end == self.file.size else end - 1}"
        limit_s = constants.HF_HUB_DOWNLOAD_TIMEOUT
        with get_session().stream("GET", self.url, headers=headers, timeout=limit_s) as response:
            status, begins = response.status_code, response.headers.get("Content-Range", "")
            is_further = begins.startswith(f"bytes {first}-") if status == 206 else status not in (200, 416)
            if first and not is_further:  # another error says nothing about the bytes
                self._forget()
                out.truncate(0)
                if status != 200:
                    return
            hf_raise_for_status(response)
            for data in response.iter_bytes():
                if self._num_bytes + len(data) > self.file.size:
                    raise Damaged(wanted=f"{self.file.size} bytes", found="more")
                out.write(data)
                self._count(data)
        if self._num_bytes < end:
            raise Damaged(wanted=f"{self.file.size} bytes", found=self._num_bytes)

    def _count(self, data: bytes) -> None:
        self.progress.add(len(data))
        self._hash.update(data)
        self._num_bytes += len(data)
        self.furthest = max(self.furthest, self._num_bytes)

    def _forget(self) -> None:
        self.progress.add(-self._num_bytes)
        self._hash, self._num_bytes = hashlib.sha256(), 0
