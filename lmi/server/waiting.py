"""Begins a stream before its first token, and tells the client that its request still waits.

Clients give up a request of which they hear nothing, and send it again: one whose prefill takes
minutes would never be answered. So after some seconds a stream begins without a token, and repeats
the event by which its API tells of progress. Until it begins, a request can still be refused with a
status of its own.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from types import TracebackType
from typing import Self, TypeVar

from lmi.apis.base.formatters import AsyncFormatter
from lmi.engine.client import ResponseStream
from lmi.types import WaitStatus

T = TypeVar("T")

# How long an engine may take to say how far a request is.
ANSWER_S = 1.0
# A stream begins this much later than its period. Queues of engines look several times a second for
# who has waited too long: who may wait as long as the period is refused before the stream begins.
QUEUE_LOOK_S = 0.3

# Sends records to the client. An awaitable that it returns must be awaited before the next call.
Send = Callable[[list[bytes]], Awaitable[None] | None]


class EarlyStart:
    """Sends a formatter's records of waiting every `period_s`, until the first Result comes.

    Use it around the generation of a stream, which adds its requests to `streams`. It costs one
    timer for each stream, and nothing for each token.
    """

    def __init__(
        self, formatter: AsyncFormatter, send: Send, period_s: float | None, started_s: float
    ) -> None:
        """`started_s` is the time on the monotonic clock since which the client waits. With None as
        `period_s`, nothing is sent.
        """
        # Those of all requests of the body, which are answered in one stream.
        self.streams: list[ResponseStream] = []
        self._formatter = formatter
        self._send = send
        self._period_s = period_s
        self._started_s = started_s
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_sending = False
        # Whether the generation has ended, so that no more is sent.
        self._is_over = False

    async def __aenter__(self) -> Self:
        period_s = self._period_s
        formatter = self._formatter
        if period_s is None or not (formatter.is_streaming and formatter.begins_early):
            return self

        waited_s = time.monotonic() - self._started_s
        delay_s = max(0.0, period_s + QUEUE_LOOK_S - waited_s)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(delay_s, self._begin, period_s)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()

        if self._task is None:
            return

        # Records that are half sent to a slow client must be whole before an error follows them.
        # After a cancellation nothing follows.
        self._is_over = True
        is_cancelled = kind is not None and issubclass(kind, asyncio.CancelledError)
        if is_cancelled or not self._is_sending:
            self._task.cancel()

        try:
            await asyncio.wait([self._task])
        finally:
            self._task.cancel()

    def _begin(self, period_s: float) -> None:
        if not self._has_result():
            self._task = asyncio.create_task(self._send_repeatedly(period_s))

    def _has_result(self) -> bool:
        return any(stream.has_begun for stream in self.streams)

    async def _send_repeatedly(self, period_s: float) -> None:
        while True:
            status = await self._status()
            if self._has_result():
                return

            records = self._formatter.waiting(status, time.monotonic() - self._started_s)
            self._is_sending = True
            pause = self._send(records)
            if pause is not None:
                await pause

            self._is_sending = False
            if self._is_over:
                return

            await asyncio.sleep(period_s)

    async def _status(self) -> WaitStatus:
        """Ask the engines how far the requests are."""
        questions = []
        for stream in self.streams:
            if stream.is_waiting:
                questions.append(stream.ask_status(ANSWER_S))

        return status_of_all(await asyncio.gather(*questions))


def status_of_all(statuses: Sequence[WaitStatus]) -> WaitStatus:
    """Return the status of requests that are answered in one stream: the tokens of all prompts, the
    foremost place in a queue and the shortest wait.
    """
    if not statuses:
        return WaitStatus()

    positions = [status.queue_position for status in statuses]
    waits_s = [status.wait_s for status in statuses]
    return WaitStatus(
        num_prompt_tokens=sum(status.num_prompt_tokens for status in statuses),
        num_computed_tokens=_sum_of([status.num_computed_tokens for status in statuses]),
        num_cached_tokens=_sum_of([status.num_cached_tokens for status in statuses]),
        queue_position=min(_without_none(positions), default=None),
        wait_s=min(_without_none(waits_s), default=None),
    )


def _sum_of(counts: Sequence[int | None]) -> int | None:
    """Return the sum, or None if one of the counts is not known."""
    known_counts = _without_none(counts)
    if len(known_counts) < len(counts):
        return None

    return sum(known_counts)


def _without_none(values: Iterable[T | None]) -> list[T]:
    return [value for value in values if value is not None]
