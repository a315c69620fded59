"""What a hub lists of a repository: the commit of a revision, its files, and how their bytes are
known.

    GET /api/models/ID/revision/REVISION            {"sha": COMMIT, …}
    GET /api/models/ID/tree/COMMIT?recursive=true   [{"type": "file", "path": …, "size": …,
                                                      "oid": …, "lfs": …}, …]
    GET /ID/resolve/COMMIT/PATH                     the bytes of a file, mostly after a redirect

A long list comes in pages. The cursor of the next one stands in the Link field, as the query of its
URL. A list that was used is kept beside the snapshots, in the file of the hub's client. Sources:
the hub's OpenAPI document, RFC 8288, git's object format, and `_tree_cache` of huggingface_hub 2.4.
"""

import hashlib
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, NamedTuple, Self
from urllib.parse import quote

import httpx2
import msgspec

from lmi.errors import shorten
from lmi.shared.files import write_whole
from lmi.sources.fetches import size_of
from lmi.sources.hub_client import HubClient, NoHub

COMMIT = re.compile(r"[0-9a-f]{40}")
ID = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
SHA256 = re.compile(r"[0-9a-f]{64}")
SHA1_DIGITS = 40
# The bytes of all pages. 100,000 files have 35 MB.
MAX_LISTING_BYTES = 64 << 20
MAX_PAGES = 1_000
MAX_FILES = 100_000
TREE_FORMAT = 1
READ_BYTES = 1 << 20
# A cached file of so many bytes is read and compared at each start, a larger one is not.
CHECKED_BYTES = 32 << 20

log = logging.getLogger(__name__)


class HubFile(NamedTuple):
    """A file as the hub's listing describes it."""

    path: str
    size: int
    # The id of its bytes, which names its blob: their SHA-256, or the id that git gives them.
    id: str
    # The SHA-256 of its bytes, if the listing has it.
    sha256: str | None = None
    # The hash of the hub's storage, which the hub's client reads from a kept listing.
    xet_hash: str | None = None
    # The id that git gives to what stands for a large file.
    pointer_id: str | None = None

    def __str__(self) -> str:
        return self.path

    def fault_of(self, path: Path) -> str | None:
        """Return what keeps the file at `path` from being this one, or None."""
        num_bytes = size_of(path)
        if num_bytes is None or not path.is_file():
            return f"has no {self.path}"

        if num_bytes != self.size:
            return f"has {num_bytes} bytes of {self.path}, which has {self.size}"

        if self.size > CHECKED_BYTES:
            return None

        digest = Digest(self)
        try:
            with open(path, "rb") as file:
                while data := file.read(READ_BYTES):
                    digest.update(data)
        except OSError as error:
            return f"has a {self.path} that cannot be read: {error.strerror}"

        if digest.is_right:
            return None

        return f"has other bytes of {self.path}: wanted {digest.wanted}, found {digest}"


class Digest:
    """Whether bytes are those of a file of a listing.

    The hub names a file by the SHA-256 of its bytes where git has only a pointer to it, and else by
    the id that git gives it: the SHA-1, or in newer repositories the SHA-256, of `blob SIZE` and a
    zero byte before its bytes. A mirror that has no git may name it by the hash of its bytes alone,
    which is taken too.
    """

    def __init__(self, file: HubFile) -> None:
        self._id = file.id
        kind = hashlib.sha1 if len(file.id) == SHA1_DIGITS else hashlib.sha256
        of_bytes = kind(usedforsecurity=False)
        of_git = kind(b"blob %d\0" % file.size, usedforsecurity=False)
        self._is_of_git = file.sha256 is None
        self._hashes = [of_git, of_bytes] if self._is_of_git else [of_bytes]

    def update(self, data: bytes) -> None:
        for hash in self._hashes:
            hash.update(data)

    @property
    def is_right(self) -> bool:
        return self._id in [hash.hexdigest() for hash in self._hashes]

    @property
    def wanted(self) -> str:
        kind = "git id" if self._is_of_git else "SHA-256"
        return f"{kind} {self._id}"

    def __str__(self) -> str:
        """The id of the bytes so far."""
        return self._hashes[0].hexdigest()


class _Revision(msgspec.Struct):
    sha: str


class _Pointer(msgspec.Struct):
    oid: str


class _Entry(msgspec.Struct, rename="camel"):
    """A file or folder of a listing."""

    type: str
    path: str
    size: Annotated[int, msgspec.Meta(ge=0)] = 0
    oid: str = ""
    lfs: _Pointer | None = None
    xet_hash: str | None = None

    def file(self) -> HubFile:
        """Return the file that this entry describes. Raises NoHub for an id that is none: it
        becomes a file's name.
        """
        if self.lfs is None:
            if not ID.fullmatch(self.oid):
                raise self._bad_id(self.oid)

            return HubFile(self.path, self.size, self.oid, xet_hash=self.xet_hash)

        sha256 = self.lfs.oid
        if not SHA256.fullmatch(sha256):
            raise self._bad_id(sha256 or self.oid)

        pointer_id = self.oid if ID.fullmatch(self.oid) else None
        return HubFile(self.path, self.size, sha256, sha256, self.xet_hash, pointer_id)

    def _bad_id(self, id: str) -> NoHub:
        return NoHub(f"it lists {shorten(self.path)} with the id {shorten(id)}")


