"""The queue of one engine: who waits, who is next, and who has waited too long. No I/O, and no
clock.

Clients share the engine by what their requests cost, here in tokens: the next one is that of the
client who had the least. The queue of a server's engines is the one of `overload.py`, which refuses
early and has express places.
"""

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from msgspec import Struct, field

from lmi.errors import DeadlineExceeded, LmiError, Overloaded
from lmi.executor import DEFAULT_PRIORITY

# The shares of so many clients who do nothing are remembered.
MAX_IDLE_CLIENTS = 1000
ANSWERS_REMEMBERED = 20


class QueueEntry(Struct, eq=False):
    """One request for an engine, whose sequences share the prompt."""

    client: str
    num_prompt_tokens: int
    # Those of each sequence.
    max_tokens: int
    num_sequences: int
    arrived_s: float
    deadline_s: float = math.inf
    # From 0 to 1; the highest is the most urgent.
    priority: float = DEFAULT_PRIORITY
    is_streaming: bool = False
    # It belongs to an answer of which another request was let in.
    is_further: bool = False
    # It has a place beside the batch.
    is_express: bool = False
    # When the server had all of it: from then on it waits. None: since `queued_s`.
    received_s: float | None = None
    # When this engine got it: the client may have sent its body until then.
    queued_s: float = 0.0
    # The wait that was expected when it was let in, if it was.
    expected_s: float | None = None
    started_s: float | None = None
    started_step: int | None = None
    # A token was sent.
    has_begun: bool = False
    # The sequences that the engine has of it.
    num_open: int = 0
    charged: float = 0.0

    def waited_s(self, now: float) -> float:
        """The seconds that it has waited for a place, in this queue and in those of other engines
        before.
        """
        since_s = self.queued_s if self.received_s is None else self.received_s
        return now - since_s


def priority_class(priority: float) -> str:
    """One of `shared/state.py: PRIORITIES`."""
    if priority == DEFAULT_PRIORITY:
        return "default"

    return "high" if priority > DEFAULT_PRIORITY else "low"


# The waiting requests of one client and one priority, in the order of their arrival.
Line = deque[QueueEntry]


class Client(Struct, eq=False):
    """One client, and what it has had of the engine."""

    had: float
    # Those that are not empty, by priority.
    lines: dict[float, Line] = field(default_factory=dict)
    # Sequences, not requests.
    num_running: int = 0

    @property
    def first(self) -> QueueEntry:
        """The next of the requests that wait."""
        return self.lines[max(self.lines)][0]


class Turn(NamedTuple):
    """The request that is next, and its client."""

    client: Client
    entry: QueueEntry


class Ahead(Struct):
    """The waiting requests that go before one, and what they cost."""

    num_requests: int = 0
    cost: float = 0.0

    def add(self, costs: Iterable[float]) -> None:
        for cost in costs:
            self.num_requests += 1
            self.cost += cost


