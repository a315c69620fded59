"""Async invocations: accepted at once, run by a few workers, answered by a file.

    accept ──▶ queue of 1000 ──▶ worker: read the input, invoke the container ──▶ output file or failure file

Each accepted invocation leaves exactly one of its two files, also when the gateway stops. An answer fails here for what
it fails for in production: no Content-Length, or headers over 4096 bytes.
"""

from __future__ import annotations

import asyncio
import logging

from lmi.gateway.async_job import File, Job, read_job
from lmi.gateway.container import ContainerFault, OutOfTime
from lmi.gateway.endpoints import Endpoint
from lmi.gateway.errors import TIMED_OUT, AwsError, unavailable
from lmi.gateway.gateway import Accepted, Request
from lmi.gateway.stores import Inputs, Output, StoreError
from lmi.gateway.threads import run_in_thread

MAX_WAITING = 1000
STOPPED = "The gateway was stopped before the invocation was complete."
EXPIRED = "The request waited in the queue for longer than RequestTTLSeconds."

log = logging.getLogger(__name__)


class AsyncInvocations:
    """The queue and its workers. `max_running` invocations run at a time."""

    def __init__(self, inputs: Inputs, output: Output, max_running: int = 4) -> None:
        self._inputs, self._output = inputs, output
        self._max_running = max_running
        self._queue: asyncio.Queue[Job] = asyncio.Queue(MAX_WAITING)
        self._workers: list[asyncio.Task[None]] = []
        self._answering: set[asyncio.Task[File]] = set()
        self._is_stopping = False

    def accept(self, request: Request, endpoint: Endpoint) -> Accepted:
        """Put an invocation into the queue. Raises AwsError for a wrong one, or if the queue is full."""
        job = read_job(request, endpoint, self._inputs)
        self.add(job)
        return Accepted(job.inference_id, self._output.url(job.output), self._output.url(job.failure))

    def add(self, job: Job) -> None:
        if self._is_stopping:
            raise unavailable("The gateway stops.")
        try:
            self._queue.put_nowait(job)
        except asyncio.QueueFull:
            waiting = f"{self._queue.maxsize} async invocations wait already, which is the limit."
            raise AwsError("ThrottlingException", 429, waiting) from None

    async def start(self) -> None:
        self._workers = [asyncio.create_task(self._work()) for _ in range(self._max_running)]

    async def close(self) -> None:
        """Stop all invocations, and return when each has its failure file."""
        self._is_stopping = True
        for task in self._answering:
            task.cancel()
        await self._queue.join()
        for worker in self._workers:
            worker.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)

    async def _work(self) -> None:
        while True:
            job = await self._queue.get()
            await self._leave(job, await self._run(job))
            self._queue.task_done()

    async def _run(self, job: Job) -> File:
        """Return what becomes of an invocation."""
        answering = asyncio.create_task(self._answer(job))
        self._answering.add(answering)
        try:
            return await answering
        except AwsError as error:
            return self._failed(job, error)
        except asyncio.CancelledError:  # by `close`, which cancels no worker before this
            return self._failed(job, job.error(STOPPED))
        except Exception as error:
            log.exception("async invocation %s", job.inference_id)
            return self._failed(job, job.error(f"The gateway failed: {error}"))
        finally:
            self._answering.discard(answering)

    def _failed(self, job: Job, error: AwsError) -> File:
        log.warning("async invocation %s failed: %s", job.inference_id, error)
        return job.failed(error)

    async def _answer(self, job: Job) -> File:
        """Return the container's answer as a file. Raises AwsError."""
        if self._is_stopping:
            raise job.error(STOPPED)
        if job.is_expired:
            raise job.error(EXPIRED)
        try:
            async with asyncio.timeout(job.timeout_s):
                return await self._invoke(job)
        except (TimeoutError, OutOfTime):
            raise job.error(TIMED_OUT) from None
        except (ContainerFault, StoreError) as error:
            raise job.error(str(error)) from error

    async def _invoke(self, job: Job) -> File:
        body = job.input if isinstance(job.input, bytes) else await run_in_thread(self._inputs.read, job.input)
        call = job.endpoint.container.call("POST", "/invocations", job.headers, body, job.timeout_s)
        async with call as answer:
            return job.succeeded(answer, await answer.read())

    async def _leave(self, job: Job, file: File) -> None:
        """Write the file. If the output cannot be written, the failure file says so."""
        try:
            await run_in_thread(self._output.write, *file)
        except StoreError as error:
            if file.path == job.failure:
                log.error("async invocation %s has no file: %s", job.inference_id, error)
            else:
                await self._leave(job, self._failed(job, job.error(str(error))))
