"""Where inputs of async invocations come from and answers go: objects of S3, or files of a folder.

All of it blocks. boto3 is imported for the first object.
"""

import errno
import hashlib
import uuid
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote, urlsplit

from lmi.errors import cause_line

# SageMaker's limit of an async payload.
MAX_INPUT_BYTES = 1 << 30
CONNECT_TIMEOUT_S = 5
READ_TIMEOUT_S = 10
NUM_TRIES = 3
S3_SCHEME = "s3://"
NO_BOTO3 = "S3 needs boto3, which `pip install boto3` brings"


class AnswerRoots(NamedTuple):
    """The URLs below which async invocations leave their answers and errors, "" for those of the
    gateway.
    """

    output: str = ""
    failure: str = ""


class StoreError(Exception):
    """An object or a file cannot be read or written. The text names it and the cause.

    `may_pass` says whether it may work later, as when a disk has room again.
    """

    def __init__(self, reason: str, cause: str = "", may_pass: bool = False) -> None:
        super().__init__(reason)
        self.cause = cause
        self.may_pass = may_pass


def cannot_write(file: Path, error: OSError) -> StoreError:
    """Return the error of a file that cannot be written."""
    return StoreError(
        f"{file} cannot be written: {cause_line(error)}",
        cause=error.strerror or type(error).__name__,
        may_pass=error.errno in (errno.ENOSPC, errno.EDQUOT),
    )


class Answers:
    """Writes answers of async invocations by their URL: below `place`, which is a folder or an
    `s3://` URL, and in `buckets`, which has by name the folder that stands for a bucket, or "" for
    the bucket of S3.
    """

    def __init__(self, place: str, buckets: Mapping[str, str]) -> None:
        self._place = place.rstrip("/")
        if not place.startswith(S3_SCHEME):
            self._place = Path(place).absolute().as_uri()

        self._buckets = buckets

    def broken_rule(self, root: str) -> str:
        """Return the rule that a client's URL for answers breaks, or ""."""
        bucket, key = parse_s3(root)
        if not root.startswith(S3_SCHEME) or bucket not in self._buckets:
            return "must name s3://BUCKET[/PREFIX] with a bucket that --async-bucket allows"

        # One slash may end the prefix.
        parts = key.removesuffix("/").split("/") if key else []
        if "\0" in key or not {"", ".", ".."}.isdisjoint(parts):
            return "must have no part that is empty, . or .."

        return ""

    def url(self, path: str, root: str = "") -> str:
        """Return the URL of the answer at `path` below a client's URL, or below the place of all
        others.
        """
        root = root or self._place
        if not root.startswith(S3_SCHEME):
            path = quote(path)

        return f"{root.rstrip('/')}/{path}"

    def write(self, url: str, data: bytes, media_type: str) -> None:
        """Write a whole answer, or nothing. Raises StoreError."""
        bucket, key = parse_s3(url)
        if not url.startswith(S3_SCHEME):
            _write_file(Path(unquote(urlsplit(url).path)), data)
        elif self._buckets.get(bucket):
            _write_file(Path(self._buckets[bucket], key), data)
        elif bucket in self._buckets or url.startswith(f"{self._place}/"):
            _write_object(url, data, media_type)
        else:
            raise StoreError(f"{url} is in no bucket that --async-bucket allows")


@cache
def s3() -> Any:
    """Return a client of S3, which many threads may use. Raises StoreError without boto3.

    boto3 finds endpoint, region and credentials in the environment.
    """
    try:
        import boto3  # type: ignore[import-untyped]
        from botocore.config import Config  # type: ignore[import-untyped]
    except ImportError:
        raise StoreError(NO_BOTO3) from None

    retries = {"mode": "standard", "max_attempts": NUM_TRIES}
    limits = Config(connect_timeout=CONNECT_TIMEOUT_S, read_timeout=READ_TIMEOUT_S, retries=retries)
    return boto3.session.Session().client("s3", config=limits)


