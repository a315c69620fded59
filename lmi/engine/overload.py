"""The queue of an engine that learns its speed and how long clients wait, and refuses early what
would wait longer.

While the batch has room every request is let in. Before the speed is known, so is every one that
has not waited too long at other engines. A client with no running request need not wait until
another one ends: a few express places beside the batch are kept for it. The order stays that of
arrival: if the newest went first, the oldest would wait for as long as the load lasts, and be
refused late.
"""

import math
import random
from collections.abc import Iterator

from lmi.engine.patience import ClientPatience
from lmi.engine.queue import Client, Line, QueueEntry, RequestQueue, Turn
from lmi.engine.speed import Speed
from lmi.errors import LmiError, Overloaded

# The seconds of work that may wait for longer than OVERLOADED_AFTER_S.
TARGET_S = 0.5
# The queue counts as overloaded after more work has waited for so long, and until it has refused
# nobody for so long.
OVERLOADED_AFTER_S = 1.0
# The share of clients' patience that an answer may be expected to take. The rest is for errors of
# the estimate.
SHARE_OF_PATIENCE = 0.8
# The batch is reduced to no fewer places.
MIN_PLACES = 8
MAX_RETRY_AFTER_S = 30
# The weight of a new error in the average of errors.
ERROR_SHARE = 0.05


class CountedLine(Line):
    """A line that knows how many tokens its requests have."""

    num_prompt_tokens = 0
    max_output_tokens = 0

    def append(self, entry: QueueEntry) -> None:
        super().append(entry)
        self._count(entry, sign=1)

    def remove(self, entry: QueueEntry) -> None:
        super().remove(entry)
        self._count(entry, sign=-1)

    def _count(self, entry: QueueEntry, *, sign: int) -> None:
        self.num_prompt_tokens += sign * entry.num_prompt_tokens
        self.max_output_tokens += sign * entry.max_tokens * entry.num_sequences


