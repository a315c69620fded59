"""Async invocations: accepted at once, run a few at a time, answered by a file.

Each accepted invocation leaves exactly one file, an output or a failure, also when the gateway
stops. An answer fails here for what it fails for in production: no Content-Length, or headers over
4096 bytes. Inputs and files are objects of S3 or files of a folder, which are read and written in
threads. boto3 is imported for the first object.
"""

import asyncio
import hashlib
import logging
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit

import orjson

from lmi.errors import cause_line
from lmi.gateway.container import ContainerFault, ContainerResponse, OutOfTime
from lmi.gateway.endpoints import TIMED_OUT, AwsEndpoint
from lmi.gateway.exchange import (
    PREFIX,
    AwsError,
    AwsExchange,
    invalid,
    model_error,
    too_large,
    unavailable,
)
from lmi.http.exchange import MAX_HEADER_BYTES, Header, num_bytes

INPUT_LOCATION = PREFIX + "InputLocation"
MAX_INLINE_BYTES = 128_000
# SageMaker's limit of an async payload.
MAX_INPUT_BYTES = 1 << 30
MAX_LOCATION_CHARS = 1024
# Of a path, the limit of most file systems.
MAX_PART_CHARS = 255
MAX_WAITING = 1000
# These are AWS's defaults.
TTL_S = 21_600
TIMEOUT_S = 900
CONNECT_TIMEOUT_S = 5
READ_TIMEOUT_S = 10
NUM_TRIES = 3
STOPPED = "The gateway was stopped before the invocation was complete."
EXPIRED = "The request waited in the queue for longer than RequestTTLSeconds."
S3_SCHEME = "s3://"
NO_BOTO3 = "S3 needs boto3, which `pip install boto3` brings"

log = logging.getLogger(__name__)
T = TypeVar("T")


class StoreError(Exception):
    """An object or a file cannot be read or written. The text names it and the cause."""


class FolderOutput:
    """Answers as files of a folder. A file is written under another name and renamed, so nobody
    reads half of it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()

    def url(self, path: str) -> str:
        return (self._folder / path).as_uri()

    def write(self, path: str, data: bytes, media_type: str) -> None:
        """Write a whole file, or nothing. Raises StoreError."""
        file = self._folder / path
        part = file.with_name(f".{uuid.uuid4().hex}.part")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(data)
            part.replace(file)
        except OSError as error:
            with suppress(OSError):
                part.unlink()

            raise StoreError(f"{file} cannot be written: {cause_line(error)}") from error


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


class S3Output:
    """Answers as objects below a URL, in the way of FolderOutput."""

    def __init__(self, root: str) -> None:
        self._root = root.rstrip("/")

    def url(self, path: str) -> str:
        return f"{self._root}/{path}"

    def write(self, path: str, data: bytes, media_type: str) -> None:
        """Write an object. Raises StoreError if it is not there afterwards, for S3's answer may be
        lost.
        """
        bucket, key = parse_s3(self.url(path))
        try:
            s3().put_object(Bucket=bucket, Key=key, Body=data, ContentType=media_type)
        except Exception as error:
            with suppress(Exception):
                etag = s3().head_object(Bucket=bucket, Key=key)["ETag"].strip('"')
                # It is the ETag of most objects.
                md5 = hashlib.md5(data, usedforsecurity=False).hexdigest()
                if etag == md5:
                    return

            raise StoreError(f"{self.url(path)} cannot be written: {cause_line(error)}") from error


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


async def run_in_thread(call: Callable[..., T], *arguments: object) -> T:
    """Return what a blocking call returns, or raise what it raises. The call goes on if its caller
    is cancelled.

    Its thread does not keep the process alive, because a disk or a network may hang when the
    process should end.
    """
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()

    def run() -> None:
        try:
            outcome.set_result(call(*arguments))
        except Exception as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(outcome)


class OutputFile(NamedTuple):
    """What an invocation leaves: a file at `path` below the place of all answers."""

    path: str
    data: bytes
    media_type: str


@dataclass(frozen=True, kw_only=True)
class AsyncJob:
    """An accepted invocation. `input` is the body, or the location of it.

    It must begin before `expires_s` of the monotonic clock, and may then take `timeout_s`.
    """

    endpoint: AwsEndpoint
    region: str
    inference_id: str
    headers: list[Header]
    input: bytes | str
    # The paths of its answer, and of its error.
    output: str
    failure: str
    expires_s: float
    timeout_s: float = TIMEOUT_S

    def error(self, reason: str, status: int = 0) -> AwsError:
        """Return the error of a container that answered with `status` and `reason`, or
        with none.
        """
        return model_error(status, reason, self.endpoint.name, self.region)

    def succeeded(self, response: ContainerResponse, body: bytes) -> OutputFile:
        """Return the answer as a file. Raises AwsError for one that fails in production too."""
        if response.status >= 300:
            raise self.error(body.decode(errors="replace"), response.status)

        if not response.header("content-length"):
            raise self.error("The response did not specify the required Content-Length header.")

        num_header_bytes = num_bytes(response.headers)
        if num_header_bytes > MAX_HEADER_BYTES:
            raise self.error(
                f"The headers of the response have {num_header_bytes} bytes together, more than "
                f"{MAX_HEADER_BYTES}."
            )

        media_type = response.header("content-type") or "application/octet-stream"
        return OutputFile(self.output, body, media_type)


class AsyncInvocations:
    """A task for each invocation. `max_running` of them run at a time, and leave their files below
    `place`.
    """

    def __init__(self, input_folder: Path | None, place: str, max_running: int) -> None:
        self.output: S3Output | FolderOutput
        if place.startswith(S3_SCHEME):
            self.output = S3Output(place)
        else:
            self.output = FolderOutput(Path(place))

        self._inputs = Inputs(input_folder)
        self._places = asyncio.Semaphore(max_running)
        self._num_waiting = 0
        self._tasks: set[asyncio.Task[None]] = set()
        # The limits of the invocations that have no answer yet.
        self._limits: set[asyncio.Timeout] = set()
        self._is_stopping = False

    def accept(self, exchange: AwsExchange, endpoint: AwsEndpoint) -> AsyncJob:
        """Begin and return the invocation that a request asks for. Raises AwsError."""
        job = _read_job(exchange, endpoint, self._inputs)
        self.add(job)
        return job

    def add(self, job: AsyncJob) -> None:
        """Begin an invocation. Raises AwsError if too many wait."""
        if self._is_stopping:
            raise unavailable("The gateway stops.")

        if self._num_waiting == MAX_WAITING:
            waiting = f"{MAX_WAITING} async invocations wait already, which is the limit."
            raise AwsError("ThrottlingException", 429, waiting)

        self._num_waiting += 1
        task = asyncio.create_task(self._run(job))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Stop all invocations, and return when each has its file."""
        self._is_stopping = True
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(0.0)

        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, job: AsyncJob) -> None:
        async with self._places:
            self._num_waiting -= 1
            try:
                file = await self._answer(job)
            except AwsError as error:
                file = self._failed(job, error)
            except Exception as error:
                log.exception("async invocation %s", job.inference_id)
                file = self._failed(job, job.error(f"The gateway failed: {error}"))

            await self._leave(job, file)

    def _failed(self, job: AsyncJob, error: AwsError) -> OutputFile:
        log.warning("async invocation %s failed: %s", job.inference_id, error)
        return OutputFile(job.failure, orjson.dumps(error.members), "application/json")

    async def _answer(self, job: AsyncJob) -> OutputFile:
        if self._is_stopping:
            raise job.error(STOPPED)

        if time.monotonic() > job.expires_s:
            raise job.error(EXPIRED)

        limit = asyncio.timeout(job.timeout_s)
        try:
            async with limit:
                self._limits.add(limit)
                if isinstance(job.input, bytes):
                    body = job.input
                else:
                    body = await run_in_thread(self._inputs.read, job.input)

                call = job.endpoint.container.call(
                    "POST", "/invocations", job.headers, body, job.timeout_s
                )
                async with call as response:
                    return job.succeeded(response, await response.read())
        except (TimeoutError, OutOfTime):
            raise job.error(STOPPED if self._is_stopping else TIMED_OUT) from None
        except (ContainerFault, StoreError) as error:
            raise job.error(str(error)) from error
        finally:
            self._limits.discard(limit)

    async def _leave(self, job: AsyncJob, file: OutputFile) -> None:
        """Write the file. If the output cannot be written, the failure file says so."""
        try:
            await run_in_thread(self.output.write, *file)
        except StoreError as error:
            if file.path == job.failure:
                log.error("async invocation %s has no file: %s", job.inference_id, error)
            else:
                await self._leave(job, self._failed(job, job.error(str(error))))


