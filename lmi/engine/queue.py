"""The queue of one engine: who is let in, who is next, and who has waited too long. No I/O, and no clock.

A request is let in while it is expected to start and to end soon enough: within `max_wait_s`, its deadline, and the
time that clients have lately been seen to wait. What is expected is the work of those who go before it, at the speed
that the engine has shown. While the batch has room, or before a speed is known, nobody is refused.

Clients share the engine by the time that their requests take: the next one is that of the client who had the least. A
client of whom nothing runs need not wait for an end: a few express places beside the batch are for such clients.

If the queue was long for a while, a new request must be expected to be next. The order stays that of arrival: if the
newest went first, the oldest would wait for as long as the load lasts, and be refused late.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from lmi.engine.estimates import ClientPatience, Speed
from lmi.errors import DeadlineExceeded, LmiError, Overloaded
from lmi.executor import DEFAULT_PRIORITY

TARGET_S = 0.5  # of work that waits
OVERLOADED_AFTER_S = 1.0
PART = 0.8  # of the time that clients wait, which answers may take: estimates err
MIN_PLACES = 8  # that a batch is reduced to
MAX_RETRY_AFTER_S = 30
MAX_IDLE_CLIENTS = 1000  # whose share is remembered
ANSWERS_REMEMBERED = 20
ERROR_SHARE = 0.05  # of a new error in their average


@dataclass(slots=True, eq=False)
class QueueEntry:
    """One request for an engine, whose sequences share the prompt."""

    client: str
    num_prompt_tokens: int
    max_tokens: int  # of each sequence
    num_sequences: int
    arrived_s: float
    deadline_s: float = math.inf
    priority: float = DEFAULT_PRIORITY  # 1 is the most urgent
    is_streaming: bool = False
    is_further: bool = False  # it belongs to an answer of which another request was let in
    is_express: bool = False
    queued_s: float = 0.0  # when the engine got it: the client may have sent its body until then
    expected_s: float | None = None  # its wait, if it was asked when it was let in
    started_step: int | None = None
    has_begun: bool = False  # a token was sent
    num_open: int = 0  # sequences in the engine
    charged_s: float = 0.0

    @property
    def priority_class(self) -> str:
        return priority_class(self.priority)


def priority_class(priority: float) -> str:
    """One of `shared/state.py: PRIORITIES`."""
    return "default" if priority == DEFAULT_PRIORITY else "high" if priority > DEFAULT_PRIORITY else "low"


class ClientLine:
    """The waiting requests of one client and one priority, in the order of their arrival."""

    def __init__(self) -> None:
        self.entries: deque[QueueEntry] = deque()
        self.num_prompt_tokens = self.max_output_tokens = 0

    def add(self, entry: QueueEntry) -> None:
        self.entries.append(entry)
        self._count(entry, 1)

    def remove(self, entry: QueueEntry) -> None:
        if self.entries[0] is entry:
            self.entries.popleft()
        else:
            self.entries.remove(entry)
        self._count(entry, -1)

    def _count(self, entry: QueueEntry, sign: int) -> None:
        self.num_prompt_tokens += sign * entry.num_prompt_tokens
        self.max_output_tokens += sign * entry.max_tokens * entry.num_sequences


@dataclass(slots=True, eq=False)
class Client:
    """One client, and the engine's time that it has had."""

    had_s: float
    lines: dict[float, ClientLine] = field(default_factory=dict)  # that are not empty, by priority
    num_running: int = 0  # sequences


