"""Fetches a prefix or an archive of S3 through boto3 to its place below `download_dir`.

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
from lmi.sources.archive import unpack
from lmi.sources.fetches import Place, link, size_of
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
from lmi.sources.source import S3Model, check, descended, taken, warn_of_properties

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
MD5 = re.compile("[0-9a-f]{32}")  # of an ETag
FIRST_ERROR = 300  # a status from here on has no object
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

MAX_ANSWER_BYTES = (
    32 << 20
)  # that is no object: a page of a listing with 1,000 keys of 1,024 bytes has 2 MB
MAX_OBJECTS = 100_000  # of one prefix
MAX_PAGES = 1_000
READ_BYTES = 1 << 16

log = logging.getLogger(__name__)


class StoredObject(NamedTuple):
    """An object of S3, as the listing describes it. `path` is the rest of its key after the prefix
    of the listing.
    """

    key: str
    size: int
    etag: str  # without quotes
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

        return [by_path[path] for path in taken(self._source, by_path, self._job.wanted)]

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
        """Unpack the archive beside itself, check the model in it and empty the archive. What fails
        leaves nothing.
        """
        name = str(self._source)
        folder = self._store.new
        wanted = self._job.wanted
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
        self._folder = folder
        self._url = url
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
        (self._folder / "url").write_text(self._url)
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
        listed: list[dict[str, Any]] = []
        with explained(f"s3://{self.name}/{prefix}"):
            pages = self._lister.get_paginator("list_objects_v2").paginate(
                Bucket=self.name, Prefix=prefix
            )
            for number, page in enumerate(pages, start=1):
                listed += page.get("Contents", [])
                if number > MAX_PAGES or len(listed) > MAX_OBJECTS:
                    raise NoS3(
                        f"it lists more than {MAX_OBJECTS} objects, or more than {MAX_PAGES} pages "
                        f"of them"
                    )

            found = [self._listed(entry, prefix) for entry in listed]

        return [each for each in found if each.size or not each.key.endswith("/")]

    def _listed(self, entry: Mapping[str, Any], prefix: str) -> StoredObject:
        """Return an object of a listing. Raises NoS3 for one that lacks what S3 says of each."""
        key, size, etag = (entry.get(name) for name in ("Key", "Size", "ETag"))
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

            return None  # it may not be listed

        near = [each["Key"] for each in page.get("Contents", [])]
        near += [each["Prefix"] for each in page.get("CommonPrefixes", [])]
        return next(
            (one for one in near if one.rstrip("/").rpartition("/")[2].lower() == name.lower()),
            None,
        )

    def fetch(self, wanted: Sequence[StoredObject], folder: Path, progress: Progress) -> None:
        """Fetch objects into a folder. Each has its id as its name as soon as it is whole and
        checked.
        """
        with TransferManager(self._reader, TRANSFERS) as manager:
            run_all(
                [partial(self._fetch, each, folder, manager, progress) for each in wanted], progress
            )

    def _fetch(
        self, each: StoredObject, folder: Path, manager: TransferManager, progress: Progress
    ) -> None:
        new = folder / f"{each.id}.new"
        try:
            with explained(f"s3://{self.name}/{each.key}", read_key=each.key):
                if each.size:
                    manager.download(
                        self.name, each.key, str(new), subscribers=[_Subscriber(each, progress)]
                    ).result()
                else:  # a range of nothing cannot be read
                    new.touch()

                self._check(each, new)

            new.rename(folder / each.id)
        finally:
            new.unlink(missing_ok=True)

    def _check(self, each: StoredObject, file: Path) -> None:
        """Raise Damaged if the file is not what the listing says."""
        if (size := size_of(file)) != each.size:
            raise Damaged(each.key, wanted=f"{each.size} bytes", found=size)

        if not MD5.fullmatch(each.etag):
            return

        with open(file, "rb") as opened:
            digest = hashlib.file_digest(
                opened, lambda: hashlib.md5(usedforsecurity=False)
            ).hexdigest()

        if digest != each.etag:  # which is no MD5 either if the object is encrypted in some ways
            head = self._reader.head_object(Bucket=self.name, Key=each.key)
            if (
                not head.get("ServerSideEncryption", "").startswith("aws:kms")
                and "SSECustomerAlgorithm" not in head
            ):
                raise Damaged(each.key, wanted=f"MD5 {each.etag}", found=digest)


@dataclass
class _Subscriber:
    """Hears from the transfer manager how one object gets on."""

    wanted: StoredObject
    progress: Progress
    num_bytes = 0

    def on_queued(self, future: Any, **_: object) -> None:
        future.meta.provide_transfer_size(self.wanted.size)
        future.meta.provide_object_etag(f'"{self.wanted.etag}"')

    def on_progress(self, future: Any, bytes_transferred: int, **_: object) -> None:
        """Count bytes, or take back those of a part that is read again. Raises Damaged for more
        than were listed.
        """
        self.progress.add(bytes_transferred)
        self.num_bytes += bytes_transferred
        if self.num_bytes > self.wanted.size:
            raise Damaged(self.wanted.key, wanted=f"{self.wanted.size} bytes", found="more")


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
        request.stream_output = True  # so that the session leaves the body to be read
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

    said = f"S3 answers {code} to {operation}: {error.response.get('Error', {}).get('Message', '')}"
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    if status in PASSING_STATUSES or code in PASSING_CODES:
        return MayPass(said)

    if code in REFUSED_CREDENTIALS:
        return ModelUnusable(f"{url}: {said}; the credentials are not valid")

    permission = PERMISSIONS.get(operation, "")
    return ModelUnusable(
        f"{url}: {said}" + (f"; it needs the permission {permission}" if permission else "")
    )


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
