"""The queue of an engine under overload: it refuses at once what would wait too long.

- A request is refused on arrival if the batch is full and its client would leave, or its deadline
  pass, before the answer; or if the queue has been long for a while. Before the speed of the engine
  is known, only what has waited too long at other engines is.
- A client of whom nothing runs need not wait until another one ends: a few express places beside
  the batch are kept for it.
- The batch gets smaller while its steps are so long that clients leave before they have an answer.

The order stays that of arrival. If the newest went first, the oldest would wait for as long as the
load lasts, and be refused late.
"""

import math
import random
from collections.abc import Iterator

from lmi.engine.patience import ClientPatience
from lmi.engine.queue import Client, QueueEntry, Turn
from lmi.engine.timed_queue import TimedQueue
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


class LearningQueue(TimedQueue):
    """A queue that learns how long clients wait, and refuses early what would wait longer."""

    def __init__(
        self,
        max_num_sequences: int,
        max_wait_s: float,
        num_express: int = 0,
        *,
        keeps_short: bool = True,
    ) -> None:
        """The batch has `max_num_sequences` places, and `num_express` are beside it.

        Without `keeps_short` no request is refused because the queue is long: all may wait for
        `max_wait_s`.
        """
        super().__init__(max_num_sequences, max_wait_s)
        self._target_s = TARGET_S if keeps_short else math.inf
        self._num_express = num_express
        self._num_express_running = 0

        # How long clients wait for the first token of a stream, and how long for a whole answer.
        self.first_token_patience = ClientPatience()
        self.patience = ClientPatience()

        self.is_overloaded = False
        # When less than TARGET_S of work waited last.
        self._last_short_s = 0.0
        self._last_refusal_s = 0.0

        # The longest step of a batch that answers in time.
        self._max_step_s = math.inf
        # The seconds of the short steps since the last one that was not short.
        self._short_steps_s = 0.0

    # Who is let in.

    def offer(self, entry: QueueEntry, now: float) -> None:
        """Let a request in. Raises Overloaded if it would wait too long."""
        entry.queued_s = now
        must_wait = self.num_waiting or self._num_running >= self._places
        if must_wait and not entry.is_further and not self._may_be_express(entry):
            reason = self._why_refused(entry, now)
            if reason:
                self._last_refusal_s = now
                raise self.refusal(reason)

        super().offer(entry, now)

    def _why_refused(self, entry: QueueEntry, now: float) -> str:
        """Return why a request would wait too long, or "". Notes in it how long it is expected to
        wait.
        """
        # At other engines too.
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

        # An answer that takes too long even without a wait is let in: a refusal would not help it.
        patience_s = self.patience.seconds(now)
        max_total_s = SHARE_OF_PATIENCE * patience_s
        if service_s <= max_total_s < total_s:
            return f"it would take {total_s:.1f} s, and clients leave after {patience_s:.1f}"

        return ""

    def refusal(self, reason: str) -> Overloaded:
        """Return an error that says when to come again: when all who wait now have started, give or
        take a fifth, so that clients do not come back together.
        """
        error = super().refusal(reason)
        retry_after_s = max(self._waiting_s(), 1) * random.uniform(0.8, 1.2)
        error.retry_after_s = min(math.ceil(retry_after_s), MAX_RETRY_AFTER_S)
        return error

    def _watch(self, now: float) -> None:
        """Set `is_overloaded` once more than the target has waited for OVERLOADED_AFTER_S, and
        clear it once nobody was refused for that long.
        """
        if self.is_overloaded:
            self.is_overloaded = now - self._last_refusal_s < OVERLOADED_AFTER_S
            self._last_short_s = now
        elif not self.num_waiting or self._waiting_s() < self._target_s:
            self._last_short_s = now
        elif now - self._last_short_s > OVERLOADED_AFTER_S:
            self.is_overloaded = True
            self._last_refusal_s = now

    # Who is next, and who goes.

    def start(self, now: float) -> Iterator[QueueEntry]:
        """Yield the requests to give to the engine now."""
        self._watch(now)
        self._set_places(now)
        yield from super().start(now)

    def _next(self) -> Turn | None:
        """Return the request whose turn it is: if the batch is full, one for an express place."""
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

    def _may_be_express(self, entry: QueueEntry) -> bool:
        """Return whether a request that comes may have an express place at once."""
        client = self._clients.get(entry.client)
        is_idle = client is None or not (client.num_running or client.lines)
        return is_idle and self._fits_express(entry)

    def _fits_express(self, entry: QueueEntry) -> bool:
        """Return whether an express place is free, and the request needs no more than one."""
        return entry.num_sequences == 1 and self._has_express_place

    @property
    def _has_express_place(self) -> bool:
        return self._num_express_running < self._num_express

    def _count(self, entry: QueueEntry, client: Client, num_sequences: int) -> None:
        """Count an express request's sequences beside the batch, not in it."""
        super()._count(entry, client, num_sequences)
        if entry.is_express:
            self._num_running -= num_sequences
            self._num_express_running += num_sequences

    def _set_places(self, now: float) -> None:
        """Let the batch be the largest that answers in SHARE_OF_PATIENCE of the time that clients
        wait. If none does, it keeps all its places.
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
        """Learn from a client who has stayed until the first token."""
        super().note_token(entry, now)
        if entry.is_streaming:
            self.first_token_patience.note(now - entry.arrived_s, has_left=False, now=now)

    def remove(
        self, entry: QueueEntry, now: float, *, has_left: bool = False, is_answered: bool = False
    ) -> None:
        """Learn from a client who has left, or has stayed until the end."""
        super().remove(entry, now, has_left=has_left, is_answered=is_answered)
        waited_s = now - entry.arrived_s
        self.patience.note(waited_s, has_left=has_left, now=now)
        if entry.is_streaming and not entry.has_begun:
            self.first_token_patience.note(waited_s, has_left=has_left, now=now)

    def note_step(self, seconds: float, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Learn from a step. A short one, of express requests alone while the batch is full, counts
        as a part of the next: the batch waits for both.
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
