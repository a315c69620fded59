"""A bucket of S3 and its objects, through boto3. No answer is held that has no end."""

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import boto3  # type: ignore[import-untyped]
import botocore.exceptions as faults  # type: ignore[import-untyped]
from botocore.config import Config  # type: ignore[import-untyped]
from s3transfer.manager import TransferConfig, TransferManager  # type: ignore[import-untyped]
from urllib3.exceptions import HTTPError

from lmi.errors import shorten
from lmi.sources.files_on_disk import size_of
from lmi.sources.job import NO_BYTE_S, Damaged, Progress, run_all
from lmi.sources.s3_errors import GONE, NoS3, code_of, error_of_answer, explained

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
# An ETag that is an MD5.
MD5 = re.compile("[0-9a-f]{32}")
# An answer with a status from here on has no object.
FIRST_ERROR = 300
# The bytes of an answer that is no object. A page of a listing with 1,000 keys of 1,024 bytes has 2
# MB.
MAX_ANSWER_BYTES = 32 << 20
# The objects of one prefix.
MAX_OBJECTS = 100_000
MAX_PAGES = 1_000
READ_BYTES = 1 << 16


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
        """Return the object with this key, or None."""
        with explained(f"s3://{self.name}/{key}"):
            try:
                answer = self._lister.head_object(Bucket=self.name, Key=key)
            except faults.ClientError as error:
                if code_of(error) not in GONE:
                    raise

                return None

            size = answer.get("ContentLength")
            etag = answer.get("ETag")
            if size is None or etag is None or size < 0:
                raise NoS3(f"the object has {size} bytes and the ETag {shorten(etag)}")

        return StoredObject(key, size, etag.strip('"'))

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
            if code_of(error) == "NoSuchBucket":
                raise error_of_answer(error, f"s3://{self.name}/{key}") from error

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
        """Fetch one object. Nothing is left of one that is not whole and right."""
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


def _config(num_tries: int) -> Any:
    return Config(
        connect_timeout=CONNECT_TIMEOUT_S,
        read_timeout=READ_TIMEOUT_S,
        retries={"mode": "standard", "total_max_attempts": num_tries},
        max_pool_connections=NUM_THREADS,
        user_agent_extra="lmi",
    )
