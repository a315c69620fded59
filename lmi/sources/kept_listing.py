"""The listing of a commit that was used: it is kept beside the snapshots, in the file of the hub's
client. Source: `_tree_cache` of huggingface_hub 2.4.
"""

import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Self

import msgspec

from lmi.shared.files import write_whole
from lmi.sources.files_on_disk import size_of
from lmi.sources.hub_file import ID, HubFile

TREE_FORMAT = 1

# The log names the module that its readers know.
log = logging.getLogger("lmi.sources.hub_listing")


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


class _KeptFiles(msgspec.Struct):
    """The content of the file: the kept files by their paths in the commit."""

    format_version: int
    files: dict[str, _KeptFile]


class KeptListing:
    """The listing of a commit that is kept in the cache, for a start without a network."""

    def __init__(self, storage: Path, commit: str) -> None:
        self._file = storage / "trees" / f"{commit}.json"

    def read(self) -> list[HubFile] | None:
        """Return the files, or None if no listing is kept that can be read."""
        try:
            listing = msgspec.json.decode(self._file.read_bytes(), type=_KeptFiles)
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
        data = msgspec.json.encode(_KeptFiles(TREE_FORMAT, entries))
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
