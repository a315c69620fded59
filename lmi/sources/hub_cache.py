"""One repository in the cache of the hub's client, and what a revision means there.

    models--OWNER--NAME/blobs/ID                    the bytes of a file
    models--OWNER--NAME/snapshots/COMMIT/PATH       a link to them
    models--OWNER--NAME/refs/main                   the commit of a revision, written when its snapshot is whole
    .locks/models--OWNER--NAME/lmi.lock             one process fetches at a time

Sources: the documentation of the hub's cache, and huggingface_hub 2.4.
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

COMMIT = re.compile(r"[0-9a-f]{40}")


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

    def link(self, id: str, commit: str, path: str) -> None:
        """Give a blob its name in a snapshot."""
        blob, name = self.blobs / id, self.snapshot(commit) / path
        name.parent.mkdir(parents=True, exist_ok=True)
        name.unlink(missing_ok=True)
        try:
            name.symlink_to(os.path.relpath(blob, name.parent))
        except OSError:  # the file system has no links
            shutil.copyfile(blob, name)

    def name_revision(self, commit: str) -> None:
        """Let the revision mean this commit, for a start without a network."""
        with suppress(OSError):  # the cache may be read-only
            if self.commit() == commit:
                return
            self._ref.parent.mkdir(parents=True, exist_ok=True)
            new = self._ref.with_name(f"{self._ref.name}.{os.getpid()}")
            new.write_text(commit)
            new.replace(self._ref)
