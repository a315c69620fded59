"""An engine that is a clock, behind a real queue.

A step takes `STEP_S`, and a bit for each row and for each token of a prompt. Times are seconds of
the engine's clock; no time passes outside.
"""

import heapq
import math
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lmi.engine.overload import LearningQueue
from lmi.engine.queue import QueueEntry
from lmi.errors import LmiError, Overloaded

STEP_S = 0.02
ROW_S = 0.0007
PROMPT_TOKEN_S = 0.0002
PLACES = 64
# Tokens of an answer, and of a prompt.
TOKENS = 32
PROMPT = 32
# How long a full engine takes for an answer to each of its places.
FULL_S = TOKENS * (STEP_S + PLACES * ROW_S) + PLACES * PROMPT * PROMPT_TOKEN_S
# Answers a second of a full engine.
CAPACITY = PLACES / FULL_S
FOREVER = 1e9
# Waiting requests that are late are looked for so often.
LOOK_EVERY_S = 0.2


WHOLE = "whole"
REFUSED = "refused"
LATE = "late"
LEFT = "left"


class End(NamedTuple):
    """How a request ended, and when: WHOLE, REFUSED, LATE or LEFT."""

    outcome: str
    entry: QueueEntry
    at_s: float


class Departure(NamedTuple):
    """When a request may end before its answer. The id only gives equal times an order."""

    at_s: float
    entry_id: int
    entry: QueueEntry


@dataclass(order=True)
class Arrival:
    """A request, and when it comes."""

    at_s: float
    entry: QueueEntry = field(compare=False)
    # The client leaves after this time, and sooner where it has no token after `first_s`.
    patience_s: float = field(default=FOREVER, compare=False)
    first_s: float = field(default=FOREVER, compare=False)
    num_tokens: int = field(default=TOKENS, compare=False)
    # How often it has been refused, and whether it comes again when the refusal says.
    num_refused: int = field(default=0, compare=False)
    comes_again: bool = field(default=False, compare=False)


def arrival(
    at_s: float,
    client: str = "a",
    *,
    patience_s: float = FOREVER,
    first_s: float = FOREVER,
    num_tokens: int = TOKENS,
    comes_again: bool = False,
    **more: Any,
) -> Arrival:
    """A streamed request; `more` are fields of its entry."""
    fields: dict[str, Any] = {
        "num_prompt_tokens": PROMPT,
        "max_tokens": num_tokens,
        "num_sequences": 1,
        "is_streaming": True,
        **more,
    }
    entry = QueueEntry(client, arrived_s=at_s, **fields)
    return Arrival(at_s, entry, patience_s, first_s, num_tokens, comes_again=comes_again)


def poisson(rate: float, until_s: float, *, seed: int = 1, **more: Any) -> list[Arrival]:
    """Requests that come independently, `rate` a second."""
    draw = random.Random(seed)
    at_s = 0.0
    arrivals = []
    while (at_s := at_s + draw.expovariate(rate)) < until_s:
        arrivals.append(arrival(at_s, **more))

    return arrivals


def hog(name: str, at_s: float, num_sequences: int) -> list[Arrival]:
    """One body with 128 prompts, and so many long answers to each."""
    more: dict[str, Any] = {"num_tokens": 200, "num_sequences": num_sequences}
    return [arrival(at_s + 0.002 * i, name, is_further=i > 0, **more) for i in range(128)]


