"""Fetches a prefix or an archive of S3 to its place below `download_dir`.

    H/blobs/ID      the bytes of an object, whole and checked; those of an archive that was unpacked are gone
    H/model/…       links to the objects, under their names; of an archive, what was in it
    H/model.new/    the next one while it is made, and H/model.old/ the last one while it goes
    H.lock          one process fetches at a time

H is sha256 of endpoint and URL, ID that of an object's key, size and ETag. A process that dies leaves every object that
has its ID to the next one.
"""

import hashlib
import logging
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from lmi.errors import ModelUnusable
from lmi.sources.archive import unpack
from lmi.sources.bucket import Bucket, StoredObject
from lmi.sources.job import FetchJob, attempt
from lmi.sources.place import Place, link, size_of
from lmi.sources.source import S3Model, check, descended, warn_of_properties

log = logging.getLogger(__name__)


class S3Fetch:
    def __init__(self, source: S3Model, job: FetchJob) -> None:
        self._source = source
        self._job = job
        self._bucket = Bucket(source.bucket)
        folder = Path(job.wanted.download_dir).absolute()
        self._place = Place(folder, "SERVING_DOWNLOAD_DIR", source, job.spare_bytes)
        self._store = Store(folder, self._bucket.endpoint, str(source))

    def fetch(self) -> Path:
        """Return the folder of the model, whole and as the bucket has it now."""
        with self._place.only_one(self._store.lock):
            attempt(self._bring, self._source, self._job.delays_s, reached=self._store.num_whole)
        return descended(self._store.model) if self._source.is_archive else self._store.model

    def _bring(self) -> None:
        """Compare one listing with what is here, and fetch what is missing."""
        objects = self._objects()
        if self._store.is_current(objects, is_unpacked=self._source.is_archive):
            log.info("%s: %s is up to date", self._source, self._store.model)
            return
        with self._place.writing(sum(each.size for each in objects)):
            missing = self._store.missing(objects)
            needed_bytes = sum(each.size for each in missing)
            self._place.check_room(needed_bytes)
            self._job.progress.begin(self._source, needed_bytes, len(missing))
            self._bucket.fetch(missing, self._store.blobs, self._job.progress)
            if self._source.is_archive:
                self._unpack(self._store.blobs / objects[0].id)
            else:
                self._store.name(objects)
            self._store.finish(objects)

    def _objects(self) -> list[StoredObject]:
        """Return the archive, or the objects that are taken, from one listing."""
        key = self._source.key
        if self._source.is_archive:
            if (archive := self._bucket.head(key)) is None:
                raise self._nothing("there is no such object (NoSuchKey)")
            return [archive]
        by_path = {found.path: found for found in self._bucket.objects(key)}
        if not by_path:
            raise self._nothing("there are no objects with this prefix")
        return [by_path[path] for path in self._job.taken(self._source, by_path)]

    def _nothing(self, said: str) -> ModelUnusable:
        key = self._source.key
        similar = self._bucket.similar(key)
        if similar is None:
            return ModelUnusable(f"{self._source}: {said}")
        why = "differs in upper and lower case"
        if similar.rstrip("/") == key.rstrip("/"):
            why = "is a folder" if similar.endswith("/") else "is one file"
        return ModelUnusable(f"{self._source}: {said}; s3://{self._source.bucket}/{similar} {why}")

    def _unpack(self, archive: Path) -> None:
        """Unpack the archive beside itself, check the model in it and empty the archive. What fails leaves nothing."""
        name, folder, wanted = str(self._source), self._store.new, self._job.wanted
        self._job.progress.begin(self._source, archive.stat().st_size, 1, stage="unpack")
        folder.mkdir()
        try:
            check_room = replace(self._place, spare_bytes=0).check_room
            unpack(archive, folder, name=name, count=self._job.progress.add, check_room=check_room)
            model = descended(folder)
            check(model, name=name, allow_pickle=wanted.allow_pickle, is_adapter=wanted.is_adapter)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            archive.unlink()
            for emptied in archive.parents[:2]:
                with suppress(OSError):  # an older model is in it
                    emptied.rmdir()
            raise
        os.truncate(archive, 0)
        warn_of_properties(name, (path.name for path in model.iterdir()))


class Store:
    def __init__(self, download_dir: Path, endpoint: str, url: str) -> None:
        folder = download_dir / hashlib.sha256(f"{endpoint} {url}".encode()).hexdigest()
        self.lock = folder.with_suffix(".lock")
        names = ("blobs", "model", "model.new", "model.old")
        self.blobs, self.model, self.new, self.old = (folder / name for name in names)

    def num_whole(self) -> int:
        return sum(not path.suffix for path in self.blobs.glob("*"))

    def is_current(self, objects: Sequence[StoredObject], *, is_unpacked: bool = False) -> bool:
        """Return whether the model has exactly these objects."""
        held = {path.name for path in self.blobs.glob("*")}
        if held != {each.id for each in objects} or not self.model.is_dir():
            return False
        return is_unpacked or all(size_of(self.model / each.path) == each.size for each in objects)

    def missing(self, objects: Sequence[StoredObject]) -> list[StoredObject]:
        """Remove what another process left unfinished. Returns the objects that must be fetched."""
        for folder in (self.new, self.old):
            shutil.rmtree(folder, ignore_errors=True)
        self.blobs.mkdir(parents=True, exist_ok=True)
        for part in self.blobs.glob("*.*"):
            part.unlink()
        return [each for each in objects if size_of(self.blobs / each.id) != each.size]

    def name(self, objects: Sequence[StoredObject]) -> None:
        """Give the objects their names in the new model."""
        for each in objects:
            link(self.blobs / each.id, self.new / each.path)

    def finish(self, objects: Sequence[StoredObject]) -> None:
        """Let the new model take the place of the one before. Other objects than its own go."""
        with suppress(FileNotFoundError):
            self.model.rename(self.old)  # it is never there in part
        self.new.rename(self.model)
        shutil.rmtree(self.old, ignore_errors=True)
        for path in {*self.blobs.iterdir()} - {self.blobs / each.id for each in objects}:
            path.unlink()