class RequestQueue:
    """The requests that wait for one engine, and those that it has."""

    def __init__(self, max_num_sequences: int, max_wait_s: float, num_express: int = 0) -> None:
        self.speed = Speed()
        self.first_token_patience, self.patience = ClientPatience(), ClientPatience()
        self.is_overloaded = False
        self.num_waiting = 0  # requests
        self.wait_error_s = 0.0  # how far the expected waits were off, on average
        self._max_num_sequences, self._num_express, self._max_wait_s = max_num_sequences, num_express, max_wait_s
        self._places = max_num_sequences  # in use; fewer while a full batch takes longer than clients wait
        self._longest_step_s = math.inf  # that answers in time
        self._num_running = self._num_express_running = 0  # sequences that the engine has, in the batch and beside it
        self._running: dict[QueueEntry, None] = {}
        self._clients: dict[str, Client] = {}
        self._had_s = 0.0  # the share of the client who was served last: a new one begins there
        self._num_steps = 0
        self._short_steps_s = 0.0  # since the last step
        self._answered_share = 1.0  # of `max_tokens`, on average
        self._num_answers = 0
        self._short_s = self._refused_s = 0.0  # when the queue was last short, and when a request was last refused

    # Who is let in.

    def offer(self, entry: QueueEntry, now: float) -> None:
        """Let a request in. Raises Overloaded if it would wait too long."""
        entry.queued_s = now
        is_asked = self.must_wait and self.speed.is_known and not entry.is_further and not self._may_be_express(entry)
        if is_asked and (why := self._why_refused(entry, now)):
            self._refused_s = now
            raise self.refusal(why)
        client = self._clients.get(entry.client)
        if client is None:
            client = self._clients[entry.client] = Client(self._had_s)
        if not client.lines and not client.num_running:
            least_s = min((other.had_s for other in self._clients.values() if other.lines), default=self._had_s)
            client.had_s = max(client.had_s, least_s)
        client.lines.setdefault(entry.priority, ClientLine()).add(entry)
        self.num_waiting += 1

    @property
    def must_wait(self) -> bool:
        return self.num_waiting > 0 or self._num_running >= self._places

    def _ahead_s(self, entry: QueueEntry) -> float:
        """The time that those take who go before a request.

        Of each other client go as many before it as fit into the time of its own client's requests up to it.
        """
        own = self._clients.get(entry.client)
        own_s = self._line_s(None if own is None else own.lines.get(entry.priority))
        ahead_s, turn_s = own_s, own_s + self._cost_s(entry.num_prompt_tokens, entry.max_tokens * entry.num_sequences)
        for client in self._clients.values():
            for priority, line in client.lines.items():
                if priority > entry.priority:
                    ahead_s += self._line_s(line)
                elif priority == entry.priority and client is not own:
                    ahead_s += min(turn_s, self._line_s(line))
        return ahead_s

    def _why_refused(self, entry: QueueEntry, now: float) -> str:
        """Return why a request would wait too long, or "". Notes what it is expected to wait."""
        ahead_s, own_s = self._ahead_s(entry), self.service_s(entry)
        wait_s = entry.expected_s = self._next_end_s() + ahead_s
        takes_s, left_s = wait_s + own_s, entry.deadline_s - now
        first_s, whole_s = self.first_token_patience.seconds(now), self.patience.seconds(now)
        if self.is_overloaded and ahead_s > TARGET_S:
            return f"the queue is long, and it would wait {wait_s:.1f} s"
        if wait_s > self._max_wait_s:
            return f"it would wait {wait_s:.1f} s, of at most {self._max_wait_s:g}"
        if takes_s > left_s:
            return f"it would take {takes_s:.1f} s, and has {max(0.0, left_s):.1f}"
        if entry.is_streaming and wait_s > first_s:
            return f"it would wait {wait_s:.1f} s, and clients leave after {first_s:.1f}"
        if own_s <= PART * whole_s < takes_s:
            return f"it would take {takes_s:.1f} s, and clients leave after {whole_s:.1f}"
        return ""

    def refusal(self, why: str) -> Overloaded:
        """An error that says when to come again: when those who wait now have started, give or take a fifth."""
        error = Overloaded(f"the engine is busy: {why}")
        seconds = max(self._waiting_s(), 1) * random.uniform(0.8, 1.2)
        error.retry_after_s = min(math.ceil(seconds), MAX_RETRY_AFTER_S)
        return error

    def service_s(self, entry: QueueEntry) -> float:
        """The time from its start to its end, while the engine is full."""
        tokens_s = entry.max_tokens * self._answered_share * self.speed.step_s
        return entry.num_prompt_tokens * self.speed.prompt_token_s + tokens_s

    def _cost_s(self, num_prompt_tokens: int, max_output_tokens: int) -> float:
        """The engine's time that so many tokens take."""
        num_output_tokens = max_output_tokens * self._answered_share
        return num_prompt_tokens * self.speed.prompt_token_s + num_output_tokens * self.speed.output_token_s

    def _line_s(self, line: ClientLine | None) -> float:
        return 0.0 if line is None else self._cost_s(line.num_prompt_tokens, line.max_output_tokens)

    def _waiting_s(self) -> float:
        """The time that all who wait take."""
        return sum(self._line_s(line) for client in self._clients.values() for line in client.lines.values())

    def _next_end_s(self) -> float:
        """The time until a running request is expected to end."""
        if self._num_running < self._places:
            return 0.0
        batch = (entry for entry in self._running if not entry.is_express)
        ends = (entry.max_tokens * self._answered_share + (entry.started_step or 0) for entry in batch)
        return max(0.0, min(ends, default=0.0) - self._num_steps) * self.speed.step_s

    # Who is next.

    def start(self, now: float) -> Iterator[QueueEntry]:
        """Yield the requests to give to the engine now."""
        self._watch(now)
        self._set_places(now)
        while found := self._next():
            client, entry = found
            self._forget(entry)
            if entry.expected_s is not None:
                error_s = abs(now - entry.queued_s - entry.expected_s)
                self.wait_error_s += ERROR_SHARE * (error_s - self.wait_error_s)
            entry.started_step, entry.num_open = self._num_steps, entry.num_sequences
            entry.charged_s = self._cost_s(entry.num_prompt_tokens, entry.max_tokens * entry.num_sequences)
            self._had_s = max(self._had_s, client.had_s)
            client.had_s += entry.charged_s
            self._count(entry, client, entry.num_sequences)
            self._running[entry] = None
            yield entry

    def _next(self) -> tuple[Client, QueueEntry] | None:
        """The request whose turn it is, and its client. While the batch is full only an express place may be free."""
        if not self.num_waiting:
            return None
        waiting = [client for client in self._clients.values() if client.lines]
        is_full = self._num_running >= self._places
        if is_full:
            waiting = [one for one in waiting if not one.num_running and self._fits_express(self._first(one))]
        if not waiting:
            return None
        client = min(waiting, key=lambda client: (-max(client.lines), client.had_s))
        entry = self._first(client)
        entry.is_express = is_full
        return client, entry

    def _first(self, client: Client) -> QueueEntry:
        return client.lines[max(client.lines)].entries[0]

    def _set_places(self, now: float) -> None:
        """Let the batch be the largest that answers in PART of the time that clients wait, if any does."""
        most, whole_s = self._max_num_sequences, self.patience.seconds(now)
        num_tokens = sum(entry.max_tokens for entry in self._running) / max(1, len(self._running))
        self._longest_step_s = PART * whole_s / max(1.0, self._answered_share * num_tokens)
        if self._longest_step_s < self.speed.least_step_s:
            self._longest_step_s = math.inf
        self._places = int(min(most, max(MIN_PLACES, self.speed.num_sequences(self._longest_step_s))))

    def num_by_class(self) -> tuple[Counter[str], Counter[str]]:
        """The requests of each class of priority that wait, and those that the engine has."""
        waiting: Counter[str] = Counter()
        for client in self._clients.values():
            for priority, line in client.lines.items():
                waiting[priority_class(priority)] += len(line.entries)
        return waiting, Counter(entry.priority_class for entry in self._running)

    @property
    def num_busy_clients(self) -> int:
        return sum(bool(client.lines or client.num_running) for client in self._clients.values())

    def _may_be_express(self, entry: QueueEntry) -> bool:
        client = self._clients.get(entry.client)
        is_idle = client is None or not (client.num_running or client.lines)
        return is_idle and self._fits_express(entry)

    def _fits_express(self, entry: QueueEntry) -> bool:
        """Whether a place is free for a request of one sequence: no client gets several."""
        return entry.num_sequences == 1 and self._num_express_running < self._num_express

    def _watch(self, now: float) -> None:
        """Set `is_overloaded` when the queue was longer than TARGET_S for OVERLOADED_AFTER_S.

        Clear it when nobody was refused for that long.
        """
        if self.is_overloaded:
            self.is_overloaded = now - self._refused_s < OVERLOADED_AFTER_S
            self._short_s = now
        elif not self.num_waiting or self._waiting_s() < TARGET_S:
            self._short_s = now
        elif now - self._short_s > OVERLOADED_AFTER_S:
            self.is_overloaded, self._refused_s = True, now

    # Who goes.

    def expired(self, now: float) -> list[tuple[QueueEntry, LmiError]]:
        """Take out the waiting requests that cannot be answered in time any more, each with its error."""
        found: list[tuple[QueueEntry, LmiError]] = []
        waiting = [line.entries for client in self._clients.values() for line in client.lines.values()]
        for entry in itertools.chain.from_iterable(waiting):
            if now > entry.deadline_s:
                found.append((entry, DeadlineExceeded("the time for this request ran out while it waited")))
            elif now - entry.queued_s > self._max_wait_s and not entry.is_further:
                found.append((entry, self.refusal(f"it has waited {now - entry.queued_s:.1f} s")))
            elif now + self.service_s(entry) > entry.deadline_s:
                found.append((entry, self.refusal("it cannot end before its deadline any more")))
        for entry, _ in found:
            self.remove(entry, now)
        return found

    def note_token(self, entry: QueueEntry, now: float) -> None:
        """The first token of a request was sent."""
        entry.has_begun = True
        if entry.is_streaming:
            self.first_token_patience.note(now - entry.arrived_s, has_left=False, now=now)

    def note_prompt(self, entry: QueueEntry, num_prompt_tokens: int) -> None:
        """The engine has read the images of a running request and knows the length of its prompt: its client pays."""
        self._clients[entry.client].had_s += self._cost_s(num_prompt_tokens - entry.num_prompt_tokens, 0)
        entry.num_prompt_tokens = num_prompt_tokens

    def note_sequence_end(self, entry: QueueEntry) -> None:
        """One of several sequences of a request has ended."""
        entry.num_open -= 1
        self._count(entry, self._clients[entry.client], -1)

    def remove(self, entry: QueueEntry, now: float, *, has_left: bool = False, is_answered: bool = False) -> None:
        """Forget a request that has ended, or whose client has gone, wherever it is."""
        if entry.started_step is None:
            self._forget(entry)
        else:
            self._end(entry, is_answered=is_answered)
        waited_s = now - entry.arrived_s
        self.patience.note(waited_s, has_left=has_left, now=now)
        if entry.is_streaming and not entry.has_begun:
            self.first_token_patience.note(waited_s, has_left=has_left, now=now)
        self._tidy()

    def _end(self, entry: QueueEntry, *, is_answered: bool) -> None:
        """Give back the places of a running request, and what its client paid for tokens that were not made."""
        assert entry.started_step is not None
        client = self._clients[entry.client]
        self._count(entry, client, -entry.num_open)
        del self._running[entry]
        share = min(1.0, max(1, self._num_steps - entry.started_step) / entry.max_tokens)
        unused = max(0.0, self._answered_share - share) * entry.max_tokens * entry.num_sequences
        client.had_s -= min(unused * self.speed.output_token_s, entry.charged_s)
        if is_answered:
            self._num_answers = min(self._num_answers + 1, ANSWERS_REMEMBERED)
            self._answered_share += (share - self._answered_share) / self._num_answers

    def _count(self, entry: QueueEntry, client: Client, num_sequences: int) -> None:
        client.num_running += num_sequences
        if entry.is_express:
            self._num_express_running += num_sequences
        else:
            self._num_running += num_sequences

    def _forget(self, entry: QueueEntry) -> None:
        lines = self._clients[entry.client].lines
        lines[entry.priority].remove(entry)
        if not lines[entry.priority].entries:
            del lines[entry.priority]
        self.num_waiting -= 1

    def _tidy(self) -> None:
        """Forget clients who are served no worse if they begin anew."""
        if len(self._clients) > MAX_IDLE_CLIENTS:
            busy = {name: one for name, one in self._clients.items() if one.lines or one.num_running}
            self._clients = busy | {n: one for n, one in self._clients.items() if one.had_s > self._had_s}

    def note_step(self, seconds: float, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """A step of the engine has ended, `seconds` after the one before it.

        A short step of express requests beside a full batch is added to the next step: the batch waits for both.
        """
        if self._num_running >= self._places and 0 < num_output_tokens <= self._num_express_running < self._places:
            self._short_steps_s += seconds
            return
        seconds, self._short_steps_s = seconds + self._short_steps_s, 0.0
        self._num_steps += 1
        if num_output_tokens:
            self.speed.least_step_s = min(self.speed.least_step_s, seconds)
        if self._num_running >= self._places or self.num_waiting or seconds > self._longest_step_s:
            num_sequences = self._num_running + self._num_express_running
            self.speed.note(seconds, num_prompt_tokens, num_output_tokens, num_sequences)
