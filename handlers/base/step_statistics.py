"""The statistics of an engine's steps, and of the requests in them, until somebody takes them."""

import time
from collections import deque
from collections.abc import Collection, Iterable
from contextlib import suppress
from typing import Generic, TypeVar

from handlers.base.token_sequence import AnySequence, TokenSequence
from lmi.executor.executor import IterationStats, RequestStats, RequestStatsPerIteration

T = TypeVar("T")


class StepStatistics(Generic[AnySequence]):
    """The statistics of the last steps.

    The loop's thread notes them. Any thread may take them.
    """

    def __init__(self, max_steps: int, max_request_steps: int) -> None:
        """Statistics are kept of the last `max_steps`, and those of each request in a step of the
        last `max_request_steps`, which may be 0.
        """
        self._num_steps = 0
        self._steps: deque[IterationStats] = deque(maxlen=max_steps)
        self._requests: deque[RequestStatsPerIteration] = deque(maxlen=max_request_steps)
        # Sequences that report times and were in no step yet.
        self._unscheduled: list[AnySequence] = []

    @property
    def awaits_first_steps(self) -> bool:
        """Whether there are sequences whose first step is to be noted."""
        return bool(self._unscheduled)

    def note_arrival(self, sequence: AnySequence) -> None:
        """Note that a sequence is there. If it reports times, its first step will be noted."""
        if sequence.perf_metrics is not None:
            self._unscheduled.append(sequence)

    def note_first_steps(self, in_step: set[AnySequence], started_s: float) -> None:
        """Set when a step began, by `time.monotonic`, in the metrics of those of its sequences that
        were in none before.
        """
        for sequence in in_step.intersection(self._unscheduled):
            assert sequence.perf_metrics is not None
            sequence.perf_metrics.first_scheduled_time = started_s

        waiting = [sequence for sequence in self._unscheduled if sequence not in in_step]
        self._unscheduled = [sequence for sequence in waiting if not sequence.is_finished]

    def note_step(
        self,
        stats: IterationStats,
        active: Collection[AnySequence],
        queued: Collection[AnySequence],
        ended: Collection[AnySequence],
        live_ids: Collection[int],
    ) -> None:
        """Keep the statistics of a step, and those of the requests if they are wanted.

        Sets the number and the time of the step in `stats`, and how many requests are active,
        queued and completed. After the step sequences are active, queued, or `ended` in it.
        `live_ids` are the requests of which a sequence goes on.
        """
        self._num_steps += 1
        ended_ids = {sequence.id for sequence in ended}
        stats.timestamp = time.monotonic()
        stats.iter = self._num_steps
        stats.num_active_requests = num_requests(active)
        stats.num_queued_requests = num_requests(queued)
        stats.num_completed_requests = len(ended_ids.difference(live_ids))
        self._steps.append(stats)

        if self._requests.maxlen:
            of_requests = [
                _request_stats(sequence, is_active=False) for sequence in (*ended, *queued)
            ]
            of_requests += [_request_stats(sequence, is_active=True) for sequence in active]
            self._requests.append(
                RequestStatsPerIteration(iter=self._num_steps, request_stats=of_requests)
            )

    def take_steps(self) -> list[IterationStats]:
        """Return the statistics of the steps since the last call."""
        return _drain(self._steps)

    def take_requests(self) -> list[RequestStatsPerIteration]:
        """Return the statistics of the requests in each step since the last call."""
        return _drain(self._requests)


def num_requests(sequences: Iterable[TokenSequence]) -> int:
    """Return how many requests have asked for these sequences."""
    return len({sequence.id for sequence in sequences})


def _request_stats(sequence: TokenSequence, *, is_active: bool) -> RequestStats:
    if sequence.is_finished:
        stage = "GENERATION_COMPLETE"
    elif not is_active:
        stage = "QUEUED"
    elif sequence.is_prefilling:
        stage = "CONTEXT_IN_PROGRESS"
    else:
        stage = "GENERATION_IN_PROGRESS"

    return RequestStats(
        id=sequence.id,
        stage=stage,
        context_prefill_position=min(sequence.num_computed, sequence.num_prompt_tokens),
        num_generated_tokens=sequence.num_generated,
        scheduled=is_active,
        paused=not is_active and not sequence.is_finished and sequence.num_generated > 0,
    )


def _drain(entries: deque[T]) -> list[T]:
    """Take the entries that are there now; meanwhile the loop appends, and others may take."""
    taken: list[T] = []
    with suppress(IndexError):
        for _ in range(len(entries)):
            taken.append(entries.popleft())

    return taken
