"""Fetches a prefix or an archive of S3 to its place below `download_dir`.

    H/model/…           the files, whole; H is sha256 of endpoint and URL
    H/manifest.jsonl    one line for each object: key, size, ETag and where it lies
    H.part/             the same two while it is filled; a line is written when its object is whole and checked
    H.lock              one process fills at a time

H.part is renamed to H when it is whole. A process that dies leaves every object that has its line to the next one.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path, PurePosixPath

import msgspec

from lmi.errors import ModelUnusable
from lmi.sources.archive import unpack
from lmi.sources.bucket import Bucket, StoredObject
from lmi.sources.job import FetchJob, attempt
from lmi.sources.place import Place, size_of
from lmi.sources.source import S3Model, check, check_inside, check_listing, chosen, descended, warn_of_properties

ARCHIVE = "archive"  # the file in H.part while it is not unpacked
MODEL, MANIFEST = "model", "manifest.jsonl"
ENCODER = msgspec.json.Encoder()

log = logging.getLogger(__name__)


class S3Fetch:
    def __init__(self, source: S3Model, job: FetchJob) -> None:
        self._source = source
        self._job = job
        self._bucket = Bucket(source.bucket)
        self._place = Place(Path(job.wanted.download_dir).absolute(), "SERVING_DOWNLOAD_DIR", job.spare_bytes)
        self._num_whole = 0  # objects that were fetched
        self._store = Store(self._place.folder, self._bucket.endpoint, str(source))

    def fetch(self) -> Path:
        """Return the folder of the model, whole and as the bucket has it now."""
        with self._place.only_one(self._store.lock, self._source):
            attempt(self._bring, self._source, self._job.delays_s, reached=lambda: self._num_whole)
        return descended(self._store.model) if self._source.is_archive else self._store.model

    def _bring(self) -> None:
        """Compare one listing with what is here, and fetch what is missing."""
        objects = self._objects()
        if self._store.is_current(objects, is_unpacked=self._source.is_archive):
            log.info("%s: %s is up to date", self._source, self._store.model)
            return
        needed_bytes = sum(each.size for each in objects)
        with self._place.writing(needed_bytes, self._source):
            missing = self._store.missing(objects)
            self._read(missing)
            if self._source.is_archive:
                self._unpack()
            self._store.finish()

    # Listings.

    def _objects(self) -> list[StoredObject]:
        """Return the archive, or the objects that are taken, from one listing."""
        key, wanted = self._source.key, self._job.wanted
        if self._source.is_archive:
            if (archive := self._bucket.head(key)) is None:
                raise self._nothing("there is no such object (NoSuchKey)")
            return [msgspec.structs.replace(archive, path=ARCHIVE)]
        by_path = {found.key[len(key) :]: found for found in self._bucket.objects(key)}
        if not by_path:
            raise self._nothing("there are no objects with this prefix")
        check_listing(str(self._source), by_path, allow_pickle=wanted.allow_pickle, is_adapter=wanted.is_adapter)
        taken = chosen(by_path, allow_pickle=wanted.allow_pickle, trust_remote_code=wanted.trust_remote_code)
        check_inside(str(self._source), taken)
        return [msgspec.structs.replace(by_path[path], path=str(PurePosixPath(MODEL, path))) for path in taken]

    def _nothing(self, said: str) -> ModelUnusable:
        key = self._source.key
        similar = self._bucket.similar(key)
        if similar is None:
            return ModelUnusable(f"{self._source}: {said}")
        why = "differs in upper and lower case"
        if similar.rstrip("/") == key.rstrip("/"):
            why = "is a folder" if similar.endswith("/") else "is one file"
        return ModelUnusable(f"{self._source}: {said}; s3://{self._source.bucket}/{similar} {why}")

    # Bytes.

    def _read(self, missing: list[StoredObject]) -> None:
        """Fetch objects into H.part. Each counts from the moment when it is whole."""
        needed_bytes = sum(each.size for each in missing)
        self._place.check_room(needed_bytes, self._source)
        self._job.progress.begin(self._source, needed_bytes, len(missing))
        for each in missing:
            (self._store.part / each.path).parent.mkdir(parents=True, exist_ok=True)
        for each in self._bucket.fetch(missing, self._store.part, self._job.progress):
            self._store.record(each)
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
            name, check_room = str(self._source), lambda num_bytes: place.check_room(num_bytes, self._source)
            unpack(archive, folder, name=name, count=progress.add, check_room=check_room)
            model = descended(folder)
            check(model, name=name, allow_pickle=wanted.allow_pickle, is_adapter=wanted.is_adapter)
        except BaseException:
            shutil.rmtree(self._store.part, ignore_errors=True)
            raise
        archive.unlink()
        warn_of_properties(name, (path.name for path in model.iterdir()))


class Store:
    def __init__(self, download_dir: Path, endpoint: str, url: str) -> None:
        name = hashlib.sha256(f"{endpoint} {url}".encode()).hexdigest()
        self.whole = download_dir / name
        self.part = download_dir / f"{name}.part"
        self.lock = download_dir / f"{name}.lock"
        self._old = download_dir / f"{name}.old"

    @property
    def model(self) -> Path:
        """The folder with the model's files."""
        return self.whole / MODEL

    def is_current(self, objects: Iterable[StoredObject], *, is_unpacked: bool = False) -> bool:
        """Return whether H holds exactly these objects. Those of an archive that was unpacked are gone."""
        objects = list(objects)
        if _noted(self.whole) != {each.key: each for each in objects}:
            return False
        return self.model.is_dir() if is_unpacked else len(_held(self.whole, objects)) == len(objects)

    def missing(self, objects: Iterable[StoredObject]) -> list[StoredObject]:
        """Prepare H.part with the objects that are known already. Returns those that must be fetched."""
        objects = list(objects)
        shutil.rmtree(self._old, ignore_errors=True)
        kept = _held(self.part, objects)
        for path in list(self.part.rglob("*")):
            if not path.is_dir() and str(path.relative_to(self.part)) not in kept:
                path.unlink()  # part of a file, or an object that changed
        for name in _held(self.whole, objects) - kept:
            path = self.part / name
            with suppress(OSError):  # the file system has no links
                path.parent.mkdir(parents=True, exist_ok=True)
                os.link(self.whole / name, path)
                kept.add(name)
        (self.part / MODEL).mkdir(parents=True, exist_ok=True)
        new = self.part / "manifest.new"
        new.write_bytes(ENCODER.encode_lines([each for each in objects if each.path in kept]))
        new.rename(self.part / MANIFEST)
        return [each for each in objects if each.path not in kept]

    def record(self, fetched: StoredObject) -> None:
        """Note that an object is whole in H.part."""
        with open(self.part / MANIFEST, "ab") as file:
            file.write(ENCODER.encode_lines([fetched]))

    def finish(self) -> None:
        """Let H.part become H."""
        with suppress(FileNotFoundError):
            self.whole.rename(self._old)
        self.part.rename(self.whole)
        shutil.rmtree(self._old, ignore_errors=True)


def _noted(folder: Path) -> dict[str, StoredObject]:
    """Return the noted objects by key. A line that a killed process did not end is left out."""
    found = {}
    with suppress(FileNotFoundError, NotADirectoryError):
        for line in (folder / MANIFEST).read_bytes().splitlines():
            with suppress(msgspec.MsgspecError):
                each = msgspec.json.decode(line, type=StoredObject)
                found[each.key] = each
    return found


def _held(folder: Path, objects: Iterable[StoredObject]) -> set[str]:
    """Return the paths of the objects that the folder has, noted and with their size."""
    noted = _noted(folder)
    return {each.path for each in objects if noted.get(each.key) == each and size_of(folder / each.path) == each.size}
