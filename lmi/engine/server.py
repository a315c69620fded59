"""The engine's side of the engine sockets, which runs the requests of all front ends on one
executor.

Requests arrive on the event loop of the worker. The thread that makes the Responses calls
`deliver`. If a front end breaks the protocol or stops reading, only its connection closes.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import msgspec

from lmi.engine import messages
from lmi.engine.queue import QueueEntry, RequestQueue, priority_class
from lmi.errors import EngineLost, LmiError, Overloaded
from lmi.executor import ErrorKind, Executor, Request, RequestPerfMetrics, Response, ResponseError
from lmi.ipc import Accepted, FrameTooLarge, ThreadSafeWriter, frame
from lmi.shared.state import MAX_LORA_NAMES_BYTES, EngineRecord, Phase
from lmi.types import WaitStatus

# A front end that leaves more unread loses its connection.
MAX_UNSENT_BYTES = 64 << 20

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False, kw_only=True)
class FrontEndEntry(QueueEntry):
    """A request of one connection."""

    connection: "FrontEndConnection"
    # The front end's.
    request_id: int
    request: Request
    # The executor's, once it has the request.
    engine_id: int | None = None
    has_left: bool = False

    def refuse(self, error: Exception) -> None:
        self.connection.send(messages.Refused(self.request_id, messages.refusal(error)))


class Dispatcher:
    """Has the queue, remembers the connection of each request, and writes the engine's record."""

    def __init__(
        self, executor: Executor, record: EngineRecord, queue: RequestQueue | None = None
    ) -> None:
        info = executor.info
        self.ready = messages.Ready(info)
        # Called when the folder of adapters has changed.
        self.look: Callable[[], None] = lambda: None
        # Whether the executor makes no step and does not hang.
        self.may_rest: Callable[[], bool] = lambda: False
        self.connections: set[FrontEndConnection] = set()
        self.is_closing = False

        self._executor = executor
        self._record = record
        self._phases = record.queue_time_s, record.prefill_time_s, record.decode_time_s
        self._step_length = record.step_length
        self._queue = queue or RequestQueue(info.max_num_sequences)
        # The end of the last step.
        self._stepped_s = 0.0
        # The requests that run, as the executor counted them last.
        self._num_active = 0
        # Guards the queue, `_entries`, those of each connection, and the record.
        self._lock = threading.Lock()
        # The requests that the executor has, by its ids.
        self._entries: dict[int, FrontEndEntry] = {}

        record.max_num_sequences = info.max_num_sequences
        record.max_loras = info.max_loras
        record.step_s = time.monotonic()

    @property
    def num_requests(self) -> int:
        """The number of requests whose last Response has not been delivered."""
        with self._lock:
            return len(self._entries) + self._queue.num_waiting

    def submit(self, connection: "FrontEndConnection", message: messages.Submit) -> None:
        now = time.monotonic()
        request = message.request
        origin = message.origin
        sampling = request.sampling_config
        entry = FrontEndEntry(
            client=origin.client,
            num_prompt_tokens=len(request.input_token_ids),
            max_tokens=request.max_tokens,
            num_sequences=max(sampling.beam_width, sampling.num_return_sequences),
            arrived_s=origin.arrived_s or now,
            received_s=origin.received_s,
            deadline_s=origin.deadline_s,
            priority=request.priority,
            is_streaming=request.streaming,
            is_further=origin.is_further,
            connection=connection,
            request_id=message.request_id,
            request=request,
        )
        try:
            if self.is_closing:
                # Another engine may get it.
                raise EngineLost("this engine is shutting down")

            with self._lock:
                self._queue.offer(entry, now)
                connection.entries[entry.request_id] = entry
                self._start(now)
        except LmiError as error:
            if isinstance(error, Overloaded):
                self._record.num_refused.add(priority_class(entry.priority))

            entry.refuse(error)

    def _start(self, now: float) -> None:
        """Give the executor the requests whose turn it is, and count all. Call it with the lock.

        An error of the executor ends only that request. The first Response may come before
        enqueue_request returns.
        """
        for entry in self._queue.start(now):
            assert isinstance(entry, FrontEndEntry)
            try:
                entry.engine_id = self._executor.enqueue_request(_for_executor(entry))
            except Exception as error:
                has_stopped = not self._executor.can_enqueue_requests()
                if not has_stopped and not isinstance(error, LmiError | ValueError):
                    log.exception("the engine did not take a request")

                self._end(entry, now)
                # After EngineLost another engine may get it.
                entry.refuse(EngineLost("this engine has stopped") if has_stopped else error)
                continue

            if not self._entries:
                # The idle time before does not count as a hang.
                self._record.step_s = now
                self._stepped_s = now

            self._entries[entry.engine_id] = entry

        self._count_requests()

    def status_of(self, entry: FrontEndEntry) -> WaitStatus:
        """Return how far a request without a token is."""
        with self._lock:
            # It may have ended a moment ago.
            if entry.request_id not in entry.connection.entries:
                return WaitStatus(entry.num_prompt_tokens)

            if entry.engine_id is None:
                return self._status_in_queue(entry)

            started_s = entry.started_s

        progress = self._executor.get_prompt_progress(entry.engine_id)
        if progress is None:
            return WaitStatus(entry.num_prompt_tokens, queue_position=0)

        num_computed = progress.num_computed_tokens
        num_cached = progress.num_cached_tokens
        num_left = max(0, entry.num_prompt_tokens - num_computed)
        wait_s = self._prompt_wait_s(num_left, num_computed - num_cached, started_s)
        return WaitStatus(entry.num_prompt_tokens, num_computed, num_cached, 0, wait_s)

    def _status_in_queue(self, entry: FrontEndEntry) -> WaitStatus:
        position = self._queue.ahead_of(entry).num_requests + 1
        start_s = self._queue.expected_wait_s(entry)
        prompt_s = self._queue.prompt_s(entry.num_prompt_tokens)
        wait_s = None if start_s is None or prompt_s is None else start_s + prompt_s
        return WaitStatus(entry.num_prompt_tokens, 0, 0, position, wait_s)

    def _prompt_wait_s(
        self, num_left: int, num_computed: int, started_s: float | None
    ) -> float | None:
        """Return how long the rest of a prompt takes at the speed of what was computed of it, else
        at the queue's.
        """
        if num_computed <= 0 or started_s is None:
            return self._queue.prompt_s(num_left)

        return num_left * (time.monotonic() - started_s) / num_computed

    def _end(
        self, entry: FrontEndEntry, now: float, *, has_left: bool = False, is_answered: bool = False
    ) -> None:
        entry.connection.entries.pop(entry.request_id, None)
        if entry.engine_id is not None:
            self._entries.pop(entry.engine_id, None)

        self._queue.remove(entry, now, has_left=has_left, is_answered=is_answered)

    def announce(self, outcomes: dict[str, messages.AdapterOutcome]) -> None:
        """Send Ready to every front end again, with what became of each adapter."""
        self.ready = messages.Ready(self._executor.info, outcomes)
        for connection in self.connections:
            connection.send(self.ready)

    def cancel(self, entry: FrontEndEntry, *, has_left: bool = False) -> None:
        """Forget a request that waits. One that runs ends with its last Response."""
        with self._lock:
            if entry.engine_id is None:
                if entry.request_id in entry.connection.entries:
                    self._end(entry, time.monotonic(), has_left=has_left)
                    self._count_requests()

                return

            entry.has_left = has_left

        self.abort(entry)

    def abort(self, entry: FrontEndEntry) -> None:
        """End a request that the executor has."""
        if entry.engine_id is not None:
            self._executor.cancel_request(entry.engine_id)

    def deliver(self, responses: list[Response]) -> None:
        """Send the Responses of one or more steps, one frame for each connection. Call it from one
        thread only.
        """
        outputs: dict[FrontEndConnection, list[Response]] = {}
        is_lost = False
        with self._lock:
            now = time.monotonic()
            # Before requests end, since the queue learns who was in these steps.
            self._note_steps(has_output=True)

            for response in responses:
                entry = self._entries.get(response.request_id)
                if entry is None:
                    continue

                response.request_id = entry.request_id
                result = response.result
                if result is not None and result.request_perf_metrics is not None:
                    self._note_times(entry, result.request_perf_metrics)

                if result is not None and result.prompt_token_ids is not None:
                    self._queue.note_prompt(entry, len(result.prompt_token_ids))

                if response.is_final:
                    error = response.error
                    if error is not None and error.kind is ErrorKind.ENGINE_LOST:
                        is_lost = True

                    is_answered = error is None and not entry.has_left
                    self._end(entry, now, has_left=entry.has_left, is_answered=is_answered)
                else:
                    if not entry.has_begun:
                        self._queue.note_token(entry, now)

                    if entry.num_open > 1 and result is not None and result.is_sequence_final:
                        self._queue.note_sequence_end(entry)

                outputs.setdefault(entry.connection, []).append(response)

            if is_lost and not self._executor.can_enqueue_requests():
                # `/ping` tells it before the first client hears of it.
                self._record.phase = Phase.DRAINING

            for connection, batch in outputs.items():
                connection.send_output(batch)

            self._start(now)

    def _note_times(self, entry: FrontEndEntry, times: RequestPerfMetrics) -> None:
        """Count the phases that a sequence which has ended went through, the wait in this queue
        too.
        """
        times.arrival_time = entry.queued_s
        moments = (
            times.arrival_time,
            times.first_scheduled_time,
            times.first_token_time,
            times.last_token_time,
        )
        for phase, (since_s, until_s) in zip(self._phases, pairwise(moments), strict=True):
            if since_s is not None and until_s is not None:
                phase.observe(until_s - since_s)

    def observe(self) -> None:
        """Bring the record up to date with the executor's steps, and refuse who has waited too
        long.
        """
        record = self._record
        with self._lock:
            self._note_steps(has_output=False)
            now = time.monotonic()
            for entry, error in self._queue.expired(now):
                assert isinstance(entry, FrontEndEntry)
                entry.connection.entries.pop(entry.request_id, None)
                entry.refuse(error)
                record.num_refused.add(priority_class(entry.priority))

            num_queued, num_taken = self._queue.num_by_class()
            record.num_queued.set(num_queued)
            record.num_taken.set(num_taken)
            record.num_clients = self._queue.num_busy_clients
            record.wait_error_s = self._queue.wait_error_s
            if record.max_loras:
                self._note_adapters()

            self._start(now)

    def _note_adapters(self) -> None:
        """Write which adapters run and wait. Call it with the lock.

        A batch has `max_loras` of them: those beyond wait in the engine, which starts the oldest
        first.
        """
        begun = [entry for entry in self._entries.values() if entry.has_begun]
        adapters = list(dict.fromkeys(adapters_of_entries([*begun, *self._entries.values()])))
        num_running = self._record.max_loras
        running = adapters[:num_running]
        beyond = adapters[num_running:]

        entries = [
            entry for connection in self.connections for entry in connection.entries.values()
        ]
        queued = adapters_of_entries(entry for entry in entries if entry.engine_id is None)
        waiting = dict.fromkeys([*beyond, *queued])

        self._record.running_loras = listed(running)
        self._record.waiting_loras = listed(waiting)

    def _note_steps(self, *, has_output: bool) -> None:
        """Write the executor's steps since the last look into the record. A batch of Responses
        counts as a step even if the executor reports none.
        """
        record = self._record
        steps = self._executor.get_latest_iteration_stats()
        if steps or has_output:
            record.step += len(steps) or 1

        if steps or has_output or self.may_rest() or self._executor.is_waiting_for_guides:
            record.step_s = time.monotonic()

        for step in steps:
            seconds = step.timestamp - self._stepped_s
            self._stepped_s = step.timestamp
            num_context_tokens = step.num_context_tokens
            num_generation_tokens = step.num_generation_tokens
            record.num_preemptions += step.num_preemptions
            record.num_context_tokens += num_context_tokens
            record.num_generation_tokens += num_generation_tokens
            self._queue.note_step(max(0.0, seconds), num_context_tokens, num_generation_tokens)
            self._step_length.observe(num_context_tokens + num_generation_tokens)

            drafts = step.spec_decoding_stats
            if drafts is not None:
                record.num_drafts += drafts.num_requests_with_draft_tokens
                record.num_draft_tokens += drafts.num_draft_tokens
                record.num_accepted_tokens += drafts.num_accepted_tokens

        if steps:
            self._num_active = steps[-1].num_active_requests
            cache = steps[-1].kv_cache_stats
            record.num_used_blocks = cache.used_num_blocks
            record.max_num_blocks = cache.max_num_blocks
            record.tokens_per_block = cache.tokens_per_block

    def _count_requests(self) -> None:
        """Write the running and waiting requests, which together are all that have not ended."""
        num_running = min(self._num_active, len(self._entries))
        self._num_active = num_running
        self._record.num_running = num_running
        self._record.num_waiting = len(self._entries) + self._queue.num_waiting - num_running


