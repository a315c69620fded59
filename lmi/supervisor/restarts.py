"""Decides when a process may start again and when a live one counts as hung. Every time is `time.monotonic()`."""

import math
from collections import deque
from dataclasses import dataclass
from typing import Self

from lmi.settings.config import EngineConfig
from lmi.shared.state import EngineRecord, Phase

FIRST_DELAY_S = 0.2
LONGEST_DELAY_S = 30.0
STEADY_S = 60.0  # a process without a record that ran this long counts as one that was ready
IDLE_BEAT_S = 10.0
KILL_S = 3.0  # for a process that ends, by itself or because it was told to

# After SIGTERM new requests get 503 for a moment, the port closes, open answers end, and then the rest are cut.
DRAIN_CUT_S = 1.5  # after drain_timeout, when the remaining front ends are killed
DRAIN_END_S = 2.5  # after drain_timeout, when all remaining processes are killed

LATE_TURN_S = 1.0  # the supervisor's loop turns five times a second; if a turn is so late, the process did not run


def drain_notice_s(drain_timeout_s: float) -> float:
    """Return how long the port stays open and answers 503, so that a load balancer chooses another server."""
    return min(1.0, drain_timeout_s / 4)


class RestartTable:
    """The deaths of one process and the delay after each. After too many deaths there is no next start.

    A process that was ready starts again at once. The delay doubles with each one in a row that was never ready. Too
    many deaths are `max_deaths` in `window_s`, or as many in a row, over any time, of processes that were never ready.
    """

    def __init__(self, max_deaths: int, window_s: float, first_delay_s: float = FIRST_DELAY_S) -> None:
        self.max_deaths = max_deaths
        self._window_s = window_s
        self._first_delay_s = first_delay_s
        self._deaths: deque[float] = deque()
        self._num_failed_starts = 0  # in a row

    @property
    def num_deaths(self) -> int:
        """The number of deaths that counted when the last one was noted."""
        return max(len(self._deaths), self._num_failed_starts)

    def delay_s(self, died_s: float, *, was_ready: bool) -> float | None:
        """Note a death. Returns how long to wait before the next start, or None after too many deaths."""
        self._deaths.append(died_s)
        self._num_failed_starts = 0 if was_ready else self._num_failed_starts + 1
        while self._deaths[0] < died_s - self._window_s:
            self._deaths.popleft()
        if self.num_deaths >= self.max_deaths:
            return None
        if was_ready:
            return 0.0
        return float(min(self._first_delay_s * 2 ** (self._num_failed_starts - 1), LONGEST_DELAY_S))


class Pauses:
    """The times when this process did not run: it was stopped, its container was paused, or the machine slept.

    Processes of one machine pause together, so that time must not count against any of them. Call `note` in each turn
    of a loop. A turn that begins more than `late_s` after the one before ends a pause.
    """

    def __init__(self, late_s: float) -> None:
        self._late_s = late_s
        self._turn_s: float | None = None
        self._pauses: deque[tuple[float, float]] = deque(maxlen=1000)

    def note(self, now: float) -> float:
        """Note a turn. Returns the seconds of the pause that it ends, or 0 if it ends none."""
        last_s, self._turn_s = self._turn_s, now
        if last_s is None or now - last_s <= self._late_s:
            return 0.0
        self._pauses.append((last_s, now))
        return now - last_s

    def ran_s(self, since_s: float, now: float) -> float:
        """Return the seconds from `since_s` to `now` without the pauses between them."""
        pauses = ((max(start, since_s), min(end, now)) for start, end in self._pauses)
        return now - since_s - sum(max(0.0, end - start) for start, end in pauses)


NO_PAUSES = Pauses(math.inf)


@dataclass(frozen=True, slots=True)
class HangLimits:
    """How long a process may do what it does, in seconds."""

    loading_s: float
    first_step_s: float
    step_s: float
    work: str  # what it did too long when it is busy
    waiting_counts: bool = True  # a step takes in the requests that wait

    @classmethod
    def of(cls, engine: EngineConfig) -> Self:
        steps = engine.first_step_timeout_s, engine.step_timeout_s
        return cls(engine.model_loading_timeout_s, *steps, "made no step though work waits")


def hang(
    record: EngineRecord, limits: HangLimits, began_s: float, now: float, pauses: Pauses = NO_PAUSES
) -> str | None:
    """Return why a live process counts as hung, or None.

    A busy engine hangs if it makes no step, an idle one if it gives no sign of life, and a loading one if it takes too
    long, and so does one that stopped by itself and does not end. A long prompt or a compilation advances the step
    counter in small parts, so its engine does not count as hung. `began_s` is when the load or the end began.
    """
    if record.phase in (Phase.STARTING, Phase.LOADING):
        since_s, what, limit_s = began_s, "did not finish loading", limits.loading_s
    elif record.phase == Phase.DRAINING:
        since_s, what, limit_s = began_s, "stopped its work and did not end", KILL_S
    elif record.phase != Phase.READY:
        return None
    elif record.num_running or (limits.waiting_counts and record.num_waiting):
        since_s, what, limit_s = record.step_s, limits.work, limits.step_s if record.step else limits.first_step_s
    else:
        since_s, what, limit_s = record.beat_s, "gave no sign of life", IDLE_BEAT_S
    waited_s = pauses.ran_s(since_s, now)
    return f"{what} for {waited_s:.1f} s (limit {limit_s:g} s)" if waited_s > limit_s else None
