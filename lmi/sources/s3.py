"""Fetches a prefix, a GGUF file or an archive of S3 through boto3 to its place in `download_dir`.

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
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import boto3  # type: ignore[import-untyped]
import botocore.exceptions as faults  # type: ignore[import-untyped]
from botocore.config import Config  # type: ignore[import-untyped]
from s3transfer import exceptions as transfer_faults  # type: ignore[import-untyped]
from s3transfer.manager import TransferConfig, TransferManager  # type: ignore[import-untyped]
from urllib3.exceptions import HTTPError

from lmi.errors import ModelUnusable, cause_line, shorten
from lmi.shared.gguf_file import parts_of
from lmi.sources.archive import unpack
from lmi.sources.fetches import Place, link, size_of
from lmi.sources.gguf.find import only_file
from lmi.sources.job import (
    NO_BYTE_S,
    PASSING_STATUSES,
    Damaged,
    FetchJob,
    MayPass,
    Progress,
    attempt,
    run_all,
)
from lmi.sources.listing import taken
from lmi.sources.source import S3Model, check, check_path, descended, warn_of_properties

NUM_THREADS = 10
PART_BYTES = 64 << 20
# A part is read again when its connection breaks, and each read asks again when S3 is busy. In all
# of them together a silent S3 has NO_BYTE_S, then the try of the whole source has failed.
NUM_PART_READS = 3
NUM_READ_TRIES = 2
READ_TIMEOUT_S = NO_BYTE_S / (NUM_PART_READS * NUM_READ_TRIES)
CONNECT_TIMEOUT_S = 10.0
# With a threshold of one byte each read is one of a range, and only those are made with If-Match.
TRANSFERS = TransferConfig(
    multipart_threshold=1,
    multipart_chunksize=PART_BYTES,
    max_request_concurrency=NUM_THREADS,
    num_download_attempts=NUM_PART_READS,
)
PERMISSIONS = {
    "ListObjectsV2": "s3:ListBucket",
    "HeadObject": "s3:GetObject",
    "GetObject": "s3:GetObject",
}
PASSING_CODES = frozenset(
    {"RequestTimeout", "SlowDown", "Throttling", "ThrottlingException", "InternalError"}
)
PASSING = (
    faults.ConnectionError,
    faults.HTTPClientError,
    faults.IncompleteReadError,
    transfer_faults.S3ValidationError,
    transfer_faults.RetriesExceededError,
)
REFUSED_CREDENTIALS = frozenset(
    {"InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken"}
)
# An ETag that is an MD5.
MD5 = re.compile("[0-9a-f]{32}")
# An answer with a status from here on has no object.
FIRST_ERROR = 300
GONE = frozenset({"404", "NoSuchKey", "412", "PreconditionFailed"})
CREDENTIALS = (
    faults.NoCredentialsError,
    faults.PartialCredentialsError,
    faults.CredentialRetrievalError,
    faults.ProfileNotFound,
    faults.TokenRetrievalError,
    faults.SSOError,
    faults.NoAuthTokenError,
)

# The bytes of an answer that is no object. A page of a listing with 1,000 keys of 1,024 bytes has 2
# MB.
MAX_ANSWER_BYTES = 32 << 20
# The objects of one prefix.
MAX_OBJECTS = 100_000
MAX_PAGES = 1_000
READ_BYTES = 1 << 16

log = logging.getLogger(__name__)


class StoredObject(NamedTuple):
    """An object of S3, as the listing describes it. `path` is the rest of its key after the prefix
    of the listing.
    """

    key: str
    size: int
    # The ETag without quotes.
    etag: str
    path: str = ""

    @property
    def id(self) -> str:
        """The name of its file, which holds these bytes and no others."""
        return hashlib.sha256(f"{self.key} {self.size} {self.etag}".encode()).hexdigest()


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
                raise self._nothing("there is no such object (NoSuchKey)")

            return [archive]

        if self._source.names_gguf:
            return self._gguf_objects()

        by_path = {stored.path: stored for stored in self._bucket.objects(key)}
        if not by_path:
            raise self._nothing("there are no objects with this prefix")

        return [by_path[path] for path in taken(self._source, by_path, self._job.wanted)]

    def _gguf_objects(self) -> list[StoredObject]:
        """Return the files of the GGUF model that the source names, which may be split."""
        folder, slash, name = self._source.key.rpartition("/")
        objects = []
        for part in parts_of(Path(name)):
            key = f"{folder}{slash}{part.name}"
            stored = self._bucket.head(key)
            if stored is None and key == self._source.key:
                raise self._nothing("there is no such object (NoSuchKey)")

            if stored is None:
                raise ModelUnusable(f"{self._source}: its part {part.name} is missing (NoSuchKey)")

            check_path(str(self._source), part.name)
            objects.append(stored._replace(path=part.name))

        return objects

    def _nothing(self, reason: str) -> ModelUnusable:
        key = self._source.key
        similar = self._bucket.similar(key)
        if similar is None:
            return ModelUnusable(f"{self._source}: {reason}")

        difference = "differs in upper and lower case"
        if similar.rstrip("/") == key.rstrip("/"):
            difference = "is a folder" if similar.endswith("/") else "is one file"

        url = f"s3://{self._source.bucket}/{similar}"
        return ModelUnusable(f"{self._source}: {reason}; {url} {difference}")

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
            if not is_gguf:
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
        warn_of_properties(name, (path.name for path in model.iterdir()))


class Store:
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


class Bucket:
    """A bucket, with errors that say what is wrong and who can mend it."""

    def __init__(self, name: str) -> None:
        self.name = name
        with explained(f"s3://{name}"):
            session = boto3.session.Session()
            # The caller tries a listing again. Of the reads of a transfer many run at a time, so
            # each is tried again. SageMaker sets AWS_REGION, which boto3 does not read.
            region = session.region_name or os.environ.get("AWS_REGION")
            self._lister = _bounded(session.client("s3", region, config=_config(1)))
            self._reader = _bounded(session.client("s3", region, config=_config(NUM_READ_TRIES)))

    @property
    def endpoint(self) -> str:
        return str(self._lister.meta.endpoint_url)

    def objects(self, prefix: str) -> list[StoredObject]:
        """Return every object below `prefix`, without the empty ones that stand for folders."""
        entries: list[dict[str, Any]] = []
        with explained(f"s3://{self.name}/{prefix}"):
            paginator = self._lister.get_paginator("list_objects_v2")
            pages = paginator.paginate(Bucket=self.name, Prefix=prefix)
            for number, page in enumerate(pages, start=1):
                entries += page.get("Contents", [])
                if number > MAX_PAGES or len(entries) > MAX_OBJECTS:
                    raise NoS3(
                        f"it lists more than {MAX_OBJECTS} objects, or more than {MAX_PAGES} pages "
                        f"of them"
                    )

            objects = [self._listed(entry, prefix) for entry in entries]

        return [stored for stored in objects if stored.size or not stored.key.endswith("/")]

    def _listed(self, entry: Mapping[str, Any], prefix: str) -> StoredObject:
        """Return an object of a listing. Raises NoS3 for one that lacks what S3 says of each."""
        key = entry.get("Key")
        size = entry.get("Size")
        etag = entry.get("ETag")
        if key is None or size is None or etag is None or size < 0 or not key.startswith(prefix):
            raise NoS3(f"it lists {shorten(key)} with {size} bytes and the ETag {shorten(etag)}")

        return StoredObject(key, size, etag.strip('"'), key.removeprefix(prefix))

    def head(self, key: str) -> StoredObject | None:
        with explained(f"s3://{self.name}/{key}"):
            try:
                answer = self._lister.head_object(Bucket=self.name, Key=key)
            except faults.ClientError as error:
                if _code(error) not in GONE:
                    raise

                return None

        return StoredObject(key, answer["ContentLength"], answer["ETag"].strip('"'))

    def similar(self, key: str) -> str | None:
        """Return a key or folder that is `key` but for the case of its last part or a slash at its
        end, or None.
        """
        folder, slash, name = key.rstrip("/").rpartition("/")
        try:
            page = self._lister.list_objects_v2(
                Bucket=self.name, Prefix=folder + slash, Delimiter="/"
            )
        except faults.ClientError as error:
            if _code(error) == "NoSuchBucket":
                raise _of_answer(error, f"s3://{self.name}/{key}") from error

            # The bucket may not be listed.
            return None

        candidates: list[str] = [entry["Key"] for entry in page.get("Contents", [])]
        candidates += [entry["Prefix"] for entry in page.get("CommonPrefixes", [])]
        for candidate in candidates:
            last_part = candidate.rstrip("/").rpartition("/")[2]
            if last_part.lower() == name.lower():
                return candidate

        return None

    def fetch(self, objects: Sequence[StoredObject], folder: Path, progress: Progress) -> None:
        """Fetch objects into a folder. Each has its id as its name as soon as it is whole and
        checked.
        """
        with TransferManager(self._reader, TRANSFERS) as manager:
            tasks = [partial(self._fetch, stored, folder, manager, progress) for stored in objects]
            run_all(tasks, progress)

    def _fetch(
        self, stored: StoredObject, folder: Path, manager: TransferManager, progress: Progress
    ) -> None:
        new = folder / f"{stored.id}.new"
        try:
            with explained(f"s3://{self.name}/{stored.key}", read_key=stored.key):
                if stored.size:
                    subscribers = [_Subscriber(stored, progress)]
                    transfer = manager.download(
                        self.name, stored.key, str(new), subscribers=subscribers
                    )
                    transfer.result()
                else:
                    # A range of nothing cannot be read.
                    new.touch()

                self._check(stored, new)

            new.rename(folder / stored.id)
        finally:
            new.unlink(missing_ok=True)

    def _check(self, stored: StoredObject, file: Path) -> None:
        """Raise Damaged if the file is not what the listing says."""
        size = size_of(file)
        if size != stored.size:
            raise Damaged(stored.key, wanted=f"{stored.size} bytes", found=size)

        if not MD5.fullmatch(stored.etag):
            return

        with open(file, "rb") as content:
            md5 = hashlib.file_digest(content, lambda: hashlib.md5(usedforsecurity=False))

        digest = md5.hexdigest()
        if digest == stored.etag:
            return

        # An ETag of 32 digits is no MD5 either if the object is encrypted in some ways.
        head = self._reader.head_object(Bucket=self.name, Key=stored.key)
        is_by_kms = head.get("ServerSideEncryption", "").startswith("aws:kms")
        if not is_by_kms and "SSECustomerAlgorithm" not in head:
            raise Damaged(stored.key, wanted=f"MD5 {stored.etag}", found=digest)


@dataclass
class _Subscriber:
    """Hears from the transfer manager how one object gets on."""

    stored: StoredObject
    progress: Progress
    num_bytes = 0

    def on_queued(self, future: Any, **_: object) -> None:
        future.meta.provide_transfer_size(self.stored.size)
        future.meta.provide_object_etag(f'"{self.stored.etag}"')

    def on_progress(self, future: Any, bytes_transferred: int, **_: object) -> None:
        """Count bytes, or take back those of a part that is read again. Raises Damaged for more
        than were listed.
        """
        self.progress.add(bytes_transferred)
        self.num_bytes += bytes_transferred
        if self.num_bytes > self.stored.size:
            raise Damaged(self.stored.key, wanted=f"{self.stored.size} bytes", found="more")


class NoS3(ValueError):
    """An answer is not one of S3: too large, without an end, or without what each such
    answer has.
    """


def _bounded(client: Any) -> Any:
    """Let a client refuse an answer that is no object and has more than MAX_ANSWER_BYTES, which
    boto3 would hold.
    """
    session = client._endpoint.http_session

    def send(request: Any, **_: object) -> Any:
        is_object = request.stream_output
        # The session then leaves the body to be read.
        request.stream_output = True
        response = session.send(request)
        if not (is_object and response.status_code < FIRST_ERROR):
            response._content = _body(response.raw)

        return response

    client.meta.events.register("before-send.s3", send)
    return client


def _body(raw: Any) -> bytes:
    """Read the body of an answer. Raises NoS3 for one that is too large."""
    body = bytearray()
    try:
        for data in raw.stream(READ_BYTES):
            body += data
            if len(body) > MAX_ANSWER_BYTES:
                raw.close()
                raise NoS3(f"an answer has more than {MAX_ANSWER_BYTES} bytes")
    except HTTPError as error:
        raise faults.HTTPClientError(error=error) from error

    return bytes(body)


@contextmanager
def explained(url: str, *, read_key: str = "") -> Iterator[None]:
    """Turn boto3's errors into MayPass, Damaged or an error that says what is wrong for good.

    `read_key` is given while an object of a listing is read. If it is missing then, it has changed.
    """
    try:
        yield
    except faults.ClientError as error:
        raise _of_answer(error, url, read_key) from error
    except CREDENTIALS as error:
        raise ModelUnusable(f"{url}: no credentials for S3: {cause_line(error)}") from error
    except transfer_faults.S3DownloadFailedError as error:
        raise _changed(read_key, "PreconditionFailed") from error
    except PASSING as error:
        cause = getattr(error, "last_exception", error)
        raise MayPass(f"{type(cause).__name__}: {cause_line(cause)}") from error
    except NoS3 as error:
        raise ModelUnusable(f"{url} does not answer as S3: {error}") from error
    except (faults.BotoCoreError, ValueError) as error:
        raise ModelUnusable(f"{url}: {type(error).__name__}: {cause_line(error)}") from error


def _of_answer(error: Any, url: str, read_key: str = "") -> Exception:
    code = _code(error)
    operation = error.operation_name
    if read_key and code in GONE:
        return _changed(read_key, code)

    message = error.response.get("Error", {}).get("Message", "")
    reason = f"S3 answers {code} to {operation}: {message}"
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    if status in PASSING_STATUSES or code in PASSING_CODES:
        return MayPass(reason)

    if code in REFUSED_CREDENTIALS:
        return ModelUnusable(f"{url}: {reason}; the credentials are not valid")

    permission = PERMISSIONS.get(operation)
    if permission is None:
        return ModelUnusable(f"{url}: {reason}")

    return ModelUnusable(f"{url}: {reason}; it needs the permission {permission}")


def _changed(key: str, code: str) -> Damaged:
    return Damaged(
        key, wanted="the object of the listing", found=f"another or none, since it changed ({code})"
    )


def _code(error: Any) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _config(num_tries: int) -> Any:
    return Config(
        connect_timeout=CONNECT_TIMEOUT_S,
        read_timeout=READ_TIMEOUT_S,
        retries={"mode": "standard", "total_max_attempts": num_tries},
        max_pool_connections=NUM_THREADS,
        user_agent_extra="lmi",
    )
