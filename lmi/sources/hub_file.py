"""A file as a hub lists it, and whether bytes are its own. Source: git's object format."""

import hashlib
import re
from pathlib import Path
from typing import NamedTuple

from lmi.sources.files_on_disk import size_of

ID = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
SHA256 = re.compile(r"[0-9a-f]{64}")
SHA1_DIGITS = 40
READ_BYTES = 1 << 20
# A cached file of so many bytes is read and compared at each start, a larger one is not.
CHECKED_BYTES = 32 << 20


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
