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
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from lmi.engine.queue import Client, Line, QueueEntry, RequestQueue, Turn
from lmi.errors import LmiError, Overloaded

# The seconds of work that may wait for longer than OVERLOADED_AFTER_S.
TARGET_S = 0.5
# The queue counts as overloaded after more work has waited for so long, and until it has refused
# nobody for so long.
OVERLOADED_AFTER_S = 1.0
# The share of clients' patience that an answer may be expected to take. The rest is for errors of
# the estimate.
PART = 0.8
# The batch is reduced to no fewer places.
MIN_PLACES = 8
MAX_RETRY_AFTER_S = 30
# The weight of a new error in the average of errors.
ERROR_SHARE = 0.05
# A step that is so old counts 1/e of a new one.
MEMORY_S = 3.0
# The speed counts as known after so many steps.
MIN_STEPS = 4
# So many clients are taken to have stayed before any was seen.
NUM_STAYED = 4
# No more clients than these count in an average.
MAX_SEEN = 32
# Clients who leave together have one reason, as a proxy that ends, and count once.
INSTANT_S = 0.1
# Half of what is known of impatience is forgotten in this time.
FORGET_S = 600.0
# Patience ends when fewer than this part of the clients still wait.
QUANTILE = 0.5
# The times at which patience is counted, from 0.1 s to 125 s.
BOUNDS_S = tuple(0.1 * 1.15**i for i in range(52))


@dataclass(slots=True)
class StepSums:
    """Sums over the steps of a full engine, in which older steps count less."""

    weight: float = 0.0
    num_prompt_tokens: float = 0.0
    seconds: float = 0.0
    squared_prompt_tokens: float = 0.0
    # The sum of prompt tokens times seconds.
    token_seconds: float = 0.0
    num_output_tokens: float = 0.0
    num_sequences: float = 0.0

    def add(
        self, seconds: float, num_prompt_tokens: int, num_output_tokens: int, num_sequences: int
    ) -> None:
        keep = math.exp(-seconds / MEMORY_S)
        self.weight = keep * self.weight + 1
        self.num_prompt_tokens = keep * self.num_prompt_tokens + num_prompt_tokens
        self.seconds = keep * self.seconds + seconds
        self.squared_prompt_tokens = keep * self.squared_prompt_tokens + num_prompt_tokens**2
        self.token_seconds = keep * self.token_seconds + num_prompt_tokens * seconds
        self.num_output_tokens = keep * self.num_output_tokens + num_output_tokens
        self.num_sequences = keep * self.num_sequences + num_sequences

    @property
    def slope(self) -> float:
        """The seconds of one more prompt token by least squares; 0 where each step had as many."""
        spread = self.weight * self.squared_prompt_tokens - self.num_prompt_tokens**2
        if spread <= 1e-9 * self.weight * self.squared_prompt_tokens:
            return 0.0

        covariance = self.weight * self.token_seconds - self.num_prompt_tokens * self.seconds
        return covariance / spread


class Speed:
    """The time of a full engine's steps, as a line: seconds = step_s + prompt_token_s · number of
    prompt tokens.
    """

    def __init__(self) -> None:
        self.is_known = False
        # What one more prompt token costs.
        self.prompt_token_s = 0.0
        # A full step without prompt tokens.
        self.step_s = 0.0
        # The engine's time for a token of an answer, while it makes many at once.
        self.output_token_s = 0.0
        # The shortest of all steps that made tokens of answers, full or not.
        self.least_step_s = math.inf
        self._num_steps = 0
        self._sums = StepSums()

    def note(
        self, seconds: float, num_prompt_tokens: int, num_output_tokens: int, num_sequences: int
    ) -> None:
        """Learn from a full engine's step and the wait before it."""
        self._num_steps += 1
        sums = self._sums
        sums.add(seconds, num_prompt_tokens, num_output_tokens, num_sequences)

        self.prompt_token_s = 0.0
        if sums.num_prompt_tokens:
            most_s = sums.seconds / sums.num_prompt_tokens
            self.prompt_token_s = min(max(sums.slope, 0.0), most_s)

        decode_s = max(0.0, sums.seconds - self.prompt_token_s * sums.num_prompt_tokens)
        self.step_s = decode_s / sums.weight
        num_outputs = sums.num_output_tokens
        self.output_token_s = decode_s / num_outputs if num_outputs else 0.0
        self.is_known = self._num_steps >= MIN_STEPS and num_outputs > 0

    def num_sequences(self, seconds: float) -> float:
        """The sequences of a step that takes so long with its prompts, at the time that each took
        lately.

        A step of more sequences takes less for each, so that a batch of this size settles where a
        step takes so long.
        """
        sums = self._sums
        if not (sums.num_sequences and sums.seconds):
            return math.inf

        return seconds * sums.num_sequences / sums.seconds


