"""The queue of one engine: who waits, who is next, and who has waited too long. No I/O, and no
clock.

Clients share the engine by what their requests cost, here in tokens: the next one is that of the
client who had the least. The queue of a server's engines is the one of `overload.py`, which refuses
early and has express places.
"""

import itertools
import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from lmi.errors import DeadlineExceeded, LmiError, Overloaded
from lmi.executor import DEFAULT_PRIORITY

MAX_IDLE_CLIENTS = 1000  # whose share is remembered
ANSWERS_REMEMBERED = 20


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
    is_express: bool = False  # it has a place beside the batch
    received_s: float | None = (
        None  # when the server had all of it: from then on it waits. None: since `queued_s`
    )
    queued_s: float = 0.0  # when this engine got it: the client may have sent its body until then
    expected_s: float | None = None  # its wait, if it was asked when it was let in
    started_s: float | None = None
    started_step: int | None = None
    has_begun: bool = False  # a token was sent
    num_open: int = 0  # sequences in the engine
    charged: float = 0.0

    def waited_s(self, now: float) -> float:
        """The seconds that it has waited for a place, in this queue and in those of other engines
        before.
        """
        return now - (self.queued_s if self.received_s is None else self.received_s)


def priority_class(priority: float) -> str:
    """One of `shared/state.py: PRIORITIES`."""
    return (
        "default"
        if priority == DEFAULT_PRIORITY
        else "high"
        if priority > DEFAULT_PRIORITY
        else "low"
    )


Line = deque[
    QueueEntry
]  # the waiting requests of one client and one priority, in the order of their arrival


@dataclass(slots=True, eq=False)
class Client:
    """One client, and what it has had of the engine."""

    had: float
    lines: dict[float, Line] = field(default_factory=dict)  # that are not empty, by priority
    num_running: int = 0  # sequences

    @property
    def first(self) -> QueueEntry:
        """The next of the requests that wait."""
        return self.lines[max(self.lines)][0]


@dataclass(slots=True)
class Ahead:
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
        self.num_waiting = 0  # requests
        self.wait_error_s = (
            0.0  # how far the expected waits were off, on average, where waits are expected
        )
        self._max_num_sequences = max_num_sequences
        self._max_wait_s = max_wait_s
        self._places = max_num_sequences  # in use
        self._num_running = 0  # sequences in the batch
        self._running: dict[QueueEntry, None] = {}
        self._clients: dict[str, Client] = {}
        self._had = 0.0  # the share of the client who was served last: a new one begins there
        self._num_steps = 0
        self._answered_share = 1.0  # of `max_tokens`, on average
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
            least = min(
                (other.had for other in self._clients.values() if other.lines), default=self._had
            )
            client.had = max(client.had, least)

        client.lines.setdefault(entry.priority, self._new_line()).append(entry)
        self.num_waiting += 1

    def refusal(self, why: str) -> Overloaded:
        return Overloaded(f"the engine is busy: {why}")

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
        while found := self._next():
            client, entry = found
            self._forget(entry)
            entry.started_s = now
            entry.started_step = self._num_steps
            entry.num_open = entry.num_sequences
            entry.charged = self._cost(
                entry.num_prompt_tokens, entry.max_tokens * entry.num_sequences
            )
            self._had = max(self._had, client.had)
            client.had += entry.charged
            self._count(entry, client, entry.num_sequences)
            self._running[entry] = None
            yield entry

    def _next(self) -> tuple[Client, QueueEntry] | None:
        """The request whose turn it is, and its client."""
        if not self.num_waiting or self._num_running >= self._places:
            return None

        return self._first_of(client for client in self._clients.values() if client.lines)

    def _first_of(self, clients: Iterable[Client]) -> tuple[Client, QueueEntry] | None:
        client = min(clients, key=lambda client: (-max(client.lines), client.had), default=None)
        return None if client is None else (client, client.first)

    def ahead_of(self, entry: QueueEntry) -> Ahead:
        """Return what starts before a waiting request, if nobody comes or goes and all cost what is
        expected.

        The next request is that of the client who had the least: so this one starts when its own
        client has had those before it, and of another client go those that start while that one has
        had less.
        """
        own = self._clients[entry.client]
        own_line = list(own.lines[entry.priority])
        before = own_line[: own_line.index(entry)]
        ahead = Ahead()
        ahead.add(map(self._cost_of, before))
        had_then = own.had + ahead.cost
        wins_ties = True  # clients before this one do

        for client in self._clients.values():
            wins_ties = wins_ties and client is not own
            for priority, line in client.lines.items():
                if priority > entry.priority:
                    ahead.add(map(self._cost_of, line))
                elif priority == entry.priority and client is not own:
                    ahead.add(self._first(line, client.had, had_then, wins_ties))

        return ahead

    def _first(self, line: Line, had: float, had_then: float, wins_ties: bool) -> Iterator[float]:
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
        waiting = [line for client in self._clients.values() for line in client.lines.values()]
        asked = (
            (entry, self._lateness(entry, now)) for entry in itertools.chain.from_iterable(waiting)
        )
        found = [(entry, error) for entry, error in asked if error is not None]
        for entry, _ in found:
            self.remove(entry, now)

        return found

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
        self._clients[entry.client].had += self._cost(
            num_prompt_tokens - entry.num_prompt_tokens, 0
        )
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
            client = self._clients[entry.client]
            self._count(entry, client, -entry.num_open)
            del self._running[entry]
            share = min(1.0, max(1, self._num_steps - entry.started_step) / entry.max_tokens)
            unused = max(0.0, self._answered_share - share) * entry.max_tokens * entry.num_sequences
            client.had -= min(self._price(0, unused), entry.charged)
            if is_answered:
                self._num_answers = min(self._num_answers + 1, ANSWERS_REMEMBERED)
                self._answered_share += (share - self._answered_share) / self._num_answers

        if (
            len(self._clients) > MAX_IDLE_CLIENTS
        ):  # those with less are served no worse if they begin anew
            busy = {
                name: one for name, one in self._clients.items() if one.lines or one.num_running
            }
            self._clients = busy | {
                name: one for name, one in self._clients.items() if one.had > self._had
            }

    def _count(self, entry: QueueEntry, client: Client, num_sequences: int) -> None:
        client.num_running += num_sequences
        self._num_running += num_sequences

    def _forget(self, entry: QueueEntry) -> None:
        lines = self._clients[entry.client].lines
        lines[entry.priority].remove(entry)
        if not lines[entry.priority]:
            del lines[entry.priority]

        self.num_waiting -= 1