class LearningQueue(RequestQueue):
    """A queue whose costs are seconds of the engine."""

    _new_line = CountedLine

    def __init__(
        self,
        max_num_sequences: int,
        max_wait_s: float,
        num_express: int = 0,
        *,
        keeps_short: bool = True,
    ) -> None:
        """`num_express` places are beside the batch of `max_num_sequences`.

        With `keeps_short`, once TARGET_S of work have waited for a while, only who would be next is
        let in. Else all may wait for `max_wait_s`.
        """
        super().__init__(max_num_sequences, max_wait_s)
        self._target_s = TARGET_S if keeps_short else math.inf
        self._num_express = num_express
        self._num_express_running = 0

        self.speed = Speed()
        # How long clients wait for the first token of a stream, and how long for a whole answer.
        self.first_token_patience = ClientPatience()
        self.patience = ClientPatience()

        self.is_overloaded = False
        # When less than TARGET_S of work waited last.
        self._last_short_s = 0.0
        self._last_refusal_s = 0.0

        # The longest step of a batch that answers in time.
        self._max_step_s = math.inf
        # The seconds of short steps that are added to the next step that is not short.
        self._short_steps_s = 0.0

    def _price(self, num_prompt_tokens: float, num_output_tokens: float) -> float:
        return (
            num_prompt_tokens * self.speed.prompt_token_s
            + num_output_tokens * self.speed.output_token_s
        )

    # Who is let in.

    def offer(self, entry: QueueEntry, now: float) -> None:
        """Let a request in. Raises Overloaded if it would wait too long."""
        entry.queued_s = now
        must_wait = self.num_waiting or self._num_running >= self._places
        client = self._clients.get(entry.client)
        is_idle = client is None or not (client.num_running or client.lines)
        may_be_express = is_idle and self._fits_express(entry)

        if must_wait and not entry.is_further and not may_be_express:
            reason = self._why_refused(entry, now)
            if reason:
                self._last_refusal_s = now
                raise self.refusal(reason)

        super().offer(entry, now)

    def _why_refused(self, entry: QueueEntry, now: float) -> str:
        """Return why a request would wait too long, or "". Notes what it is expected to wait.

        If the queue was long for a while, at most TARGET_S of work may be ahead of it. What it has
        waited for other engines counts.
        """
        waited_s = entry.waited_s(now)
        if waited_s > self._max_wait_s:
            return f"it has waited {waited_s:.1f} s"

        if not self.speed.is_known:
            return ""

        ahead_s = self._ahead_s(entry)
        wait_s = self._next_end_s() + ahead_s
        entry.expected_s = wait_s

        if self.is_overloaded and ahead_s > self._target_s:
            return f"the queue is long, and it would wait {wait_s:.1f} s"

        if waited_s + wait_s > self._max_wait_s:
            return f"it would wait {waited_s + wait_s:.1f} s, of at most {self._max_wait_s:g}"

        return self._why_too_late(entry, wait_s, now)

    def _why_too_late(self, entry: QueueEntry, wait_s: float, now: float) -> str:
        """Return why the client of a request would not be there for the answer, or ""."""
        service_s = self.service_s(entry)
        total_s = wait_s + service_s
        until_deadline_s = entry.deadline_s - now
        if total_s > until_deadline_s:
            return f"it would take {total_s:.1f} s, and has {max(0.0, until_deadline_s):.1f}"

        first_token_patience_s = self.first_token_patience.seconds(now)
        if entry.is_streaming and wait_s > first_token_patience_s:
            return (
                f"it would wait {wait_s:.1f} s, and clients leave after "
                f"{first_token_patience_s:.1f}"
            )

        # One that takes too long even without a queue is let in: waiting is not its trouble.
        patience_s = self.patience.seconds(now)
        max_total_s = SHARE_OF_PATIENCE * patience_s
        if service_s <= max_total_s < total_s:
            return f"it would take {total_s:.1f} s, and clients leave after {patience_s:.1f}"

        return ""

    def _ahead_s(self, entry: QueueEntry) -> float:
        """Return the time that those take who go before a request.

        Clients take turns. So of every other client, requests go before it for at most the time
        that its own client's take up to it, this one included.
        """
        sender = self._clients.get(entry.client)
        line_of_sender = None if sender is None else sender.lines.get(entry.priority)
        before_s = 0.0 if line_of_sender is None else self._line_s(line_of_sender)
        turn_s = before_s + self._cost_of(entry)

        ahead_s = before_s
        for client in self._clients.values():
            for priority, line in client.lines.items():
                if priority > entry.priority:
                    ahead_s += self._line_s(line)
                elif priority == entry.priority and client is not sender:
                    ahead_s += min(turn_s, self._line_s(line))

        return ahead_s

    def refusal(self, reason: str) -> Overloaded:
        """Return an error that says when to come again: when those who wait now have started, give
        or take a fifth, so that clients do not come back together.
        """
        error = super().refusal(reason)
        retry_after_s = max(self._waiting_s(), 1) * random.uniform(0.8, 1.2)
        error.retry_after_s = min(math.ceil(retry_after_s), MAX_RETRY_AFTER_S)
        return error

    def service_s(self, entry: QueueEntry) -> float:
        """Return the time from a request's start to its end, while the engine is full."""
        prompt_s = entry.num_prompt_tokens * self.speed.prompt_token_s
        num_steps = entry.max_tokens * self._answered_share
        return prompt_s + num_steps * self.speed.step_s

    def _line_s(self, line: Line) -> float:
        assert isinstance(line, CountedLine)
        return self._cost(line.num_prompt_tokens, line.max_output_tokens)

    def _waiting_s(self) -> float:
        """Return the time that all who wait take."""
        return sum(
            self._line_s(line)
            for client in self._clients.values()
            for line in client.lines.values()
        )

    def _next_end_s(self) -> float:
        """Return the time until a place of the batch is expected to be free."""
        if self._num_running < self._places:
            return 0.0

        last_steps = []
        for entry in self._running:
            if not entry.is_express:
                num_steps = entry.max_tokens * self._answered_share
                last_steps.append(num_steps + (entry.started_step or 0))

        num_steps_left = min(last_steps, default=0.0) - self._num_steps
        return max(0.0, num_steps_left) * self.speed.step_s

    def expected_wait_s(self, entry: QueueEntry) -> float | None:
        if not self.speed.is_known:
            return None

        return self._next_end_s() + self.ahead_of(entry).cost

    def prompt_s(self, num_tokens: int) -> float | None:
        if not self.speed.is_known:
            return None

        return num_tokens * self.speed.prompt_token_s

    # Who is next, and who goes.

    def start(self, now: float) -> Iterator[QueueEntry]:
        self._watch(now)
        self._set_places(now)
        for entry in super().start(now):
            if entry.expected_s is not None:
                error_s = abs(now - entry.queued_s - entry.expected_s)
                self.wait_error_s += ERROR_SHARE * (error_s - self.wait_error_s)

            yield entry

    def _next(self) -> Turn | None:
        """Return the request whose turn it is. While the batch is full, this may be one for an
        express place.
        """
        turn = super()._next()
        if turn is not None or not self.num_waiting or not self._has_express_place:
            return turn

        idle_clients = (
            client for client in self._clients.values() if client.lines and not client.num_running
        )
        turn = self._first_of(client for client in idle_clients if self._fits_express(client.first))
        if turn is not None:
            turn.entry.is_express = True

        return turn

    @property
    def _has_express_place(self) -> bool:
        return self._num_express_running < self._num_express

    def _fits_express(self, entry: QueueEntry) -> bool:
        """Return whether an express place is free, and the request needs no more than one."""
        return entry.num_sequences == 1 and self._has_express_place

    def _count(self, entry: QueueEntry, client: Client, num_sequences: int) -> None:
        """Count an express request's sequences beside the batch, not in it."""
        super()._count(entry, client, num_sequences)
        if entry.is_express:
            self._num_running -= num_sequences
            self._num_express_running += num_sequences

    def _watch(self, now: float) -> None:
        """Set `is_overloaded` when the queue was longer than its target for OVERLOADED_AFTER_S.

        Clear it when nobody was refused for that long.
        """
        if self.is_overloaded:
            self.is_overloaded = now - self._last_refusal_s < OVERLOADED_AFTER_S
            self._last_short_s = now
        elif not self.num_waiting or self._waiting_s() < self._target_s:
            self._last_short_s = now
        elif now - self._last_short_s > OVERLOADED_AFTER_S:
            self.is_overloaded = True
            self._last_refusal_s = now

    def _set_places(self, now: float) -> None:
        """Let the batch be the largest that answers in SHARE_OF_PATIENCE of the time that clients
        wait. Where none does, it keeps all its places.
        """
        self._places = self._max_num_sequences
        self._max_step_s = math.inf
        patience_s = self.patience.seconds(now)
        if patience_s == math.inf:
            return

        total_max_tokens = sum(entry.max_tokens for entry in self._running)
        mean_max_tokens = total_max_tokens / max(1, len(self._running))
        num_tokens = max(1.0, self._answered_share * mean_max_tokens)

        max_step_s = SHARE_OF_PATIENCE * patience_s / num_tokens
        if max_step_s < self.speed.least_step_s:
            return

        self._max_step_s = max_step_s
        num_places = max(MIN_PLACES, self.speed.num_sequences(max_step_s))
        self._places = int(min(self._max_num_sequences, num_places))

    def _lateness(self, entry: QueueEntry, now: float) -> LmiError | None:
        error = super()._lateness(entry, now)
        if error is not None:
            return error

        if now + self.service_s(entry) > entry.deadline_s:
            return self.refusal("it cannot end before its deadline any more")

        return None

    # What is learned.

    def note_token(self, entry: QueueEntry, now: float) -> None:
        super().note_token(entry, now)
        if entry.is_streaming:
            self.first_token_patience.note(now - entry.arrived_s, has_left=False, now=now)

    def remove(
        self, entry: QueueEntry, now: float, *, has_left: bool = False, is_answered: bool = False
    ) -> None:
        super().remove(entry, now, has_left=has_left, is_answered=is_answered)
        waited_s = now - entry.arrived_s
        self.patience.note(waited_s, has_left=has_left, now=now)
        if entry.is_streaming and not entry.has_begun:
            self.first_token_patience.note(waited_s, has_left=has_left, now=now)

    def note_step(self, seconds: float, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Learn from a step. A short step of express requests beside a full batch is added to the
        next step: the batch waits for both.
        """
        is_full = self._num_running >= self._places
        is_short = 0 < num_output_tokens <= self._num_express_running < self._places
        if is_full and is_short:
            self._short_steps_s += seconds
            return

        super().note_step(seconds, num_prompt_tokens, num_output_tokens)
        seconds += self._short_steps_s
        self._short_steps_s = 0.0
        if num_output_tokens:
            self.speed.least_step_s = min(self.speed.least_step_s, seconds)

        if is_full or self.num_waiting or seconds > self._max_step_s:
            num_sequences = self._num_running + self._num_express_running
            self.speed.note(seconds, num_prompt_tokens, num_output_tokens, num_sequences)
