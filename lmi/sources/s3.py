"""Fetches a prefix or an archive of S3 into `download_dir`."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path, PurePosixPath

from lmi.errors import ModelUnusable
from lmi.sources.archive import unpack
from lmi.sources.bucket import Bucket, Found, Wanted
from lmi.sources.files import check, check_inside, check_listing, chosen, descended, warn_of_properties
from lmi.sources.job import FetchJob
from lmi.sources.place import Place
from lmi.sources.source import S3Archive, S3Folder
from lmi.sources.store import MODEL, Store, StoredObject
from lmi.sources.tries import attempt

ARCHIVE = "archive"  # the file in H.part while it is not unpacked

log = logging.getLogger(__name__)


class S3Fetch:
    def __init__(self, source: S3Folder | S3Archive, job: FetchJob) -> None:
        self._source = source
        self._job = job
        self._bucket = Bucket(source.bucket)
        self._place = Place(Path(job.wanted.download_dir).absolute(), "SERVING_DOWNLOAD_DIR", job.spare_bytes)
        self._num_whole = 0  # objects that were fetched
        self._store = Store(self._place.folder, self._bucket.endpoint, str(source))

    def fetch(self) -> Path:
        """Return the folder of the model, whole and as the bucket has it now."""
        is_archive = isinstance(self._source, S3Archive)
        with self._place.only_one(self._store.lock, self._source):
            attempt(self._bring, self._source, self._job.delays_s, reached=lambda: self._num_whole)
        return descended(self._store.model) if is_archive else self._store.model

    def _bring(self) -> None:
        """Compare one listing with what is here, and fetch what is missing."""
        is_archive = isinstance(self._source, S3Archive)
        objects = [self._archive()] if is_archive else self._objects()
        if self._store.is_current(objects, is_unpacked=is_archive):
            log.info("%s: %s is up to date", self._source, self._store.model)
            return
        needed_bytes = sum(each.size for each in objects)
        with self._place.writing(needed_bytes, self._source):
            missing = self._store.missing(objects)
            self._read(missing)
            if is_archive:
                self._unpack()
            self._store.finish()

    # Listings.

    def _archive(self) -> StoredObject:
        assert isinstance(self._source, S3Archive)
        found = self._bucket.head(self._source.key)
        if found is None:
            raise self._nothing(self._source.key, "there is no such object (NoSuchKey)")
        return _stored(found, ARCHIVE)

    def _objects(self) -> list[StoredObject]:
        """Return the objects that are taken, from one listing."""
        assert isinstance(self._source, S3Folder)
        prefix, wanted = self._source.prefix, self._job.wanted
        by_path = {found.key[len(prefix) :]: found for found in self._bucket.objects(prefix)}
        if not by_path:
            raise self._nothing(prefix, "there are no objects with this prefix")
        check_listing(str(self._source), by_path, allow_pickle=wanted.allow_pickle, is_adapter=wanted.is_adapter)
        taken = chosen(by_path, allow_pickle=wanted.allow_pickle, trust_remote_code=wanted.trust_remote_code)
        check_inside(str(self._source), taken)
        return [_stored(by_path[path], str(PurePosixPath(MODEL, path))) for path in taken]

    def _nothing(self, key: str, said: str) -> ModelUnusable:
        similar = self._bucket.similar(key)
        if similar is None:
            return ModelUnusable(f"{self._source}: {said}")
        is_same = similar.rstrip("/") == key.rstrip("/")
        why = (
            f"is {'a folder' if similar.endswith('/') else 'one file'}"
            if is_same
            else "differs in upper and lower case"
        )
        return ModelUnusable(f"{self._source}: {said}; s3://{self._source.bucket}/{similar} {why}")

    # Bytes.

    def _read(self, missing: list[StoredObject]) -> None:
        """Fetch objects into H.part. Each counts from the moment when it is whole."""
        needed_bytes = sum(each.size for each in missing)
        self._place.check_room(needed_bytes, self._source)
        self._job.progress.begin(self._source, needed_bytes, len(missing))
        by_key = {each.key: each for each in missing}
        for each in missing:
            file = self._store.part / each.path
            file.parent.mkdir(parents=True, exist_ok=True)
            if each.size == 0:  # a range of nothing cannot be read
                file.touch()
                self._record(each)
                self._job.progress.file_done()
        wanted = [
            Wanted(Found(each.key, each.size, each.etag), self._store.part / each.path) for each in missing if each.size
        ]
        for found in self._bucket.fetch(wanted, self._job.progress):
            self._record(by_key[found.key])

    def _record(self, whole: StoredObject) -> None:
        self._store.record(whole)
        self._num_whole += 1

    def _unpack(self) -> None:
        """Unpack the archive beside itself, check the model in it and remove the archive. What fails leaves nothing."""
        archive, folder = self._store.part / ARCHIVE, self._store.part / MODEL
        progress, wanted = self._job.progress, self._job.wanted
        progress.begin(self._source, archive.stat().st_size, 1, stage="unpack")
        place = Place(self._place.folder, self._place.variable, spare_bytes=0)
        shutil.rmtree(folder)
        folder.mkdir()
        try:
            unpack(
                archive,
                folder,
                name=str(self._source),
                count=progress.add,
                check_room=lambda num_bytes: place.check_room(num_bytes, self._source),
            )
            check(
                descended(folder),
                name=str(self._source),
                allow_pickle=wanted.allow_pickle,
                is_adapter=wanted.is_adapter,
            )
        except BaseException:
            shutil.rmtree(self._store.part, ignore_errors=True)
            raise
        archive.unlink()
        warn_of_properties(str(self._source), (path.name for path in descended(folder).iterdir()))


def _stored(found: Found, path: str) -> StoredObject:
    return StoredObject(found.key, found.size, found.etag, path)
