"""Async invocations: accepted at once, run a few at a time, answered by a file.

Each accepted invocation leaves exactly one file, an output or a failure, also when the gateway
stops. An answer fails here for what it fails for in production: no Content-Length, or headers over
4096 bytes. Inputs and files (`stores.py`) are read and written in threads.
"""

import asyncio
import logging
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import orjson

from lmi.gateway.container import ContainerFault, ContainerResponse, OutOfTime
from lmi.gateway.endpoints import TIMED_OUT, AwsEndpoint
from lmi.gateway.errors import AwsError, invalid, model_error, too_large, unavailable
from lmi.gateway.exchange import AwsExchange
from lmi.gateway.members import PREFIX
from lmi.gateway.stores import S3_SCHEME, FolderOutput, Inputs, S3Output, StoreError
from lmi.gateway.threads import run_in_thread
from lmi.http.exchange import MAX_HEADER_BYTES, Header, num_bytes

INPUT_LOCATION = PREFIX + "InputLocation"
MAX_INLINE_BYTES = 128_000
MAX_LOCATION_CHARS = 1024
# Of a path, the limit of most file systems.
MAX_PART_CHARS = 255
MAX_WAITING = 1000
# These are AWS's defaults.
TTL_S = 21_600
TIMEOUT_S = 900
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

                with job.endpoint.container.lease() as container:
                    call = container.call("POST", "/invocations", job.headers, body, job.timeout_s)
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