def _read_job(exchange: AwsExchange, endpoint: AwsEndpoint, inputs: Inputs) -> AsyncJob:
    values = exchange.values("InvokeEndpointAsync")
    name = str(uuid.uuid4())
    folder = _folder(values.get("S3OutputPathExtension", ""))

    return AsyncJob(
        endpoint=endpoint,
        region=exchange.region,
        inference_id=values.get("InferenceId") or str(uuid.uuid4()),
        headers=exchange.headers_for_container(values),
        input=_input(exchange, inputs),
        output=folder + values.get("Filename", f"{name}.out"),
        failure=f"{folder}{name}-error.out",
        expires_s=time.monotonic() + int(values.get("RequestTTLSeconds", TTL_S)),
        timeout_s=int(values.get("InvocationTimeoutSeconds", TIMEOUT_S)),
    )


def _folder(extension: str) -> str:
    """Return the path extension so that a file's name can follow it. Raises AwsError."""
    parts = [part for part in extension.split("/") if part not in ("", ".")]
    if ".." in parts or any(len(part) > MAX_PART_CHARS for part in parts):
        rule = f"must have no part that is .. or longer than {MAX_PART_CHARS}"
        raise invalid(f"S3OutputPathExtension {rule}, given {extension}")

    return "".join(f"{part}/" for part in parts)


def _input(exchange: AwsExchange, inputs: Inputs) -> bytes | str:
    location = exchange.headers.get(INPUT_LOCATION, "")
    if bool(location) == bool(exchange.payload):
        which = "both" if location else "neither"
        raise invalid(f"Exactly one of Body and InputLocation must be given, not {which}.")

    if not location:
        if len(exchange.payload) > MAX_INLINE_BYTES:
            raise too_large(MAX_INLINE_BYTES)

        return exchange.payload

    if len(location) > MAX_LOCATION_CHARS or not inputs.is_allowed(location):
        where = "s3://BUCKET/KEY or a file:// URL below the folder of --async-input"
        raise invalid(
            f"InputLocation must be {where}, with at most {MAX_LOCATION_CHARS} characters, given "
            f"{location}"
        )

    return location