class ClientPatience:
    """How long clients wait before they leave, by the product-limit estimate over the times that
    were seen.

    A client who is answered, or refused, has stayed for so long and says nothing of later times.
    """

    def __init__(self) -> None:
        # Of the clients who waited until a bound, the share that left before the next, and how many
        # they were.
        self._shares_leaving = [0.0] * len(BOUNDS_S)
        self._num_seen = [NUM_STAYED] * len(BOUNDS_S)
        # The moments at which the last client left that was counted, and shares were reduced.
        self._last_leave_s = -math.inf
        self._last_forget_s = 0.0

    def note(self, waited_s: float, *, has_left: bool, now: float) -> None:
        """Count a client that waited for so long, and then left or was answered."""
        self._forget(now)
        if has_left:
            if now - self._last_leave_s < INSTANT_S:
                return

            self._last_leave_s = now

        last = bisect_right(BOUNDS_S, waited_s) - 1
        for i in range(last):
            self._count(i, is_leaving=False)

        # Whether one that was answered would have left before the next bound, nobody knows.
        if has_left and last >= 0:
            self._count(last, is_leaving=True)

    def _count(self, i: int, *, is_leaving: bool) -> None:
        """Count a client that waited until the bound `i`, and left before the next or stayed."""
        self._num_seen[i] = min(self._num_seen[i] + 1, MAX_SEEN)
        self._shares_leaving[i] += (is_leaving - self._shares_leaving[i]) / self._num_seen[i]

    def seconds(self, now: float) -> float:
        """The time after which fewer than QUANTILE of the clients still wait. Infinite if few were
        seen to leave.
        """
        self._forget(now)
        staying = 1.0
        for bound_s, share in zip(BOUNDS_S, self._shares_leaving, strict=True):
            staying *= 1 - share
            if staying < QUANTILE:
                return bound_s

        return math.inf

    def _forget(self, now: float) -> None:
        passed_s = now - self._last_forget_s
        if passed_s < 1.0:
            return

        self._last_forget_s = now
        keep = 0.5 ** (passed_s / FORGET_S)
        self._shares_leaving = [keep * share for share in self._shares_leaving]


