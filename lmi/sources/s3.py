"""Fetches a prefix, a GGUF file or an archive of S3 to its place in `download_dir`."""

import logging
import os
import shutil
from contextlib import suppress
from pathlib import Path

from msgspec.structs import replace

from lmi.errors import ModelUnusable
from lmi.shared.gguf_file import parts_of
from lmi.sources.archive import unpack
from lmi.sources.bucket import Bucket, StoredObject
from lmi.sources.gguf.find import only_file
from lmi.sources.job import FetchJob, attempt
from lmi.sources.listing import taken
from lmi.sources.paths import check_path
from lmi.sources.place import Place
from lmi.sources.s3_store import Store
from lmi.sources.source import NoObjects, S3Model, check, descended, warn_of_properties

log = logging.getLogger(__name__)


class S3Fetch:
    """The fetch of one URL of S3."""

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

        if self._source.is_archive:
            return descended(self._store.model)

        return self._store.model

    def _bring(self) -> None:
        """Compare one listing with what is here, and fetch what is missing."""
        objects = self._objects()
        if self._store.is_current(objects, is_unpacked=self._source.is_archive):
            log.info("%s: %s is up to date", self._source, self._store.model)
            return

        with self._place.writing(sum(stored.size for stored in objects)):
            missing = self._store.missing(objects)
            needed_bytes = sum(stored.size for stored in missing)
            self._place.check_room(needed_bytes)
            self._job.progress.begin(self._source, needed_bytes, len(missing))
            self._bucket.fetch(missing, self._store.blobs, self._job.progress)
            if self._source.is_archive:
                self._unpack(self._store.blobs / objects[0].id)
            else:
                self._store.name(objects)

            self._store.finish(objects)

    def _objects(self) -> list[StoredObject]:
        """Return the archive, the files of a GGUF model, or the objects that are taken, from one
        listing.
        """
        key = self._source.key
        if self._source.is_archive:
            archive = self._bucket.head(key)
            if archive is None:
                raise ModelUnusable(self._nothing("there is no such object (NoSuchKey)"))

            return [archive]

        if self._source.names_gguf:
            return self._gguf_objects()

        by_path = {stored.path: stored for stored in self._bucket.objects(key)}
        if not by_path:
            raise NoObjects(self._nothing("there are no objects with this prefix"))

        return [by_path[path] for path in taken(self._source, by_path, self._job.wanted)]

    def _gguf_objects(self) -> list[StoredObject]:
        """Return the files of the GGUF model that the source names, which may be split."""
        folder, slash, name = self._source.key.rpartition("/")
        objects = []
        for part in parts_of(Path(name)):
            key = f"{folder}{slash}{part.name}"
            stored = self._bucket.head(key)
            if stored is None and key == self._source.key:
                raise ModelUnusable(self._nothing("there is no such object (NoSuchKey)"))

            if stored is None:
                raise ModelUnusable(f"{self._source}: its part {part.name} is missing (NoSuchKey)")

            check_path(str(self._source), part.name)
            objects.append(stored._replace(path=part.name))

        return objects

    def _nothing(self, reason: str) -> str:
        """Return why a URL has no objects, with a URL that was perhaps meant."""
        key = self._source.key
        similar = self._bucket.similar(key)
        if similar is None:
            return f"{self._source}: {reason}"

        difference = "differs in upper and lower case"
        if similar.rstrip("/") == key.rstrip("/"):
            difference = "is a folder" if similar.endswith("/") else "is one file"

        url = f"s3://{self._source.bucket}/{similar}"
        return f"{self._source}: {reason}; {url} {difference}"

    def _unpack(self, archive: Path) -> None:
        """Unpack the archive beside itself, check the model in it and empty the archive. What fails
        leaves nothing.
        """
        name = str(self._source)
        folder = self._store.new
        wanted_source = self._job.wanted
        self._job.progress.begin(self._source, archive.stat().st_size, 1, stage="unpack")
        folder.mkdir()
        try:
            check_room = replace(self._place, spare_bytes=0).check_room
            unpack(archive, folder, name=name, count=self._job.progress.add, check_room=check_room)
            model = descended(folder)
            is_gguf = not wanted_source.is_adapter and only_file(model) is not None
            if not is_gguf and not wanted_source.takes_all:
                check(
                    model,
                    name=name,
                    allow_pickle=wanted_source.allow_pickle,
                    is_adapter=wanted_source.is_adapter,
                )
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            archive.unlink()
            for emptied in archive.parents[:2]:
                # A folder that is not empty has an older model in it.
                with suppress(OSError):
                    emptied.rmdir()

            raise

        os.truncate(archive, 0)
        if not wanted_source.takes_all:
            warn_of_properties(name, (path.name for path in model.iterdir()))
