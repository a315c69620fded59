"""The engine's side of the engine sockets, which runs the requests of all front ends on one executor.

A `Dispatcher` passes each request of a connection to the executor, and sends each batch of Responses back in one frame
for each connection. If a front end breaks the protocol or stops reading, only its connection closes. A connection that
closes cancels its requests. Requests arrive on the event loop of the worker. The thread that makes the Responses calls
`deliver`, or `Worker._pump` where an executor keeps them.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable
from typing import cast

import msgspec

from lmi.engine.messages import (
    LOOK,
    AdapterOutcome,
    Ready,
    Refused,
    Responses,
    Submit,
    ToFrontEnd,
    decode_to_engine,
    encode,
    refusal,
)
from lmi.errors import LmiError, Unavailable
from lmi.executor import ErrorKind, Executor, Response, ResponseError
from lmi.ipc.frames import FrameTooLarge, frame
from lmi.ipc.listener import Accepted
from lmi.ipc.writer import ThreadSafeWriter
from lmi.shared.state import EngineRecord

MAX_UNSENT_BYTES = 64 << 20  # a front end that leaves more unread loses its connection

log = logging.getLogger(__name__)


class Dispatcher:
    """Remembers the connection of each request, and writes the engine's record."""

    def __init__(
        self,
        executor: Executor,
        record: EngineRecord,
        adapter_timeout_s: float = math.inf,
    ) -> None:
        """While an adapter loads, the record counts as in motion, at most for `adapter_timeout_s`."""
        self.ready = Ready(executor.info)
        self.look: Callable[[], None] = lambda: None  # called when the folder of adapters has changed
        self.connections: set[FrontEndConnection] = set()
        self.is_closing = False
        self._executor = executor
        self._record = record
        self._adapter_timeout_s = adapter_timeout_s
        self._adapter_s: float | None = None  # time.monotonic() of the first look at the load that goes on now
        self._lock = threading.Lock()  # guards `_owners`, each connection's ids and the record
        self._owners: dict[int, tuple[FrontEndConnection, int]] = {}  # the executor's id -> connection and its id
        record.max_num_sequences = executor.info.max_num_sequences
        record.step_s = time.monotonic()

    @property
    def num_requests(self) -> int:
        """The number of requests whose last Response has not been delivered."""
        with self._lock:
            return len(self._owners)

    def submit(self, connection: FrontEndConnection, message: Submit) -> None:
        try:
            if self.is_closing:
                raise Unavailable("this engine is shutting down")
            with self._lock:  # the first Response may come before enqueue_request returns
                engine_id = self._executor.enqueue_request(message.request)
                if not self._owners:
                    self._record.step_s = time.monotonic()  # the idle time before does not count as a hang
                self._owners[engine_id] = connection, message.request_id
                connection.engine_ids[message.request_id] = engine_id
                self._count()
        except Exception as error:  # an error of the engine too ends only this request
            if not isinstance(error, LmiError | ValueError | RuntimeError):
                log.exception("the engine did not take a request")
            connection.send(Refused(message.request_id, refusal(error)))

    def announce(self, outcomes: dict[str, AdapterOutcome]) -> None:
        """Send Ready to every front end again, with what became of each adapter."""
        self.ready = Ready(self._executor.info, outcomes)
        for connection in self.connections:
            connection.send(self.ready)

    def cancel(self, engine_id: int) -> None:
        self._executor.cancel_request(engine_id)

    def deliver(self, responses: list[Response]) -> None:
        """Send the Responses of one or more steps, one frame for each connection. Call it from one thread only."""
        with self._lock:
            for connection, batch in self._by_connection(responses).items():
                connection.send_output(batch)
            self._observe(has_output=True)

    def _by_connection(self, responses: list[Response]) -> dict[FrontEndConnection, list[Response]]:
        outputs: dict[FrontEndConnection, list[Response]] = {}
        for response in responses:
            engine_id = response.request_id
            owner = self._owners.get(engine_id)
            if owner is None:
                continue
            connection, response.request_id = owner
            if response.is_final:
                del self._owners[engine_id]
                connection.engine_ids.pop(response.request_id, None)
            outputs.setdefault(connection, []).append(response)
        return outputs

    def observe(self) -> None:
        """Bring the record up to date with the executor's steps."""
        with self._lock:
            self._observe(has_output=False)

    def _observe(self, *, has_output: bool) -> None:
        """Update the record. A batch of Responses counts as a step even if the executor reports none."""
        record, steps = self._record, self._executor.get_latest_iteration_stats()
        if steps:
            record.step += len(steps)
            record.step_s = time.monotonic()
            record.num_preemptions += sum(step.num_preemptions for step in steps)
            record.num_used_blocks = steps[-1].kv_cache_stats.used_num_blocks
            record.max_num_blocks = steps[-1].kv_cache_stats.max_num_blocks
        elif has_output:
            record.step += 1
            record.step_s = time.monotonic()
        elif self._is_loading_adapter() or self._executor.is_waiting_for_guides:
            record.step_s = time.monotonic()
        self._count(steps[-1].num_active_requests if steps else None)

    def _is_loading_adapter(self) -> bool:
        """Whether the requests wait for an adapter. A load that takes too long no longer counts, and then they hang."""
        if not self._executor.is_loading_adapter:
            self._adapter_s = None
            return False
        now = time.monotonic()
        if self._adapter_s is None:
            self._adapter_s = now
        return now - self._adapter_s < self._adapter_timeout_s

    def _count(self, num_active: int | None = None) -> None:
        """Write the running and waiting requests, which together are all that have not ended.

        `num_active` is the executor's count of running requests; None keeps the last count.
        """
        active = self._record.num_running if num_active is None else num_active
        self._record.num_running = min(active, len(self._owners))
        self._record.num_waiting = len(self._owners) - self._record.num_running