class _KeptFile(msgspec.Struct, omit_defaults=True):
    """A file of a kept listing."""

    size: Annotated[int, msgspec.Meta(ge=0)]
    blob_id: str
    lfs_sha256: str | None = None
    lfs_size: int | None = None
    xet_hash: str | None = None

    @classmethod
    def of(cls, file: HubFile) -> Self:
        is_large = file.sha256 is not None
        return cls(
            size=file.size,
            blob_id=file.pointer_id or file.id,
            lfs_sha256=file.sha256,
            lfs_size=file.size if is_large else None,
            xet_hash=file.xet_hash,
        )

    def file(self, path: str) -> HubFile:
        return HubFile(
            path=path,
            size=self.size,
            id=self.lfs_sha256 or self.blob_id,
            sha256=self.lfs_sha256,
            xet_hash=self.xet_hash,
            pointer_id=None if self.lfs_sha256 is None else self.blob_id,
        )


class _Kept(msgspec.Struct):
    format_version: int
    files: dict[str, _KeptFile]


class HubApi:
    """What is asked of the API of one hub about one repository. `count` gets the bytes of its
    answers.
    """

    def __init__(
        self,
        client: HubClient,
        endpoint: str,
        id: str,
        headers: Mapping[str, str],
        count: Callable[[int], None],
    ) -> None:
        self._client = client
        self._repository = f"{endpoint}/api/models/{id}"
        self._files = f"{endpoint}/{id}/resolve"
        self._headers = headers
        self._count = count

    def commit_of(self, revision: str) -> str:
        """Return the commit that a branch, tag or commit means."""
        url = f"{self._repository}/revision/{quote(revision, safe='')}"
        answer = self._client.answer(url, self._headers, _Revision, count=self._count)
        commit = answer.value.sha
        if not COMMIT.fullmatch(commit):
            raise NoHub(f"it names the commit {shorten(commit)}")

        return commit

    def files_of(self, commit: str) -> list[HubFile]:
        """Return the files of a commit, from all pages of its listing."""
        files: list[HubFile] = []
        for entries in self._pages(f"{self._repository}/tree/{commit}"):
            files += [entry.file() for entry in entries if entry.type == "file"]
            if len(files) > MAX_FILES:
                raise NoHub(f"it lists more than {MAX_FILES} files")

        return files

    def url_of(self, commit: str, file: HubFile) -> str:
        return f"{self._files}/{commit}/{quote(file.path)}"

    def _pages(self, url: str) -> Iterator[list[_Entry]]:
        """Yield the pages of a list. Whatever URL the hub names for the next one, only its query
        counts.
        """
        query = "?recursive=true&expand=false"
        left_bytes = MAX_LISTING_BYTES
        for _ in range(MAX_PAGES):
            answer = self._client.answer(
                url + query,
                self._headers,
                list[_Entry],
                left_bytes=left_bytes,
                count=self._count,
            )
            yield answer.value

            left_bytes -= answer.num_bytes
            next_query = _next_query(answer.response)
            if next_query is None:
                return

            query = f"?{next_query}"

        raise NoHub(f"its list of files has more than {MAX_PAGES} pages")


def _next_query(response: httpx2.Response) -> str | None:
    """Return the query of the next page of a list, or None after the last."""
    target = response.links.get("next", {}).get("url")
    if target is None:
        return None

    try:
        return httpx2.URL(target).query.decode("ascii")
    except (httpx2.InvalidURL, ValueError) as error:
        raise NoHub(f"it names {shorten(target)} as the next page of its list") from error


class KeptListing:
    """The listing of a commit that is kept in the cache, for a start without a network."""

    def __init__(self, storage: Path, commit: str) -> None:
        self._file = storage / "trees" / f"{commit}.json"

    def read(self) -> list[HubFile] | None:
        """Return the files, or None if no listing is kept that can be read."""
        try:
            listing = msgspec.json.decode(self._file.read_bytes(), type=_Kept)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            log.warning("%s cannot be read, the hub is asked again: %s", self._file, error)
            return None

        if listing.format_version != TREE_FORMAT:
            return None

        files = [entry.file(path) for path, entry in listing.files.items()]
        if not all(ID.fullmatch(file.id) for file in files):
            return None

        return files

    def write(self, files: list[HubFile]) -> None:
        """Keep a listing whose files are here. A cache that cannot be written keeps none."""
        entries = {file.path: _KeptFile.of(file) for file in files}
        data = msgspec.json.encode(_Kept(TREE_FORMAT, entries))
        # The cache may be read-only.
        with suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._file, data)


def files_by_blobs(snapshot: Path) -> list[HubFile]:
    """Return the files of a snapshot of which no listing is kept, as far as their links name the id
    of their bytes.
    """
    files = []
    for path in sorted(snapshot.rglob("*")):
        if not path.is_symlink():
            continue

        id = Path(os.readlink(path)).name
        num_bytes = size_of(path)
        if ID.fullmatch(id) and num_bytes is not None:
            files.append(HubFile(str(path.relative_to(snapshot)), num_bytes, id))

    return files
