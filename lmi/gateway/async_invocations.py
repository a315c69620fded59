"""Async invocations: accepted at once, run a few at a time, answered by a file.

    accept ──▶ 1000 wait ──▶ a few run: read the input, invoke the container ──▶ output file or failure file

Each accepted invocation leaves exactly one of its two files, also when the gateway stops. An answer fails here for what
it fails for in production: no Content-Length, or headers over 4096 bytes.
"""

import asyncio
import logging
import time
import uuid
from dataclasses import dataclass, field
from typing import NamedTuple

import orjson

from lmi.gateway.container import ContainerFault, ContainerResponse, OutOfTime
from lmi.gateway.endpoints import TIMED_OUT, AwsEndpoint
from lmi.gateway.exchange import ASYNC, PREFIX, AwsError, AwsExchange, invalid, model_error, too_large, unavailable
from lmi.gateway.stores import FolderOutput, Inputs, S3Output, StoreError, run_in_thread
from lmi.http.exchange import MAX_HEADER_BYTES, Header, num_bytes

INPUT_LOCATION = PREFIX + "InputLocation"
MAX_INLINE_BYTES = 128_000
MAX_LOCATION_CHARS = 1024
MAX_PART_CHARS = 255  # of a path, the limit of most file systems
MAX_WAITING = 1000
TTL_S, TIMEOUT_S = 21_600, 900  # AWS's defaults
STOPPED = "The gateway was stopped before the invocation was complete."
EXPIRED = "The request waited in the queue for longer than RequestTTLSeconds."

log = logging.getLogger(__name__)


class OutputFile(NamedTuple):
    """What an invocation leaves: a file at `path` below the place of all answers."""

    path: str
    data: bytes
    media_type: str


@dataclass(frozen=True, kw_only=True)
class AsyncJob:
    """An accepted invocation. `input` is the body, or the location of it.

    It may wait for `ttl_s` until a worker takes it, and may then take `timeout_s`.
    """

    endpoint: AwsEndpoint
    region: str
    inference_id: str
    headers: list[Header]
    input: bytes | str
    output: str  # the path of its answer
    failure: str  # or of its error
    ttl_s: float = TTL_S
    timeout_s: float = TIMEOUT_S
    accepted_s: float = field(default_factory=time.monotonic)

    def error(self, reason: str, status: int = 0) -> AwsError:
        """Return the error of a container that answered with `status` and `reason`, or with none."""
        return model_error(status, reason, self.endpoint.name, self.region)

    def succeeded(self, response: ContainerResponse, body: bytes) -> OutputFile:
        """Return the answer as a file. Raises AwsError for one that fails in production too."""
        if response.status >= 300:
            raise self.error(body.decode(errors="replace"), response.status)
        if not response.header("content-length"):
            raise self.error("The response did not specify the required Content-Length header.")
        if (found := num_bytes(response.headers)) > MAX_HEADER_BYTES:
            raise self.error(f"The headers of the response have {found} bytes together, more than {MAX_HEADER_BYTES}.")
        return OutputFile(self.output, body, response.header("content-type") or "application/octet-stream")


class AsyncInvocations:
    """A task for each invocation. `max_running` of them run at a time."""

    def __init__(self, inputs: Inputs, output: FolderOutput | S3Output, max_running: int = 4) -> None:
        self.output = output
        self._inputs = inputs
        self._places = asyncio.Semaphore(max_running)
        self._num_waiting = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._limits: set[asyncio.Timeout] = set()  # of those that have no answer yet
        self._is_stopping = False

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
        if time.monotonic() - job.accepted_s > job.ttl_s:
            raise job.error(EXPIRED)
        limit = asyncio.timeout(job.timeout_s)
        try:
            async with limit:
                self._limits.add(limit)
                body = job.input if isinstance(job.input, bytes) else await run_in_thread(self._inputs.read, job.input)
                call = job.endpoint.container.call("POST", "/invocations", job.headers, body, job.timeout_s)
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


def read_job(exchange: AwsExchange, endpoint: AwsEndpoint, inputs: Inputs) -> AsyncJob:
    """Return the invocation that a request asks for. Raises AwsError."""
    values = exchange.values(ASYNC)
    id, folder = str(uuid.uuid4()), _folder(values.get("S3OutputPathExtension", ""))
    return AsyncJob(
        endpoint=endpoint,
        region=exchange.region,
        inference_id=values.get("InferenceId") or str(uuid.uuid4()),
        headers=exchange.headers_for_container(values),
        input=_input(exchange, inputs),
        output=folder + values.get("Filename", f"{id}.out"),
        failure=f"{folder}{id}-error.out",
        ttl_s=int(values.get("RequestTTLSeconds", TTL_S)),
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
        given = "both" if location else "neither"
        raise invalid(f"Exactly one of Body and InputLocation must be given, not {given}.")
    if len(exchange.payload) > MAX_INLINE_BYTES:
        raise too_large(MAX_INLINE_BYTES)
    if location and (len(location) > MAX_LOCATION_CHARS or not inputs.is_allowed(location)):
        where = "s3://BUCKET/KEY or a file:// URL below the folder of --async-input"
        raise invalid(f"InputLocation must be {where}, with at most {MAX_LOCATION_CHARS} characters, given {location}")
    return location or exchange.payload