class Engine:
    """Runs requests, and notes how each ended."""

    def __init__(self, queue: LearningQueue, step_s: float = STEP_S) -> None:
        self.queue = queue
        self.ends: list[End] = []
        # By entry: from its arrival to its first token.
        self.first_s: dict[QueueEntry, float] = {}
        # Between these times a step takes four times as long.
        self.slow_from_s = math.inf
        self.slow_until_s = math.inf
        self._step_s = step_s
        self._now = 0.0
        self._looked_s = 0.0
        self._waiting: list[Arrival] = []
        # By entry: how many tokens are to come.
        self._running: dict[QueueEntry, int] = {}
        self._arrivals: dict[QueueEntry, Arrival] = {}
        # A heap: at its deadline, and when its client leaves.
        self._departures: list[Departure] = []

    def run(self, arrivals: Iterable[Arrival], until_s: float) -> Counter[str]:
        """Run until a time. Returns how many requests ended in each way."""
        self._waiting = sorted(arrivals)
        heapq.heapify(self._waiting)
        while self._now < until_s:
            while self._waiting and self._waiting[0].at_s <= self._now:
                self._arrive(heapq.heappop(self._waiting))

            self._lose_the_impatient()
            started = list(self.queue.start(self._now))
            for entry in started:
                self._running[entry] = self._arrivals[entry].num_tokens

            if self._running:
                self._step(started)
            else:
                self._now = self._waiting[0].at_s if self._waiting else until_s

        return Counter(end.outcome for end in self.ends)

    def _arrive(self, arrival: Arrival) -> None:
        """Offer a request to the queue, which may refuse it."""
        entry = arrival.entry
        try:
            self.queue.offer(entry, arrival.at_s)
        except LmiError as error:
            self._refuse(arrival, error)
            return

        self._arrivals[entry] = arrival
        ends_s = (
            entry.deadline_s,
            entry.arrived_s + arrival.patience_s,
            entry.arrived_s + arrival.first_s,
        )
        for end_s in set(ends_s):
            heapq.heappush(self._departures, Departure(end_s, id(entry), entry))

    def _refuse(self, arrival: Arrival, error: LmiError) -> None:
        self.ends.append(End(REFUSED, arrival.entry, arrival.at_s))
        if arrival.comes_again and isinstance(error, Overloaded):
            arrival.at_s += error.retry_after_s or 0
            arrival.num_refused += 1
            heapq.heappush(self._waiting, arrival)

    def _lose_the_impatient(self) -> None:
        """End the requests that are late, and those whose clients leave."""
        if self._now - self._looked_s > LOOK_EVERY_S:
            self._looked_s = self._now
            for entry, _ in self.queue.expired(self._now):
                self._end(LATE, entry)

        while self._departures and self._departures[0].at_s <= self._now:
            entry = heapq.heappop(self._departures).entry
            arrival = self._arrivals.get(entry)
            if arrival is None:
                # It has ended before.
                continue

            waited_s = self._now - entry.arrived_s
            if self._now >= entry.deadline_s:
                # The server ends it, and nobody has left.
                self.queue.remove(entry, self._now)
                self._end(LATE, entry)
            elif waited_s >= arrival.patience_s or not entry.has_begun:
                self.queue.remove(entry, self._now, has_left=True)
                self._end(LEFT, entry)

    def _step(self, started: list[QueueEntry]) -> None:
        """Make a step of all, and before it a short one of the express requests alone, as
        `lmi_dist` does.
        """
        express = [entry for entry in self._running if entry.is_express and entry.has_begun]
        if express:
            self._advance(express, 0)

        num_prompt_tokens = sum(entry.num_prompt_tokens for entry in started)
        self._advance(list(self._running), num_prompt_tokens)

    def _advance(self, entries: list[QueueEntry], num_prompt_tokens: int) -> None:
        """Give each of some running requests a token of each of its answers."""
        num_rows = sum(entry.num_open for entry in entries)
        seconds = self._step_s + ROW_S * num_rows + PROMPT_TOKEN_S * num_prompt_tokens
        if self.slow_from_s <= self._now < self.slow_until_s:
            seconds *= 4

        self._now += seconds
        self.queue.note_step(seconds, num_prompt_tokens, num_rows)
        for entry in entries:
            if not entry.has_begun:
                self.first_s[entry] = self._now - entry.arrived_s
                self.queue.note_token(entry, self._now)

            self._running[entry] -= 1
            if not self._running[entry]:
                self.queue.remove(entry, self._now, is_answered=True)
                self._end(WHOLE, entry)

    def _end(self, outcome: str, entry: QueueEntry) -> None:
        self.ends.append(End(outcome, entry, self._now))
        self._running.pop(entry, None)
        del self._arrivals[entry]
