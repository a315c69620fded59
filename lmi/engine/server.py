"""The engine's side of the engine sockets: it runs the requests of all front ends on one executor.

Requests arrive on the event loop of the engine's process, and a thread of the executor passes the
Responses to `Dispatcher.deliver`. If a front end breaks the protocol or stops reading, only its
connection closes.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import cast

import msgspec

from lmi.engine import messages
from lmi.engine.queue import QueueEntry, RequestQueue, priority_class
from lmi.errors import EngineLost, LmiError, Overloaded
from lmi.executor import (
    ErrorKind,
    Executor,
    IterationStats,
    Request,
    RequestPerfMetrics,
    Response,
    ResponseError,
)
from lmi.ipc import Accepted, FrameTooLarge, ThreadSafeWriter, frame
from lmi.shared.state import MAX_LORA_NAMES_BYTES, EngineRecord, Phase
from lmi.types import WaitStatus

# A front end that leaves more unread loses its connection.
MAX_UNSENT_BYTES = 64 << 20

log = logging.getLogger(__name__)


class FrontEndEntry(QueueEntry, eq=False, kw_only=True):
    """A request of one front end, which waits in the queue or runs."""

    connection: "FrontEndConnection"
    # Its number at the front end.
    request_id: int
    request: Request
    # Its number at the executor, once that has it.
    engine_id: int | None = None
    # Whether its client has left.
    has_left: bool = False

    def refuse(self, error: Exception) -> None:
        """Tell the front end why the request is not run."""
        self.connection.send(messages.Refused(self.request_id, messages.refusal(error)))


class Dispatcher:
    """Takes requests from connections to the queue and the executor, sends the Responses back, and
    writes the engine's record.
    """

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
        # When the last step ended.
        self._stepped_s = 0.0
        # How many requests run, as the executor counted them last.
        self._num_active = 0
        # It guards the queue, the record, and the requests here and at each connection.
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
        """Let a request wait or run. If it is refused, its front end is told."""
        now = time.monotonic()
        entry = _entry_of(connection, message, now)
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

        If the executor does not take a request, only that one ends. The lock is needed although
        `enqueue_request` is called: the first Response may come before it returns.
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
        """Return how far a request is that has no token yet."""
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
        return WaitStatus(
            entry.num_prompt_tokens,
            num_computed,
            num_cached,
            queue_position=0,
            wait_s=self._prompt_wait_s(num_left, num_computed - num_cached, started_s),
        )

    def _status_in_queue(self, entry: FrontEndEntry) -> WaitStatus:
        position = self._queue.ahead_of(entry).num_requests + 1
        start_s = self._queue.expected_wait_s(entry)
        prompt_s = self._queue.prompt_s(entry.num_prompt_tokens)
        wait_s = None
        if start_s is not None and prompt_s is not None:
            wait_s = start_s + prompt_s

        return WaitStatus(entry.num_prompt_tokens, 0, 0, queue_position=position, wait_s=wait_s)

    def _prompt_wait_s(
        self, num_left: int, num_computed: int, started_s: float | None
    ) -> float | None:
        """Return how long the rest of a prompt takes, at the speed at which its beginning was
        computed. If nothing was, at the speed that the queue has learned.
        """
        if num_computed <= 0 or started_s is None:
            return self._queue.prompt_s(num_left)

        return num_left * (time.monotonic() - started_s) / num_computed

    def _end(
        self, entry: FrontEndEntry, now: float, *, has_left: bool = False, is_answered: bool = False
    ) -> None:
        """Forget a request, and free its place. Call it with the lock."""
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
                # Without an entry, the request has ended already.
                if entry is None:
                    continue

                response.request_id = entry.request_id
                outputs.setdefault(entry.connection, []).append(response)
                self._note_response(entry, response, now)
                if response.error is not None and response.error.kind is ErrorKind.ENGINE_LOST:
                    is_lost = True

            if is_lost and not self._executor.can_enqueue_requests():
                # `/ping` says so before the first client sees the error.
                self._record.phase = Phase.DRAINING

            for connection, batch in outputs.items():
                connection.send_output(batch)

            self._start(now)

    def _note_response(self, entry: FrontEndEntry, response: Response, now: float) -> None:
        """Let the queue and the record know what a Response means for its request. Call it with the
        lock.
        """
        result = response.result
        if result is not None and result.request_perf_metrics is not None:
            self._note_times(entry, result.request_perf_metrics)

        if result is not None and result.prompt_token_ids is not None:
            self._queue.note_prompt(entry, len(result.prompt_token_ids))

        if response.is_final:
            is_answered = response.error is None and not entry.has_left
            self._end(entry, now, has_left=entry.has_left, is_answered=is_answered)
            return

        if not entry.has_begun:
            self._queue.note_token(entry, now)

        if entry.num_open > 1 and result is not None and result.is_sequence_final:
            self._queue.note_sequence_end(entry)

    def _note_times(self, entry: FrontEndEntry, times: RequestPerfMetrics) -> None:
        """Count the times of a sequence that has ended: it waited in this queue and in the
        executor's, was prefilled, and was decoded.
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

        A batch has at most `max_loras` of them. The engine starts the oldest requests first, so
        those that have begun come before all others, and what is beyond the limit waits.
        """
        entries = self._entries.values()
        begun = [entry for entry in entries if entry.has_begun]
        oldest_first = [*begun, *entries]
        adapters = list(dict.fromkeys(adapters_of_entries(oldest_first)))
        num_running = self._record.max_loras

        queued: list[FrontEndEntry] = []
        for connection in self.connections:
            queued += [entry for entry in connection.entries.values() if entry.engine_id is None]

        beyond_limit = adapters[num_running:]
        waiting = dict.fromkeys([*beyond_limit, *adapters_of_entries(queued)])
        self._record.running_loras = listed(adapters[:num_running])
        self._record.waiting_loras = listed(waiting)

    def _note_steps(self, *, has_output: bool) -> None:
        """Write the executor's steps since the last call into the record. A batch of Responses
        counts as a step even if the executor reports none.
        """
        record = self._record
        steps = self._executor.get_latest_iteration_stats()
        has_stepped = bool(steps) or has_output
        if has_stepped:
            record.step += len(steps) or 1

        if has_stepped or self.may_rest() or self._executor.is_waiting_for_guides:
            record.step_s = time.monotonic()

        for step in steps:
            self._note_step(step)

        if steps:
            self._num_active = steps[-1].num_active_requests
            cache = steps[-1].kv_cache_stats
            record.num_used_blocks = cache.used_num_blocks
            record.max_num_blocks = cache.max_num_blocks
            record.tokens_per_block = cache.tokens_per_block

    def _note_step(self, step: IterationStats) -> None:
        duration_s = step.timestamp - self._stepped_s
        self._stepped_s = step.timestamp
        num_context_tokens = step.num_context_tokens
        num_generation_tokens = step.num_generation_tokens
        self._queue.note_step(max(0.0, duration_s), num_context_tokens, num_generation_tokens)
        self._step_length.observe(num_context_tokens + num_generation_tokens)

        record = self._record
        record.num_preemptions += step.num_preemptions
        record.num_context_tokens += num_context_tokens
        record.num_generation_tokens += num_generation_tokens
        drafts = step.spec_decoding_stats
        if drafts is not None:
            record.num_drafts += drafts.num_requests_with_draft_tokens
            record.num_draft_tokens += drafts.num_draft_tokens
            record.num_accepted_tokens += drafts.num_accepted_tokens

    def _count_requests(self) -> None:
        """Write the running and waiting requests, which together are all that have not ended."""
        num_running = min(self._num_active, len(self._entries))
        self._num_active = num_running
        self._record.num_running = num_running
        self._record.num_waiting = len(self._entries) + self._queue.num_waiting - num_running


def _entry_of(
    connection: "FrontEndConnection", message: messages.Submit, now: float
) -> FrontEndEntry:
    request = message.request
    origin = message.origin
    sampling = request.sampling_config

    return FrontEndEntry(
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


def _for_executor(entry: FrontEndEntry) -> Request:
    """Return the request of an entry. It says whose it is if it needs something that clients take
    turns at: an express place, or the threads that compile guides and read images.
    """
    request = entry.request
    needs_thread = request.guided_decoding_params is not None or request.images
    if not (entry.is_express or needs_thread):
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
    """Return the names sorted, with commas between, as many as fit into the engine's record."""
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
        # Its requests that have not ended, by the front end's numbers.
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
            else:
                self._fail_too_large(responses[0], error)

    def _fail_too_large(self, response: Response, cause: FrameTooLarge) -> None:
        """End the request of a Response that is too large, with an error in its place."""
        entry = self.entries.get(response.request_id)
        if entry is not None:
            self._dispatcher.abort(entry)

        error = ResponseError(
            f"the Response is too large for the socket: {cause}", ErrorKind.GENERATION
        )
        failure = Response(response.request_id, error=error, client_id=response.client_id)
        self.send(messages.Responses([failure]))

    def send(self, message: messages.ToFrontEnd) -> None:
        """Send a message from any thread. A front end that has stopped reading loses its
        connection.
        """
        if self._writer is not None:
            self._writer.write(frame(messages.encode(message)))