class FrontEndConnection(Accepted):
    """The socket of one front end, whose requests end when it closes."""

    other_end = "a front end"

    def __init__(self, dispatcher: Dispatcher) -> None:
        super().__init__()
        self.engine_ids: dict[int, int] = {}  # the front end's id -> the executor's
        self._dispatcher = dispatcher
        self._writer: ThreadSafeWriter | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if not cast(asyncio.Transport, transport).is_closing():
            self._writer = ThreadSafeWriter(cast(asyncio.Transport, transport), MAX_UNSENT_BYTES)
            self._dispatcher.connections.add(self)
            self.send(self._dispatcher.ready)

    def resume_writing(self) -> None:
        if self._writer is not None:
            self._writer.resume()

    def take(self, payload: bytes) -> None:
        if payload == LOOK:
            self._dispatcher.look()
            return
        message = decode_to_engine(payload)
        if isinstance(message, Submit):
            if message.request_id in self.engine_ids:
                raise msgspec.ValidationError(f"request id {message.request_id} is in use")
            self._dispatcher.submit(self, message)
        elif (engine_id := self.engine_ids.get(message.request_id)) is not None:
            self._dispatcher.cancel(engine_id)

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self._dispatcher.connections.discard(self)
        if self._writer is not None:
            self._writer.close()
        for engine_id in list(self.engine_ids.values()):
            self._dispatcher.cancel(engine_id)

    def send_output(self, responses: list[Response]) -> None:
        """Send one frame, or several where one would be too large. One Response that is too large becomes an error."""
        try:
            self.send(Responses(responses))
        except FrameTooLarge as error:
            if len(responses) > 1:
                middle = len(responses) // 2
                self.send_output(responses[:middle])
                self.send_output(responses[middle:])
                return
            [response] = responses
            if (engine_id := self.engine_ids.get(response.request_id)) is not None:
                self._dispatcher.cancel(engine_id)
            told = ResponseError(f"the Response is too large for the socket: {error}", ErrorKind.GENERATION)
            self.send(Responses([Response(response.request_id, error=told, client_id=response.client_id)]))

    def send(self, message: ToFrontEnd) -> None:
        """Send a message from any thread. A front end that has stopped reading loses its connection."""
        if self._writer is not None:
            self._writer.write(frame(encode(message)))
