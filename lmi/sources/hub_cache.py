"""The cache of the hub's client, as far as it is about one model.

Source: the layout of huggingface_hub 2.4.
"""

from contextlib import suppress
from pathlib import Path

from lmi.shared.files import write_whole
from lmi.sources.hub_listing import COMMIT


class HubCache:
    """Where the files of a model are, and which commit its revision means."""

    def __init__(self, folder: Path, id: str, revision: str) -> None:
        storage = folder / f"models--{id.replace('/', '--')}"
        self.folder = folder
        self.storage = storage
        self.blobs = storage / "blobs"
        self.snapshots = storage / "snapshots"
        self.lock = folder / ".locks" / storage.name / "lmi.lock"
        self._revision = revision
        self._ref = storage / "refs" / revision

    def commit(self) -> str | None:
        """Return the commit that the revision means here, if it means one."""
        if COMMIT.fullmatch(self._revision):
            return self._revision

        with suppress(OSError):
            return self._ref.read_text().strip()

        return None

    def name_revision(self, commit: str) -> None:
        """Let the revision mean this commit, for a start without a network."""
        # The cache may be read-only.
        with suppress(OSError):
            if self.commit() == commit:
                return

            self._ref.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._ref, commit.encode())