def _write_file(file: Path, data: bytes) -> None:
    """Write a file under another name and rename it, so nobody reads half of it. Raises
    StoreError.
    """
    part = file.with_name(f".{uuid.uuid4().hex}.part")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(data)
        part.replace(file)
    except OSError as error:
        with suppress(OSError):
            part.unlink()

        raise cannot_write(file, error) from error


def _write_object(url: str, data: bytes, media_type: str) -> None:
    """Write an object. Raises StoreError if it is not there afterwards, for S3's answer may be
    lost.
    """
    bucket, key = parse_s3(url)
    try:
        s3().put_object(Bucket=bucket, Key=key, Body=data, ContentType=media_type)
    except Exception as error:
        with suppress(Exception):
            etag = s3().head_object(Bucket=bucket, Key=key)["ETag"].strip('"')
            # It is the ETag of most objects.
            md5 = hashlib.md5(data, usedforsecurity=False).hexdigest()
            if etag == md5:
                return

        raise StoreError(
            f"{url} cannot be written: {cause_line(error)}", may_pass=may_pass(error)
        ) from error


def may_pass(error: Exception) -> bool:
    """Whether S3 may do later what it has not done now: nothing answered, or with a fault of its
    own.
    """
    if isinstance(error, StoreError):
        return False

    import botocore.exceptions as faults  # type: ignore[import-untyped]

    if isinstance(error, faults.ClientError):
        return bool(error.response["ResponseMetadata"]["HTTPStatusCode"] >= 500)

    # The first is that of an address where nobody answers, the second that of a lost connection.
    return isinstance(error, faults.ConnectionError | faults.HTTPClientError)


class Inputs:
    """Reads inputs by URL: any object of S3, and files below `folder` if there is one."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder and folder.resolve()

    def is_allowed(self, location: str) -> bool:
        """Whether the location names an object of S3, or a place below the folder. It need not
        exist.
        """
        if location.startswith(S3_SCHEME):
            return all(parse_s3(location))

        return self._file(location) is not None

    def read(self, location: str) -> bytes:
        """Return the bytes at a location. Raises StoreError."""
        try:
            if not location.startswith(S3_SCHEME):
                return self._content(location)

            bucket, key = parse_s3(location)
            s3_object = s3().get_object(Bucket=bucket, Key=key)
            _check_size(location, s3_object["ContentLength"])
            return bytes(s3_object["Body"].read())
        except StoreError:
            raise
        except Exception as error:
            # botocore's errors have no common base, and urllib3's pass through it.
            raise StoreError(f"{location} cannot be read: {cause_line(error)}") from error

    def _content(self, location: str) -> bytes:
        # A link may have changed since the location was allowed.
        file = self._file(location)
        if file is None:
            raise StoreError(f"{location} is not below the folder of --async-input")

        # Any other file, such as a pipe, could let its reader wait for ever.
        if not file.is_file():
            reason = f"{file} is not a regular file" if file.exists() else f"there is no {file}"
            raise StoreError(reason)

        _check_size(file, file.stat().st_size)
        return file.read_bytes()

    def _file(self, location: str) -> Path | None:
        """Return the file that a location names, or None if it may not be read. Links count where
        they lead.
        """
        with suppress(ValueError, OSError):
            url = urlsplit(location)
            file = Path(unquote(url.path)).resolve()
            is_local = url.scheme == "file" and url.netloc in ("", "localhost")
            if is_local and self._folder is not None and file.is_relative_to(self._folder):
                return file

        return None


def parse_s3(url: str) -> tuple[str, str]:
    """Return the bucket and the key of `s3://BUCKET/KEY`. Either is "" if the URL lacks it."""
    bucket, _, key = url.removeprefix(S3_SCHEME).partition("/")
    return bucket, key


def _check_size(source: object, num_bytes: int) -> None:
    if num_bytes > MAX_INPUT_BYTES:
        raise StoreError(f"{source} has {num_bytes} bytes, at most {MAX_INPUT_BYTES} are read")
