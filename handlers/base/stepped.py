"""An Executor that advances all its requests together, one step after another, on its own thread.

It does everything except the step. Between two steps, at the boundary, it accepts, cancels and
times out requests. It publishes all Responses of a step at once, and keeps statistics. A step that
raises ends its requests with an error, and three such steps in a row stop the engine. This module
knows no model and no tensor.
"""

import heapq
import itertools
import logging
import operator
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence as SequenceOf
from concurrent.futures import Future
from typing import Generic, NamedTuple

from msgspec import Struct, field

from handlers.base.mailbox import Mailbox, checked
from handlers.base.step_statistics import StepStatistics, num_requests
from handlers.base.token_sequence import AnySequence, sequences_of
from lmi.capabilities import check_request
from lmi.errors import Overloaded
from lmi.executor.executor import (
    IterationStats,
    KvCacheStats,
    PromptProgress,
    RequestStatsPerIteration,
)
from lmi.executor.request import Request
from lmi.executor.response import ErrorKind, FinishReason, Response

# So many failed steps in a row stop the engine.
MAX_FAILED_STEPS = 3
SHUTDOWN_TIMEOUT_S = 10.0

log = logging.getLogger(__name__)


class Step(Struct, Generic[AnySequence]):
    """What one step did."""

    # The sequences that it gave a token or ended. One may be there twice.
    touched: list[AnySequence] = field(default_factory=list)
    # The engine fills in which tokens it computed and reused, its preemptions, batch and drafts.
    stats: IterationStats = field(default_factory=IterationStats)


class _Call(NamedTuple):
    """A function that the loop's thread calls between two steps, and what came of it."""

    function: Callable[[], None]
    outcome: Future[None]


class _Deadline(NamedTuple):
    """When a request times out, as `time.monotonic` counts."""

    time_s: float
    request_id: int


class EngineStopped(Exception):
    """The engine cannot go on. The code that raises it has logged why."""


