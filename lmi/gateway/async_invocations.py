"""Async invocations: accepted at once, run a few at a time, answered by a file or an object.

What is accepted is kept in the queue (`async_queue.py`) before its client hears of it, and leaves
exactly one answer: an output or a failure. Where the queue is on a disk, another gateway goes on
with what this one leaves; else each invocation fails when the gateway stops. An answer fails here
for what it fails for in production: no Content-Length, or headers over 4096 bytes. Files
(`stores.py`) are read and written in threads.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec

from lmi.gateway.async_job import AsyncJob
from lmi.gateway.async_queue import AsyncQueue
from lmi.gateway.async_request import read_job
from lmi.gateway.aws_endpoint import TIMED_OUT, AwsEndpoint, EndpointTable
from lmi.gateway.container import ContainerFault, OutOfTime, Unreachable
from lmi.gateway.errors import AwsError, invalid, unavailable
from lmi.gateway.exchange import AwsExchange
from lmi.gateway.routing_target import RoutingTarget, in_order, is_refusal
from lmi.gateway.stores import Answers, Inputs, StoreError
from lmi.gateway.threads import run_in_thread

MAX_WAITING = 1000
# Answers in memory that wait for a disk or a bucket. With more of them invocations wait too.
MAX_UNWRITTEN = 32
# Between two tries to write an answer.
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
STOPPED = "The gateway was stopped before the invocation was complete."
EXPIRED = "The request waited in the queue for longer than RequestTTLSeconds."

log = logging.getLogger(__name__)


class AsyncInvocations:
    """A task for each invocation. `max_running` of them run at a time.

    One that has its answer runs no more: a bucket that is down keeps nobody from the containers.
    """

    def __init__(
        self,
        endpoints: EndpointTable,
        inputs: Inputs,
        answers: Answers,
        queue: AsyncQueue,
        max_running: int,
    ) -> None:
        self._endpoints = endpoints
        self._inputs = inputs
        self._answers = answers
        self._queue = queue
        self._places = asyncio.Semaphore(max_running)
        self._unwritten = asyncio.Semaphore(MAX_UNWRITTEN)
        self._num_waiting = 0
        self._tasks: set[asyncio.Task[None]] = set()
        # Of what ends when the gateway stops.
        self._limits: set[asyncio.Timeout] = set()
        self._stopping = asyncio.Event()

    async def start(self) -> None:
        """Go on with what a former gateway has left."""
        jobs = await run_in_thread(self._queue.load)
        for job in jobs:
            self._num_waiting += 1
            self._begin(self._resume(job))

        if jobs:
            log.info("%d async invocations of a former gateway go on", len(jobs))

    async def accept(self, exchange: AwsExchange, endpoint: AwsEndpoint) -> AsyncJob:
        """Begin and return the invocation that a request asks for. Raises AwsError."""
        values = exchange.values("InvokeEndpointAsync")
        job = read_job(exchange, values, endpoint.answers, self._inputs, self._answers)
        headers = exchange.headers_for_container(values, endpoint.name)
        job = msgspec.structs.replace(job, endpoint=endpoint.name, headers=headers)
        await self.add(job)
        return job

    async def accept_routed(self, exchange: AwsExchange, target: RoutingTarget) -> AsyncJob:
        """Begin and return the invocation of an inference router. Raises AwsError."""
        if target.answers is None:
            raise invalid(f"Routing target {target.name} is not configured for async inference.")

        if exchange.payload:
            raise invalid("InvokeInferenceRouterAsync takes InputLocation and no body.")

        values = exchange.values("InvokeInferenceRouterAsync")
        job = read_job(exchange, values, target.answers, self._inputs, self._answers)
        arns = [destination.arn for destination in target.destinations]
        job = msgspec.structs.replace(job, region=target.region, destinations=arns)
        await self.add(job)
        return job

    async def add(self, job: AsyncJob) -> None:
        """Keep an invocation and begin it. Raises AwsError if too many wait or it cannot be
        kept.
        """
        if self._stopping.is_set():
            raise unavailable("The gateway stops.")

        if self._num_waiting >= MAX_WAITING:
            waiting = f"{MAX_WAITING} async invocations wait already, which is the limit."
            raise AwsError("ThrottlingException", 429, waiting)

        self._num_waiting += 1
        # What is kept begins, also where its client leaves now.
        await asyncio.shield(self._begin(self._keep(job)))

    async def close(self) -> None:
        """Stop all invocations, and return when each has its answer or stays in the queue."""
        self._stopping.set()
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(0.0)

        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _keep(self, job: AsyncJob) -> None:
        try:
            await run_in_thread(self._queue.keep, job)
        except StoreError as error:
            self._num_waiting -= 1
            log.error("async invocation %s is refused: %s", job.inference_id, error)
            raise unavailable(f"The invocation cannot be kept: {error.cause}.") from None

        self._begin(self._run(job))

    async def _resume(self, job: AsyncJob) -> None:
        """Run what a former gateway has accepted, once its endpoint is back."""
        if job.answer is None:
            with suppress(TimeoutError):
                async with self._limited(job.expires_s - time.time()):
                    for name in self._endpoint_names(job):
                        await self._endpoints.wait_until_back(name)

        await self._run(job)

    async def _run(self, job: AsyncJob) -> None:
        async with self._places:
            self._num_waiting -= 1
            ended = await self._ended(job)
            if ended is None:
                return

            await self._unwritten.acquire()

        try:
            await self._leave(ended)
        finally:
            self._unwritten.release()

    async def _ended(self, job: AsyncJob) -> AsyncJob | None:
        """Return the job with its answer, or None if it stays for the next gateway."""
        if job.answer is not None:
            return job

        try:
            return await self._answered(job)
        except AwsError as error:
            if self._stopping.is_set() and self._queue.outlives_gateway:
                return None

            return _failed(job, error)
        except Exception as error:
            log.exception("async invocation %s", job.inference_id)
            return _failed(job, job.error(f"The gateway failed: {error}"))

    async def _answered(self, job: AsyncJob) -> AsyncJob:
        """Return the job with the answer of a container. Raises AwsError."""
        if self._stopping.is_set():
            raise job.error(STOPPED)

        if time.time() > job.expires_s:
            raise job.error(EXPIRED)

        try:
            async with self._limited(job.timeout_s):
                body = job.body
                if job.location:
                    body = await run_in_thread(self._inputs.read, job.location)

                if job.destinations:
                    return await self._routed(job, body)

                return await self._asked(job, body)
        except (TimeoutError, OutOfTime):
            raise job.error(STOPPED if self._stopping.is_set() else TIMED_OUT) from None
        except (ContainerFault, StoreError) as error:
            raise job.error(str(error)) from error

    async def _asked(self, job: AsyncJob, body: bytes) -> AsyncJob:
        """Return the job with the answer of its endpoint. Raises AwsError or ContainerFault."""
        container = self._endpoints.find(job.endpoint, {}).container
        with container.lease() as leased:
            call = leased.call("POST", "/invocations", job.headers, body, job.timeout_s)
            async with call as response:
                return job.succeeded(response, await response.read())

    async def _routed(self, job: AsyncJob, body: bytes) -> AsyncJob:
        """Return the job with the answer of the first destination of its router that takes it.
        Raises AwsError or ContainerFault.
        """
        refusal = job.error("No destination of the inference router could take the request.")
        for destination in in_order(self._endpoints.destinations(job.destinations, job.region)):
            try:
                return await self._asked(job.sent_to(destination.endpoint), body)
            except Unreachable as fault:
                refusal = job.error(str(fault))
            except AwsError as error:
                if not is_refusal(error):
                    raise

                refusal = error

            log.warning("async invocation %s is moved: %s", job.inference_id, refusal)

        raise refusal

    def _endpoint_names(self, job: AsyncJob) -> list[str]:
        """Return the endpoints that a job may be answered by."""
        if not job.destinations:
            return [job.endpoint]

        destinations = self._endpoints.destinations(job.destinations, job.region)
        return [destination.endpoint for destination in destinations]

    async def _leave(self, job: AsyncJob) -> None:
        """Write the answer. A disk without room is waited for. If the output cannot be written at
        all, the failure says so.
        """
        assert job.answer is not None
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                await run_in_thread(self._write, job)
                return
            except StoreError as error:
                if error.may_pass and not self._stopping.is_set():
                    log.warning("async invocation %s waits: %s", job.inference_id, error)
                    await self._pause(pause_s)
                    pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                    continue

                if error.may_pass and self._queue.outlives_gateway:
                    return

                # It stays in the queue: the next gateway may find its place mended.
                if job.answer.url == job.failure:
                    log.error("async invocation %s has no file: %s", job.inference_id, error)
                    return

                job = _failed(job, job.error(str(error)))

    def _write(self, job: AsyncJob) -> None:
        """Write the answer of a job, which is kept until then. Raises StoreError."""
        answer = job.answer
        assert answer is not None
        # A gateway that is killed from here on has written this answer or writes it later, and no
        # other.
        self._queue.keep(job)
        self._answers.write(answer.url, answer.data, answer.media_type)
        self._queue.forget(job)

    async def _pause(self, pause_s: float) -> None:
        """Return after so many seconds, or when the gateway stops."""
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._stopping.wait()

    @asynccontextmanager
    async def _limited(self, time_s: float) -> AsyncIterator[None]:
        """Raise TimeoutError in the block after so many seconds, or when the gateway stops."""
        limit = asyncio.timeout(0.0 if self._stopping.is_set() else time_s)
        async with limit:
            self._limits.add(limit)
            try:
                yield
            finally:
                self._limits.discard(limit)


def _failed(job: AsyncJob, error: AwsError) -> AsyncJob:
    log.warning("async invocation %s failed: %s", job.inference_id, error)
    return job.failed(error)
