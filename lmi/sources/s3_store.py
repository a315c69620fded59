"""Where the objects of one URL of S3 are in `download_dir`.

    H/blobs/ID     the bytes of an object, whole and checked; those of an archive that was
                   unpacked are gone
    H/url          what `lmi list` shows
    H/model/…      links to the objects, under their names; of an archive, what was in it
    H/model.new/   the next one while it is made, and H/model.old/ the last one while it goes
    H.lock         one process fetches at a time

H is sha256 of endpoint and URL, ID that of an object's key, size and ETag. A process that dies
leaves every object that has its ID to the next one.
"""

import hashlib
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from lmi.sources.bucket import StoredObject
from lmi.sources.files_on_disk import link, size_of


class Store:
    """The folder of one URL."""

    def __init__(self, download_dir: Path, endpoint: str, url: str) -> None:
        folder = download_dir / hashlib.sha256(f"{endpoint} {url}".encode()).hexdigest()
        self.lock = folder.with_suffix(".lock")
        self._folder = folder
        self._url = url
        self.blobs = folder / "blobs"
        self.model = folder / "model"
        self.new = folder / "model.new"
        self.old = folder / "model.old"

    def num_whole(self) -> int:
        """Return how many objects are here."""
        return sum(not path.suffix for path in self.blobs.glob("*"))

    def is_current(self, objects: Sequence[StoredObject], *, is_unpacked: bool = False) -> bool:
        """Return whether the model has exactly these objects."""
        ids = {path.name for path in self.blobs.glob("*")}
        if ids != {stored.id for stored in objects} or not self.model.is_dir():
            return False

        if is_unpacked:
            return True

        return all(size_of(self.model / stored.path) == stored.size for stored in objects)

    def missing(self, objects: Sequence[StoredObject]) -> list[StoredObject]:
        """Remove what another process left unfinished. Returns the objects that must be fetched."""
        for folder in (self.new, self.old):
            shutil.rmtree(folder, ignore_errors=True)

        self.blobs.mkdir(parents=True, exist_ok=True)
        for part in self.blobs.glob("*.*"):
            part.unlink()

        return [stored for stored in objects if size_of(self.blobs / stored.id) != stored.size]

    def name(self, objects: Sequence[StoredObject]) -> None:
        """Give the objects their names in the new model."""
        for stored in objects:
            link(self.blobs / stored.id, self.new / stored.path)

    def finish(self, objects: Sequence[StoredObject]) -> None:
        """Let the new model take the place of the one before. Other objects than its own go."""
        # The model is never there in part.
        with suppress(FileNotFoundError):
            self.model.rename(self.old)

        self.new.rename(self.model)
        (self._folder / "url").write_text(self._url)
        shutil.rmtree(self.old, ignore_errors=True)
        needed = {self.blobs / stored.id for stored in objects}
        for path in {*self.blobs.iterdir()} - needed:
            path.unlink()
