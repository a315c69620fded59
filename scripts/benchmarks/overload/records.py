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

# Of capacity: a second that delivers less has room
IDLE_BELOW = 0.9
# Of the tokens asked for: goodput is back
BACK_AT = 0.9
BACK_WINDOW_S = 2.0
BURST_WIDTH_S = 0.01


class Outcome(Enum):
    WHOLE = "whole"
    REFUSED = "refused"  # 503 or 429
    # The client left before the end
    LEFT = "left"
    # Any other status, a broken stream, a closed connection
    FAILED = "failed"


@dataclass(frozen=True)
class Record:
    """One request as its client saw it."""

    tenant: str
    # When it was due, not when a busy driver sent it
    start_s: float
    end_s: float
    outcome: Outcome
    num_wanted: int  # tokens
    # Of the pieces of text, ascending
    times_s: tuple[float, ...] = ()
    num_tokens: float = 0.0  # in these pieces
    retry_after_s: float | None = None
    reason: str = ""  # of a failure

    def tokens_in(self, from_s: float, to_s: float) -> float:
        """Tokens read in [from_s, to_s), where each piece has the same number of tokens."""
        num_pieces = bisect.bisect_left(self.times_s, to_s) - bisect.bisect_left(
            self.times_s, from_s
        )
        return num_pieces * self.num_tokens / len(self.times_s) if num_pieces else 0.0


def of(records: Iterable[Record], outcome: Outcome) -> list[Record]:
    return [record for record in records if record.outcome == outcome]


def delivered(records: Iterable[Record], from_s: float, to_s: float) -> float:
    """Tokens a second that clients read, also those who left before the end."""
    return sum(record.tokens_in(from_s, to_s) for record in records) / (to_s - from_s)


def goodput(records: Iterable[Record], from_s: float, to_s: float) -> float:
    """Tokens a second of answers that arrived whole before their client left."""
    return delivered(of(records, Outcome.WHOLE), from_s, to_s)


def servable(records: Iterable[Record], capacity: float, seconds: float, patience_s: float) -> int:
    """Number of refused requests that idle capacity could have served before their client left.

    Each takes its tokens from the idle part of the seconds between its arrival and its patience, so
    that no idle token serves two.
    """
    records = list(records)
    idle = [
        max(0.0, IDLE_BELOW * capacity - delivered(records, at, at + 1))
        for at in range(int(seconds))
    ]
    num_servable = 0
    for record in sorted(of(records, Outcome.REFUSED), key=lambda record: record.start_s):
        window = range(math.ceil(record.start_s), min(len(idle), int(record.start_s + patience_s)))
        if sum(idle[at] for at in window) < record.num_wanted:
            continue

        num_servable, missing = num_servable + 1, float(record.num_wanted)
        for at in window:
            num_tokens = min(missing, idle[at])
            idle[at], missing = idle[at] - num_tokens, missing - num_tokens

    return num_servable


def recovery_s(records: Iterable[Record], burst_s: float, seconds: float) -> float | None:
    """Seconds from a burst until goodput is back and stays, or None if it does not in this phase.

    It is back at the first arrival after the burst from which on, in every two seconds, requests
    that hold nine tenths of the tokens asked for are answered whole. The requests of the burst
    itself do not count.
    """
    after = [record for record in records if record.start_s > burst_s + BURST_WIDTH_S]
    back_s = None
    for from_s in sorted((record.start_s for record in after), reverse=True):
        if from_s + BACK_WINDOW_S > seconds:
            continue

        window = [record for record in after if from_s <= record.start_s < from_s + BACK_WINDOW_S]
        answered = sum(record.num_wanted for record in of(window, Outcome.WHOLE))
        if answered < BACK_AT * sum(record.num_wanted for record in window):
            break

        back_s = from_s - burst_s

    return back_s


def services(
    records: Iterable[Record], weights: Mapping[str, float], from_s: float, to_s: float
) -> dict[str, float]:
    """Tokens that each tenant got in [from_s, to_s), over its weight."""
    served = dict.fromkeys(weights, 0.0)
    for record in records:
        if record.tenant in served:
            served[record.tenant] += record.tokens_in(from_s, to_s) / weights[record.tenant]

    return served


def service_gap(
    records: Sequence[Record], weights: Mapping[str, float], from_s: float, to_s: float
) -> float:
    """The most that one tenant got more than another in any interval of [from_s, to_s): tokens over
    weight.

    All tenants must be backlogged meanwhile. It is the bound that virtual token counters promise
    (arXiv 2401.00588).
    """
    events = sorted(
        (at_s, record.tenant, record.num_tokens / len(record.times_s) / weights[record.tenant])
        for record in records
        if record.tenant in weights
        for at_s in record.times_s
        if from_s <= at_s < to_s
    )
    return max(
        (_range_of_difference(events, pair) for pair in itertools.combinations(weights, 2)),
        default=0.0,
    )


def _range_of_difference(
    events: Sequence[tuple[float, str, float]], pair: tuple[str, str]
) -> float:
    signs = {pair[0]: 1.0, pair[1]: -1.0}
    steps = (signs[tenant] * service for _, tenant, service in events if tenant in signs)
    differences = [0.0, *itertools.accumulate(steps)]
    return max(differences) - min(differences)


def waits_s(records: Iterable[Record], tenant: str) -> tuple[list[float], bool]:
    """How long a client that asks again after each refusal waited for each whole answer.

    Returns the waits and whether the last one is not over: then it counts as far as it went.
    """
    waits: list[float] = []
    began_s = None
    end_s = 0.0
    for record in sorted(
        (entry for entry in records if entry.tenant == tenant), key=lambda record: record.start_s
    ):
        began_s, end_s = record.start_s if began_s is None else began_s, record.end_s
        if record.outcome == Outcome.WHOLE:
            waits.append(end_s - began_s)
            began_s = None

    if began_s is not None:
        waits.append(end_s - began_s)

    return waits, began_s is not None