class CountedLine(Line):
    """A line that knows how many tokens its requests have."""

    num_prompt_tokens = max_output_tokens = 0

    def append(self, entry: QueueEntry) -> None:
        super().append(entry)
        self._count(entry, 1)

    def remove(self, entry: QueueEntry) -> None:
        super().remove(entry)
        self._count(entry, -1)

    def _count(self, entry: QueueEntry, sign: int) -> None:
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
        """`keeps_short`: once TARGET_S of work have waited for a while, only who would be next is
        let in.

        Else all may wait for `max_wait_s`.
        """
        super().__init__(max_num_sequences, max_wait_s)
        self._target_s = TARGET_S if keeps_short else math.inf
        self._num_express = num_express
        self._num_express_running = 0

        self.speed = Speed()
        self.first_token_patience = ClientPatience()
        self.patience = ClientPatience()

        self.is_overloaded = False
        # The longest step of a batch that answers in time.
        self._longest_step_s = math.inf
        # The seconds of short steps that are added to the next step that is not short.
        self._short_steps_s = 0.0
        # The moments at which the queue was last short, and a request was last refused.
        self._last_short_s = 0.0
        self._last_refusal_s = 0.0

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
        takes_s = wait_s + service_s
        until_deadline_s = entry.deadline_s - now
        if takes_s > until_deadline_s:
            return f"it would take {takes_s:.1f} s, and has {max(0.0, until_deadline_s):.1f}"

        first_token_patience_s = self.first_token_patience.seconds(now)
        if entry.is_streaming and wait_s > first_token_patience_s:
            return (
                f"it would wait {wait_s:.1f} s, and clients leave after "
                f"{first_token_patience_s:.1f}"
            )

        # Without a queue it would be answered in time. One that takes too long anyway is let in.
        patience_s = self.patience.seconds(now)
        if service_s <= PART * patience_s < takes_s:
            return f"it would take {takes_s:.1f} s, and clients leave after {patience_s:.1f}"

        return ""

    def _ahead_s(self, entry: QueueEntry) -> float:
        """The time that those take who go before a request.

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
        """An error that says when to come again: when those who wait now have started, give or take
        a fifth.
        """
        error = super().refusal(reason)
        seconds = max(self._waiting_s(), 1) * random.uniform(0.8, 1.2)
        error.retry_after_s = min(math.ceil(seconds), MAX_RETRY_AFTER_S)
        return error

    def service_s(self, entry: QueueEntry) -> float:
        """The time from a request's start to its end, while the engine is full."""
        tokens_s = entry.max_tokens * self._answered_share * self.speed.step_s
        return entry.num_prompt_tokens * self.speed.prompt_token_s + tokens_s

    def _line_s(self, line: Line) -> float:
        assert isinstance(line, CountedLine)
        return self._cost(line.num_prompt_tokens, line.max_output_tokens)

    def _waiting_s(self) -> float:
        """The time that all who wait take."""
        return sum(
            self._line_s(line)
            for client in self._clients.values()
            for line in client.lines.values()
        )

    def _next_end_s(self) -> float:
        """The time until a running request is expected to end."""
        if self._num_running < self._places:
            return 0.0

        share = self._answered_share
        ends = (
            entry.max_tokens * share + (entry.started_step or 0)
            for entry in self._running
            if not entry.is_express
        )
        num_steps = min(ends, default=0.0) - self._num_steps
        return max(0.0, num_steps) * self.speed.step_s

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
        """While the batch is full, the request may be one for an express place."""
        turn = super()._next()
        has_express = self._num_express_running < self._num_express
        if turn is not None or not self.num_waiting or not has_express:
            return turn

        turn = self._first_of(
            client
            for client in self._clients.values()
            if client.lines and not client.num_running and self._fits_express(client.first)
        )
        if turn is not None:
            turn.entry.is_express = True

        return turn

    def _fits_express(self, entry: QueueEntry) -> bool:
        """Whether a place is free for a request of one sequence: no client gets several."""
        return entry.num_sequences == 1 and self._num_express_running < self._num_express

    def _count(self, entry: QueueEntry, client: Client, num_sequences: int) -> None:
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
        """Let the batch be the largest that answers in PART of the time that clients wait, if any
        does.
        """
        most = self._max_num_sequences
        self._places = most
        self._longest_step_s = math.inf
        patience_s = self.patience.seconds(now)
        if patience_s == math.inf:
            return

        max_tokens = sum(entry.max_tokens for entry in self._running) / max(1, len(self._running))
        num_tokens = max(1.0, self._answered_share * max_tokens)
        longest_s = PART * patience_s / num_tokens
        if longest_s < self.speed.least_step_s:
            return

        self._longest_step_s = longest_s
        num_places = max(MIN_PLACES, self.speed.num_sequences(longest_s))
        self._places = int(min(most, num_places))

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
        """A short step of express requests beside a full batch is added to the next step: the batch
        waits for both.
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

        if is_full or self.num_waiting or seconds > self._longest_step_s:
            num_sequences = self._num_running + self._num_express_running
            self.speed.note(seconds, num_prompt_tokens, num_output_tokens, num_sequences)
