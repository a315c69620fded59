"""What clients saw, as records, and the figures computed from them: goodput, refusals, recovery,
fairness.

No function here does I/O or reads a clock. Times are seconds from the start of a phase. A token
counts at the time when its client read it.
"""

import bisect
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

# A second that delivers less than this share of capacity has room.
IDLE_BELOW = 0.9
# Goodput is back where this share of the tokens asked for is answered, in a window of such length.
BACK_AT = 0.9
BACK_WINDOW_S = 2.0
# All requests of a burst come within it.
BURST_WIDTH_S = 0.01


class Outcome(Enum):
    WHOLE = "whole"
    # 503 or 429.
    REFUSED = "refused"
    # The client left before the end.
    LEFT = "left"
    # Any other status, a broken stream, a closed connection.
    FAILED = "failed"


@dataclass(frozen=True)
class Record:
    """One request as its client saw it."""

    tenant: str
    # When it was due, not when a busy driver sent it.
    start_s: float
    end_s: float
    outcome: Outcome
    # The tokens that it asked for.
    num_wanted: int
    # When each piece of text was read, ascending.
    times_s: tuple[float, ...] = ()
    # The tokens in these pieces.
    num_tokens: float = 0.0
    retry_after_s: float | None = None
    # Of a failure.
    reason: str = ""

    def tokens_in(self, from_s: float, to_s: float) -> float:
        """Return the tokens read in [from_s, to_s), where all pieces have equally many."""
        start = bisect.bisect_left(self.times_s, from_s)
        end = bisect.bisect_left(self.times_s, to_s)
        num_pieces = end - start
        if not num_pieces:
            return 0.0

        return num_pieces * self.num_tokens / len(self.times_s)


def of(records: Iterable[Record], outcome: Outcome) -> list[Record]:
    """Return the records with this outcome."""
    return [record for record in records if record.outcome == outcome]


def delivered(records: Iterable[Record], from_s: float, to_s: float) -> float:
    """Return the tokens a second that clients read, also those who left before the end."""
    return sum(record.tokens_in(from_s, to_s) for record in records) / (to_s - from_s)


def goodput(records: Iterable[Record], from_s: float, to_s: float) -> float:
    """Return the tokens a second of answers that arrived whole before their client left."""
    return delivered(of(records, Outcome.WHOLE), from_s, to_s)


def servable(records: Iterable[Record], capacity: float, seconds: float, patience_s: float) -> int:
    """Return how many refused requests idle capacity could have served before their client left.

    Each takes its tokens from the idle part of the seconds between its arrival and its patience, so
    that no idle token serves two.
    """
    all_records = list(records)
    idle_tokens: list[float] = []
    for second in range(int(seconds)):
        num_delivered = delivered(all_records, second, second + 1)
        idle_tokens.append(max(0.0, IDLE_BELOW * capacity - num_delivered))

    num_servable = 0
    for record in sorted(of(all_records, Outcome.REFUSED), key=lambda record: record.start_s):
        end = min(len(idle_tokens), int(record.start_s + patience_s))
        window = range(math.ceil(record.start_s), end)
        if sum(idle_tokens[second] for second in window) < record.num_wanted:
            continue

        num_servable += 1
        num_missing = float(record.num_wanted)
        for second in window:
            num_tokens = min(num_missing, idle_tokens[second])
            idle_tokens[second] -= num_tokens
            num_missing -= num_tokens

    return num_servable


def recovery_s(records: Iterable[Record], burst_s: float, seconds: float) -> float | None:
    """Return the seconds from a burst until goodput is back and stays, or None if it does not in
    this phase.

    It is back at the first arrival after the burst from which on, in every two seconds, requests
    that hold nine tenths of the tokens asked for are answered whole. The requests of the burst
    itself do not count.
    """
    later_records = [record for record in records if record.start_s > burst_s + BURST_WIDTH_S]
    starts_s = sorted((record.start_s for record in later_records), reverse=True)
    back_s = None
    # From the last arrival back to the first window with too few answers.
    for from_s in starts_s:
        to_s = from_s + BACK_WINDOW_S
        if to_s > seconds:
            continue

        window = [record for record in later_records if from_s <= record.start_s < to_s]
        num_answered = sum(record.num_wanted for record in of(window, Outcome.WHOLE))
        num_asked = sum(record.num_wanted for record in window)
        if num_answered < BACK_AT * num_asked:
            break

        back_s = from_s - burst_s

    return back_s


def services(
    records: Iterable[Record], weights: Mapping[str, float], from_s: float, to_s: float
) -> dict[str, float]:
    """Return the tokens that each tenant got in [from_s, to_s), over its weight."""
    served = dict.fromkeys(weights, 0.0)
    for record in records:
        if record.tenant in served:
            served[record.tenant] += record.tokens_in(from_s, to_s) / weights[record.tenant]

    return served


def service_gap(
    records: Sequence[Record], weights: Mapping[str, float], from_s: float, to_s: float
) -> float:
    """Return the most that one tenant got more than another in any interval of [from_s, to_s):
    tokens over weight.

    All tenants must be backlogged meanwhile. It is the bound that virtual token counters promise
    (arXiv 2401.00588).
    """
    pieces: list[Service] = []
    for record in records:
        if record.tenant not in weights or not record.times_s:
            continue

        of_piece = record.num_tokens / len(record.times_s) / weights[record.tenant]
        for at_s in record.times_s:
            if from_s <= at_s < to_s:
                pieces.append(Service(at_s, record.tenant, of_piece))

    pieces.sort()
    gaps = [_largest_gap(pieces, *pair) for pair in itertools.combinations(weights, 2)]
    return max(gaps, default=0.0)


class Service(NamedTuple):
    """A piece of text that a tenant read: its tokens over the tenant's weight."""

    at_s: float
    tenant: str
    amount: float


def _largest_gap(pieces: Iterable[Service], tenant: str, rival: str) -> float:
    """Return the most that either got more than the other in any interval."""
    difference = 0.0
    lowest = 0.0
    highest = 0.0
    for piece in pieces:
        if piece.tenant == tenant:
            difference += piece.amount
        elif piece.tenant == rival:
            difference -= piece.amount

        lowest = min(lowest, difference)
        highest = max(highest, difference)

    return highest - lowest


def waits_s(records: Iterable[Record], tenant: str) -> tuple[list[float], bool]:
    """Return how long a client that asks again after each refusal waited for each whole answer.

    Returns too whether the last wait is not over: then it counts as far as it went.
    """
    waits: list[float] = []
    began_s = None
    end_s = 0.0
    of_tenant = [record for record in records if record.tenant == tenant]
    for record in sorted(of_tenant, key=lambda record: record.start_s):
        if began_s is None:
            began_s = record.start_s

        end_s = record.end_s
        if record.outcome == Outcome.WHOLE:
            waits.append(end_s - began_s)
            began_s = None

    if began_s is not None:
        waits.append(end_s - began_s)

    return waits, began_s is not None