class SteppedExecutor(Mailbox, Generic[AnySequence]):
    """A subclass implements the abstract methods below, and calls `_start` when it is ready to
    step.

    Only the loop's thread calls them, where they do not say otherwise.
    """

    def __init__(
        self,
        kind: type[AnySequence],
        max_queue_size: int | None = None,
        num_iter_stats: int = 1000,
        num_request_stats: int = 0,
    ) -> None:
        """`kind` is the type of the sequences that a request becomes.

        `num_iter_stats` and `num_request_stats`: of how many steps statistics are kept.
        """
        super().__init__()
        self._kind = kind
        self._max_queue_size = max_queue_size

        # It guards what other threads hand to the loop, which are the next five fields.
        self._boundary = threading.Condition()
        self._arrived: list[AnySequence] = []
        self._cancelled: list[int] = []
        self._calls: list[_Call] = []
        self._is_closing = False
        self._is_accepting = False

        # The sequences of each request that has not ended, by its id.
        self._live: dict[int, list[AnySequence]] = {}
        # Sequences whose last Responses are not published yet.
        self._ended: list[AnySequence] = []
        # A heap.
        self._deadlines: list[_Deadline] = []

        self._num_failed_steps = 0
        self._statistics = StepStatistics[AnySequence](num_iter_stats, num_request_stats)
        self._loop = threading.Thread(target=self._run, name="executor", daemon=True)

    def _start(self) -> None:
        self._is_accepting = True
        self._loop.start()

    # The engine.

    def _check(self, request: Request) -> None:
        """Raise if this engine cannot serve the request; called from any thread."""
        check_request(request, self.info)

    @abstractmethod
    def _add(self, sequence: AnySequence) -> None:
        """Take a new sequence into the queue, or let it fail."""

    @abstractmethod
    def _remove(self, sequence: AnySequence) -> None:
        """Forget an ended sequence, queued or active, and free what it holds."""

    @abstractmethod
    def _step(self) -> Step[AnySequence] | None:
        """Advance every active sequence; called while there are sequences. Returns None if no step
        was made.

        If it raises, the `_active` sequences end with an error. It raises EngineStopped if the
        engine cannot go on.
        """

    def _wake(self) -> None:
        """Make a `_step` that waits for another process return; called from any thread."""

    @property
    def _idle_look_s(self) -> float | None:
        """The time after which `_look_while_idle` is called where no work has come, or None."""
        return None

    def _look_while_idle(self) -> None:
        """Do what is due while there is no work."""

    def _kind_of(self, error: Exception) -> ErrorKind:
        """The kind of a failed step's error."""
        return ErrorKind.GENERATION

    @property
    @abstractmethod
    def _active(self) -> SequenceOf[AnySequence]:
        """The sequences that run; a step that raises ends them."""

    @property
    @abstractmethod
    def _queued(self) -> SequenceOf[AnySequence]:
        """The sequences that the engine has and that do not run; called from any thread, also while
        it steps.
        """

    def _kv_cache_stats(self) -> KvCacheStats:
        return KvCacheStats()

    def _close(self) -> None:
        """Free the device; nothing is called after this."""

    # The contract, called from any thread.

    def enqueue_request(self, request: Request) -> int:
        """Accept a request, and return its id. Raises what `enqueue_requests` raises."""
        return self.enqueue_requests([request])[0]

    def enqueue_requests(self, requests: SequenceOf[Request]) -> list[int]:
        """Accept all requests or none. They start in the same step if there is room."""
        requests = list(map(checked, requests))
        for request in requests:
            self._check(request)

        with self._boundary:
            if not self._is_accepting:
                raise RuntimeError("the executor is shut down")

            if self._max_queue_size is not None:
                num_queued = num_requests([*self._arrived, *self._queued])
                if num_queued + len(requests) > self._max_queue_size:
                    raise Overloaded(
                        f"{num_queued} requests wait already, at most {self._max_queue_size} may"
                    )

            request_ids = [self._new_id() for _ in requests]
            for request_id, request in zip(request_ids, requests, strict=True):
                self._arrived += sequences_of(
                    self._kind, request_id, request, self.info.max_sequence_length
                )

            self._boundary.notify()

        self._wake()
        return request_ids

    def cancel_request(self, request_id: int) -> None:
        """End a request before the next step. An id that is not known is ignored."""
        plain_id = operator.index(request_id)

        with self._boundary:
            self._cancelled.append(plain_id)
            self._boundary.notify()

        self._wake()

    def get_prompt_progress(self, request_id: int) -> PromptProgress | None:
        """Sequences of a request share the computation of its prompt, so the first one tells how
        far it is.
        """
        sequences = list(self._live.get(request_id, ()))
        if not sequences:
            # It has not crossed a boundary yet, or has ended.
            return PromptProgress()

        first = sequences[0]
        num_computed = min(first.num_computed, first.num_prompt_tokens)
        return PromptProgress(num_computed, min(first.num_cached_tokens, num_computed))

    def get_latest_iteration_stats(self) -> list[IterationStats]:
        """Return the statistics of the steps since the last call."""
        return self._statistics.take_steps()

    def get_latest_request_stats(self) -> list[RequestStatsPerIteration]:
        """Return those of the requests in the steps since the last call."""
        return self._statistics.take_requests()

    def can_enqueue_requests(self) -> bool:
        """Whether it takes requests."""
        return self._is_accepting

    def shutdown(self) -> None:
        """End all requests as cancelled, and the thread."""
        with self._boundary:
            self._is_accepting = False
            self._is_closing = True
            self._boundary.notify()

        self._wake()
        # A step that hangs is left behind.
        self._loop.join(SHUTDOWN_TIMEOUT_S)
        self._end_waiting()

    def _at_boundary(self, function: Callable[[], None]) -> None:
        """Run `function` on the loop's thread between two steps. Raises what it raises."""
        outcome: Future[None] = Future()
        with self._boundary:
            if not self._is_accepting:
                raise RuntimeError("the executor is shut down")

            self._calls.append(_Call(function, outcome))
            self._boundary.notify()

        self._wake()
        outcome.result()

    # The loop.

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._run_step()

            self._cross_boundary()
            self._finish(list(self._live), FinishReason.CANCELLED)
            self._publish([])
        # Every request gets its end, whichever error stopped the loop.
        except BaseException as error:
            is_explained = isinstance(error, EngineStopped)
            log.critical("the executor stops: %s", error, exc_info=not is_explained)
            self._fail_all(f"the engine stopped: {error}")
        finally:
            self._end_waiting()
            for call in self._calls:
                call.outcome.set_exception(RuntimeError("the executor is shut down"))

            self._close()

    def _fail_all(self, message: str) -> None:
        """Accept nothing more, and end all requests with an error."""
        with self._boundary:
            self._is_accepting = False
            sequences = [*self._all_live(), *self._arrived]
            self._live = {}
            self._arrived = []

        for sequence in sequences:
            sequence.fail(message, ErrorKind.ENGINE_LOST)

        self._publish(sequences)

    def _wait_for_work(self) -> bool:
        """Sleep until there is work. Returns False when the executor shuts down."""
        while True:
            with self._boundary:
                if self._boundary.wait_for(self._has_work, self._idle_look_s):
                    return not self._is_closing

            self._look_while_idle()

    def _has_work(self) -> bool:
        has_requests = bool(self._live or self._arrived or self._cancelled)
        return has_requests or bool(self._calls) or self._is_closing

    def _run_step(self) -> None:
        """Cross the boundary, make one step, keep its statistics and publish its answers."""
        self._cross_boundary()
        # This is after the arrival of every sequence in the step.
        started = time.monotonic()
        step = self._step_or_fail() if self._live else None

        touched = [] if step is None else _with_siblings_of_failed(step.touched)
        if self._statistics.awaits_first_steps:
            self._statistics.note_first_steps({*self._active, *touched}, started)

        self._settle([sequence for sequence in touched if sequence.is_finished])
        if step is not None or self._ended:
            self._note_step(step or Step(), (time.monotonic() - started) * 1000)

        self._publish(touched)
        if self._num_failed_steps >= MAX_FAILED_STEPS:
            raise EngineStopped(f"{MAX_FAILED_STEPS} steps in a row failed")

    def _cross_boundary(self) -> None:
        """Add the sequences that arrived. End those that were cancelled or timed out, before they
        can be scheduled.
        """
        with self._boundary:
            arrived, self._arrived = self._arrived, []
            cancelled_ids, self._cancelled = self._cancelled, []
            calls, self._calls = self._calls, []
            # `enqueue_requests` counts, on another thread, who has arrived and who is queued. With
            # the lock it finds each sequence in one of them.
            self._add_all(arrived)

        for call in calls:
            try:
                call.function()
                call.outcome.set_result(None)
            except Exception as error:
                call.outcome.set_exception(error)
            except BaseException as error:
                # A library called sys.exit. It ends neither this thread nor that of the caller.
                call.outcome.set_exception(RuntimeError(f"the call ended with {error!r}"))

        for sequence in arrived:
            self._statistics.note_arrival(sequence)
            if sequence.deadline is not None and sequence.index == 0:
                heapq.heappush(self._deadlines, _Deadline(sequence.deadline, sequence.id))

        self._settle([sequence for sequence in arrived if sequence.is_finished])
        self._finish(cancelled_ids, FinishReason.CANCELLED)
        self._finish(self._expired_ids(), FinishReason.TIMED_OUT)

    def _add_all(self, arrived: list[AnySequence]) -> None:
        """Make sequences live, and give them to the engine."""
        for sequence in arrived:
            self._live.setdefault(sequence.id, []).append(sequence)

        for sequence in arrived:
            # A sibling may have failed just now.
            if not sequence.is_finished:
                self._add(sequence)

    def _expired_ids(self) -> list[int]:
        """Take the deadlines that are over. Returns the ids of their requests."""
        request_ids = []
        while self._deadlines and self._deadlines[0].time_s <= time.monotonic():
            deadline = heapq.heappop(self._deadlines)
            request_ids.append(deadline.request_id)

        return request_ids

    def _finish(self, request_ids: list[int], reason: FinishReason) -> None:
        """End the sequences of these requests. Unknown and finished ids are ignored."""
        sequences: list[AnySequence] = []
        for request_id in dict.fromkeys(request_ids):
            sequences += self._live.get(request_id, ())

        for sequence in sequences:
            sequence.finish(reason)

        self._settle(sequences)

    def _step_or_fail(self) -> Step[AnySequence] | None:
        """Make a step. If it raises, the sequences that ran in it fail. Raises EngineStopped."""
        try:
            step = self._step()
        except EngineStopped:
            raise
        except Exception as error:
            failed = list(self._active)
            for sequence in failed:
                sequence.fail(f"the step failed: {error}", self._kind_of(error))

            failed_ids = [sequence.id for sequence in failed]
            log.exception("a step failed; its requests end with an error: %s", failed_ids)
            self._num_failed_steps += 1

            # Some sequences ended before the step failed.
            finished = [sequence for sequence in self._all_live() if sequence.is_finished]
            return Step(touched=finished)

        self._num_failed_steps = 0
        return step

    def _all_live(self) -> Iterable[AnySequence]:
        return itertools.chain.from_iterable(self._live.values())

    def _settle(self, ended: list[AnySequence]) -> None:
        """Free what ended sequences hold, before a client can see that they ended."""
        for sequence in ended:
            self._remove(sequence)
            live = self._live[sequence.id]
            live.remove(sequence)
            if not live:
                del self._live[sequence.id]

            self._ended.append(sequence)

    def _publish(self, touched: list[AnySequence]) -> None:
        """Post the new Responses of these sequences and of all that have ended."""
        sequences = dict.fromkeys(touched + self._ended)
        self._ended = []

        responses: list[Response] = []
        for sequence in sequences:
            responses += sequence.take_responses()

        if responses:
            self._post(responses)

    def _note_step(self, step: Step[AnySequence], latency_ms: float) -> None:
        """Keep the statistics of a step that has been made and settled."""
        stats = step.stats
        stats.iter_latency_ms = latency_ms
        stats.max_num_active_requests = self.info.max_num_sequences
        stats.kv_cache_stats = self._kv_cache_stats()
        self._statistics.note_step(
            stats, self._active, self._queued, self._ended, self._live.keys()
        )


def _with_siblings_of_failed(sequences: Iterable[AnySequence]) -> list[AnySequence]:
    """Return each sequence once, and behind them the running siblings of failed ones: a failure
    ends the whole request.
    """
    # A dictionary keeps the order.
    with_siblings = dict.fromkeys(sequences)
    failed = [sequence for sequence in with_siblings if sequence.error is not None]
    for sequence in failed:
        for sibling in sequence.siblings:
            if sibling.finish_reason is FinishReason.NOT_FINISHED:
                with_siblings[sibling] = None

    return list(with_siblings)