def _for_executor(entry: FrontEndEntry) -> Request:
    """Return its request, with whose it is where clients share places or threads."""
    request = entry.request
    has_turns = request.guided_decoding_params is not None or request.images
    if not (entry.is_express or has_turns):
        return request

    return msgspec.structs.replace(
        request, is_express=entry.is_express, client_id=hash(entry.client)
    )


def adapters_of_entries(entries: Iterable[FrontEndEntry]) -> Iterator[str]:
    """Yield the name of the adapter of each request that has one."""
    for entry in entries:
        if entry.request.lora_config is not None:
            yield entry.request.lora_config.name


def listed(names: Iterable[str]) -> str:
    """Return sorted names with commas between, as many whole ones as fit into the
    engine's record.
    """
    text = ",".join(sorted(names))
    if len(text.encode()) < MAX_LORA_NAMES_BYTES:
        return text

    whole_names = text.encode()[:MAX_LORA_NAMES_BYTES].rpartition(b",")[0]
    return whole_names.decode()


class FrontEndConnection(Accepted):
    """The socket of one front end, whose requests end when it closes."""

    other_end = "a front end"

    def __init__(self, dispatcher: Dispatcher) -> None:
        super().__init__()
        # Those that have not ended, by the front end's ids.
        self.entries: dict[int, FrontEndEntry] = {}
        self._dispatcher = dispatcher
        self._writer: ThreadSafeWriter | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        socket = cast(asyncio.Transport, transport)
        if socket.is_closing():
            return

        self._writer = ThreadSafeWriter(socket, MAX_UNSENT_BYTES)
        self._dispatcher.connections.add(self)
        self.send(self._dispatcher.ready)

    def resume_writing(self) -> None:
        if self._writer is not None:
            self._writer.resume()

    def take(self, payload: bytes) -> None:
        if payload == messages.LOOK:
            # The folder of adapters has changed.
            self._dispatcher.look()
            return

        message = messages.decode_to_engine(payload)
        if isinstance(message, messages.Submit):
            if message.request_id in self.entries:
                raise msgspec.ValidationError(f"request id {message.request_id} is in use")

            self._dispatcher.submit(self, message)
            return

        entry = self.entries.get(message.request_id)
        if entry is None:
            return

        if isinstance(message, messages.AskStatus):
            status = self._dispatcher.status_of(entry)
            self.send(messages.RequestStatus(message.request_id, status))
        else:
            self._dispatcher.cancel(entry, has_left=message.has_left)

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self._dispatcher.connections.discard(self)
        if self._writer is not None:
            self._writer.close()

        for entry in list(self.entries.values()):
            self._dispatcher.cancel(entry)

    def send_output(self, responses: list[Response]) -> None:
        """Send one frame, or several where one would be too large. One Response that is too large
        becomes an error.
        """
        try:
            self.send(messages.Responses(responses))
        except FrameTooLarge as error:
            if len(responses) > 1:
                middle = len(responses) // 2
                self.send_output(responses[:middle])
                self.send_output(responses[middle:])
                return

            [response] = responses
            entry = self.entries.get(response.request_id)
            if entry is not None:
                self._dispatcher.abort(entry)

            too_large = ResponseError(
                f"the Response is too large for the socket: {error}", ErrorKind.GENERATION
            )
            failure = Response(response.request_id, error=too_large, client_id=response.client_id)
            self.send(messages.Responses([failure]))

    def send(self, message: messages.ToFrontEnd) -> None:
        """Send a message from any thread. A front end that has stopped reading loses its
        connection.
        """
        if self._writer is not None:
            self._writer.write(frame(messages.encode(message)))