class RequestQueue:
    """The requests that wait for one engine, and those that it has."""

    _new_line: type[Line] = deque

    def __init__(self, max_num_sequences: int, max_wait_s: float = math.inf) -> None:
        self.num_waiting = 0
        # How far the expected waits were off, on average, where waits are expected.
        self.wait_error_s = 0.0

        self._max_num_sequences = max_num_sequences
        self._max_wait_s = max_wait_s
        # The places of the batch that are in use.
        self._places = max_num_sequences
        # The sequences in the batch.
        self._num_running = 0
        self._running: dict[QueueEntry, None] = {}
        self._clients: dict[str, Client] = {}

        # The share of the client who was served last: a new one begins there.
        self._had = 0.0
        self._num_steps = 0
        # The part of `max_tokens` that answers have, on average.
        self._answered_share = 1.0
        self._num_answers = 0

    # What a request costs.

    def _price(self, num_prompt_tokens: float, num_output_tokens: float) -> float:
        return num_prompt_tokens + num_output_tokens

    def _cost(self, num_prompt_tokens: int, max_output_tokens: int) -> float:
        """What a request is expected to cost: few answers are as long as they may be."""
        return self._price(num_prompt_tokens, max_output_tokens * self._answered_share)

    # Who waits.

    def offer(self, entry: QueueEntry, now: float) -> None:
        """Let a request in. A subclass may raise Overloaded instead."""
        entry.queued_s = now
        client = self._clients.get(entry.client)
        if client is None:
            client = self._clients[entry.client] = Client(self._had)

        if not client.lines and not client.num_running:
            shares = (client.had for client in self._clients.values() if client.lines)
            least_share = min(shares, default=self._had)
            client.had = max(client.had, least_share)

        line = client.lines.setdefault(entry.priority, self._new_line())
        line.append(entry)
        self.num_waiting += 1

    def refusal(self, reason: str) -> Overloaded:
        return Overloaded(f"the engine is busy: {reason}")

    def num_by_class(self) -> tuple[Counter[str], Counter[str]]:
        """The requests of each class of priority that wait, and those that the engine has."""
        waiting: Counter[str] = Counter()
        for client in self._clients.values():
            for priority, line in client.lines.items():
                waiting[priority_class(priority)] += len(line)

        return waiting, Counter(priority_class(entry.priority) for entry in self._running)

    @property
    def num_busy_clients(self) -> int:
        return sum(bool(client.lines or client.num_running) for client in self._clients.values())

    # Who is next.

    def start(self, now: float) -> Iterator[QueueEntry]:
        """Yield the requests to give to the engine now."""
        while turn := self._next():
            client, entry = turn
            self._forget(entry)
            entry.started_s = now
            entry.started_step = self._num_steps
            entry.num_open = entry.num_sequences
            entry.charged = self._cost_of(entry)

            # A client who comes now begins where the last served one was.
            self._had = max(self._had, client.had)
            client.had += entry.charged
            self._count(entry, client, entry.num_sequences)
            self._running[entry] = None
            yield entry

    def _next(self) -> Turn | None:
        """The request whose turn it is, and its client."""
        if not self.num_waiting or self._num_running >= self._places:
            return None

        return self._first_of(client for client in self._clients.values() if client.lines)

    def _first_of(self, clients: Iterable[Client]) -> Turn | None:
        """The turn of the client with the most urgent request, and of several the one who had least
        of the engine.
        """
        client = min(clients, key=lambda client: (-max(client.lines), client.had), default=None)
        return None if client is None else Turn(client, client.first)

    def ahead_of(self, entry: QueueEntry) -> Ahead:
        """Return what starts before a waiting request, if nobody comes or goes and all cost what is
        expected.

        The next request is that of the client who had the least: so this one starts when its own
        client has had those before it, and of another client go those that start while that one has
        had less.
        """
        sender = self._clients[entry.client]
        line_of_sender = list(sender.lines[entry.priority])
        before = line_of_sender[: line_of_sender.index(entry)]
        ahead = Ahead()
        ahead.add(map(self._cost_of, before))
        had_then = sender.had + ahead.cost

        # Clients before this one win ties.
        wins_ties = True
        for client in self._clients.values():
            wins_ties = wins_ties and client is not sender
            for priority, line in client.lines.items():
                if priority > entry.priority:
                    ahead.add(map(self._cost_of, line))
                elif priority == entry.priority and client is not sender:
                    ahead.add(self._costs_before(line, client.had, had_then, wins_ties))

        return ahead

    def _costs_before(
        self, line: Line, had: float, had_then: float, wins_ties: bool
    ) -> Iterator[float]:
        """Yield the costs of the requests that start before their client, who has had `had`, has
        had `had_then`.
        """
        for entry in line:
            if had > had_then or (had == had_then and not wins_ties):
                return

            cost = self._cost_of(entry)
            had += cost
            yield cost

    def _cost_of(self, entry: QueueEntry) -> float:
        return self._cost(entry.num_prompt_tokens, entry.max_tokens * entry.num_sequences)

    def expected_wait_s(self, entry: QueueEntry) -> float | None:
        """Return the seconds until a waiting request starts, None where no speed is known."""
        return None

    def prompt_s(self, num_tokens: int) -> float | None:
        """Return the seconds that so many tokens of a prompt take, None where no speed is known."""
        return None

    # Who goes.

    def expired(self, now: float) -> list[tuple[QueueEntry, LmiError]]:
        """Take out the waiting requests that cannot be answered in time any more, each with its
        error.
        """
        entries = [
            entry
            for client in self._clients.values()
            for line in client.lines.values()
            for entry in line
        ]
        expired = list[tuple[QueueEntry, LmiError]]()
        for entry in entries:
            error = self._lateness(entry, now)
            if error is not None:
                expired.append((entry, error))

        for entry, _ in expired:
            self.remove(entry, now)

        return expired

    def _lateness(self, entry: QueueEntry, now: float) -> LmiError | None:
        if now > entry.deadline_s:
            return DeadlineExceeded("the time for this request ran out while it waited")

        waited_s = entry.waited_s(now)
        if waited_s > self._max_wait_s and not entry.is_further:
            return self.refusal(f"it has waited {waited_s:.1f} s")

        return None

    def note_token(self, entry: QueueEntry, now: float) -> None:
        """The first token of a request was sent."""
        entry.has_begun = True

    def note_prompt(self, entry: QueueEntry, num_prompt_tokens: int) -> None:
        """The engine has read the images of a running request and knows the length of its prompt:
        its client pays.
        """
        num_further_tokens = num_prompt_tokens - entry.num_prompt_tokens
        self._clients[entry.client].had += self._cost(num_further_tokens, 0)
        entry.num_prompt_tokens = num_prompt_tokens

    def note_sequence_end(self, entry: QueueEntry) -> None:
        entry.num_open -= 1
        self._count(entry, self._clients[entry.client], -1)

    def note_step(self, seconds: float, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """A step of the engine has ended, `seconds` after the one before it."""
        self._num_steps += 1

    def remove(
        self, entry: QueueEntry, now: float, *, has_left: bool = False, is_answered: bool = False
    ) -> None:
        """Forget a request that has ended, or whose client has gone, wherever it is.

        One that ran gives back its places, and what its client paid for tokens that were not made.
        """
        if entry.started_step is None:
            self._forget(entry)
        else:
            self._end(entry, is_answered)

        if len(self._clients) > MAX_IDLE_CLIENTS:
            self._forget_idle_clients()

    def _end(self, entry: QueueEntry, is_answered: bool) -> None:
        client = self._clients[entry.client]
        self._count(entry, client, -entry.num_open)
        del self._running[entry]

        assert entry.started_step is not None
        num_steps = max(1, self._num_steps - entry.started_step)
        share = min(1.0, num_steps / entry.max_tokens)
        unused_share = max(0.0, self._answered_share - share)
        num_unused = unused_share * entry.max_tokens * entry.num_sequences
        client.had -= min(self._price(0, num_unused), entry.charged)

        if is_answered:
            self._num_answers = min(self._num_answers + 1, ANSWERS_REMEMBERED)
            self._answered_share += (share - self._answered_share) / self._num_answers

    def _forget_idle_clients(self) -> None:
        """Forget who had little: a client with less is served no worse if it begins anew."""
        busy = dict[str, Client]()
        had_more = dict[str, Client]()
        for name, client in self._clients.items():
            if client.lines or client.num_running:
                busy[name] = client

            if client.had > self._had:
                had_more[name] = client

        self._clients = busy | had_more

    def _count(self, entry: QueueEntry, client: Client, num_sequences: int) -> None:
        client.num_running += num_sequences
        self._num_running += num_sequences

    def _forget(self, entry: QueueEntry) -> None:
        lines = self._clients[entry.client].lines
        lines[entry.priority].remove(entry)
        if not lines[entry.priority]:
            del lines[entry.priority]

        self.num_waiting -= 1
