"""The beginning of a stream that has no token yet.

Clients give up a request of which they hear nothing, and send it again: a prompt that takes minutes
would be asked for ever. So after some seconds a stream begins, and says that it waits, again and
again, in the events that the clients of its API take for progress. Until then a refusal has its
status.
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

# How long an engine may take to say how far it is.
ANSWER_S = 1.0
# A queue looks as often for who has waited too long: a refusal after as long keeps its status.
QUEUE_LOOK_S = 0.3

# What it returns is awaited before the next records.
Send = Callable[[list[bytes]], Awaitable[None] | None]


class EarlyStart:
    """Sends what a formatter writes of waiting, every `period_s`, until a Result comes. Without a
    period, nothing.

    It costs one timer for each stream: nothing is done for each token.
    """

    def __init__(
        self, formatter: AsyncFormatter, send: Send, period_s: float | None, started_s: float
    ) -> None:
        """`started_s`: since when the client waits."""
        # The streams of the requests that are answered together.
        self.streams: list[ResponseStream] = []
        self._formatter = formatter
        self._send = send
        self._period_s = period_s
        self._started_s = started_s
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_sending = False
        self._is_over = False

    async def __aenter__(self) -> Self:
        period_s = self._period_s
        if period_s is None:
            return self

        if self._formatter.is_streaming and self._formatter.begins_early:
            first_s = self._started_s + period_s + QUEUE_LOOK_S - time.monotonic()
            self._timer = asyncio.get_running_loop().call_later(
                max(0.0, first_s), self._begin, period_s
            )

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

        self._is_over = True
        is_cancelled = kind is not None and issubclass(kind, asyncio.CancelledError)
        if is_cancelled or not self._is_sending:
            self._task.cancel()

        # Records that are half sent to a slow client must be whole before an error follows them.
        try:
            await asyncio.wait([self._task])
        finally:
            self._task.cancel()

    def _begin(self, period_s: float) -> None:
        if self._may_tell():
            self._task = asyncio.create_task(self._tell_repeatedly(period_s))

    def _may_tell(self) -> bool:
        return not any(stream.has_begun for stream in self.streams)

    async def _tell_repeatedly(self, period_s: float) -> None:
        while True:
            status = await self._status()
            if not self._may_tell():
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
        questions = []
        for stream in self.streams:
            if stream.is_waiting:
                questions.append(stream.ask_status(ANSWER_S))

        return together(await asyncio.gather(*questions))


def together(statuses: Sequence[WaitStatus]) -> WaitStatus:
    """Return the status of requests that are answered together: the first token is that of the
    first who has one.

    Tokens are those of all prompts.
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
    present = _without_none(counts)
    return sum(present) if len(present) == len(counts) else None


def _without_none(values: Iterable[T | None]) -> list[T]:
    return [value for value in values if value is not None]
