"""Decides when a process may start again and when a live one counts as hung. Every time is
`time.monotonic()`.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Self

from lmi.settings.config import EngineConfig
from lmi.shared.state import EngineRecord, Phase

FIRST_DELAY_S = 0.2
LONGEST_DELAY_S = 30.0
# A process without a record that ran this long counts as one that was ready.
STEADY_S = 60.0
IDLE_BEAT_S = 10.0
# For a process that ends, by itself or because it was told to.
KILL_S = 3.0

# After SIGTERM new requests get 503 for a moment, the port closes, open answers end, and then the
# rest are cut.
# So long after drain_timeout the remaining front ends are killed.
DRAIN_CUT_S = 1.5
# So long after drain_timeout all remaining processes are killed.
DRAIN_END_S = 2.5

# A step that lasts longer than its limit goes on while a thread of the engine works in it with this
# share of a core at least, until a thread has worked for the limit, or the step has lasted for so
# many limits.
LEAST_SHARE = 0.02
MOST_LIMITS = 10
# How often the processor time of an engine is read while its step is long.
LOOKS_IN_A_LIMIT = 20

# The least time between two lines about pauses.
PAUSES_EVERY_S = 60.0
# The supervisor's loop turns five times a second; if a turn is so late, the process did not run.
LATE_TURN_S = 1.0


def drain_notice_s(drain_timeout_s: float) -> float:
    """Return how long the port stays open and answers 503, so that a load balancer chooses another
    server.
    """
    return min(1.0, drain_timeout_s / 4)


class RestartTable:
    """The deaths of one process and the delay after each. After too many deaths there is no next
    start.

    A process that was ready starts again at once. The delay doubles with each one in a row that was
    never ready. Too many deaths are `max_deaths` in `window_s`, or as many in a row, over any time,
    of processes that were never ready.
    """

    def __init__(
        self, max_deaths: int, window_s: float, first_delay_s: float = FIRST_DELAY_S
    ) -> None:
        self.max_deaths = max_deaths
        self._window_s = window_s
        self._first_delay_s = first_delay_s
        self._deaths: deque[float] = deque()
        # Those in a row.
        self._num_failed_starts = 0

    @property
    def num_deaths(self) -> int:
        """The number of deaths that counted when the last one was noted."""
        return max(len(self._deaths), self._num_failed_starts)

    def delay_s(self, died_s: float, *, was_ready: bool) -> float | None:
        """Note a death. Returns how long to wait before the next start, or None after too many
        deaths.
        """
        self._deaths.append(died_s)
        self._num_failed_starts = 0 if was_ready else self._num_failed_starts + 1
        while self._deaths[0] < died_s - self._window_s:
            self._deaths.popleft()

        if self.num_deaths >= self.max_deaths:
            return None

        if was_ready:
            return 0.0

        delay_s = self._first_delay_s * 2 ** (self._num_failed_starts - 1)
        return float(min(delay_s, LONGEST_DELAY_S))


class Pause(NamedTuple):
    start_s: float
    end_s: float


class Pauses:
    """The times when this process did not run: it was stopped, its container was paused, or the
    machine slept.

    Processes of one machine pause together, so that time must not count against any of them. Call
    `note` in each turn of a loop. A turn that begins more than `late_s` after the one before ends a
    pause.
    """

    def __init__(self, late_s: float) -> None:
        self._late_s = late_s
        self._turn_s: float | None = None
        self._pauses: deque[Pause] = deque(maxlen=1000)

    def note(self, now: float) -> float:
        """Note a turn. Returns the seconds of the pause that it ends, or 0 if it ends none."""
        last_s = self._turn_s
        self._turn_s = now
        if last_s is None or now - last_s <= self._late_s:
            return 0.0

        self._pauses.append(Pause(last_s, now))
        return now - last_s

    def ran_s(self, since_s: float, now: float) -> float:
        """Return the seconds from `since_s` to `now` without the pauses between them."""
        paused_s = sum(
            max(0.0, min(pause.end_s, now) - max(pause.start_s, since_s)) for pause in self._pauses
        )
        return now - since_s - paused_s


NO_PAUSES = Pauses(math.inf)


class PauseNotes:
    """Tells the first pause at once, and those that follow together, once in `every_s` at most."""

    def __init__(self, every_s: float = PAUSES_EVERY_S) -> None:
        self._every_s = every_s
        self._told_s = -math.inf
        self._num_pauses = 0
        self._paused_s = 0.0

    def note(self, paused_s: float, now: float) -> str | None:
        """Note a turn and the pause that it ends, if any. Returns what to tell now."""
        self._num_pauses += paused_s > 0
        self._paused_s += paused_s
        if not self._num_pauses or now - self._told_s < self._every_s:
            return None

        several = f" in {self._num_pauses} pauses" if self._num_pauses > 1 else ""
        text = (
            f"the machine gave this process no time for {self._paused_s:.1f} s{several} (busy, or "
            "suspended); deadlines are extended"
        )
        self._told_s = now
        self._num_pauses = 0
        self._paused_s = 0.0
        return text


class StepWork:
    """How the threads of an engine work in a step that takes long, so that an engine which starves
    is not killed.

    Call `look` in each turn while the engine is busy. `read_times` returns the processor time of
    each thread by its id, without the one that never steps. The time before the first look at a
    step counts as worked.
    """

    def __init__(self, read_times: Callable[[], Mapping[int, float]]) -> None:
        self._read_times = read_times
        # When the step began.
        self._step_s = -math.inf
        # When the times were read last.
        self._looked_s = -math.inf
        # The times at the first look.
        self._first: Mapping[int, float] | None = None
        # The times when a thread had worked with LEAST_SHARE.
        self._marked: Mapping[int, float] = {}
        self._marked_s = -math.inf
        # The time of the step before the first look.
        self._unseen_s = 0.0
        # It is over its limit and goes on.
        self._is_late = False
        self._is_late_told = False
        # The time of the thread that worked most in this step.
        self.worked_s = 0.0

    def look(self, step_s: float, limit_s: float, now: float) -> None:
        if step_s != self._step_s:
            self._step_s = step_s
            self._looked_s = step_s
            self._marked_s = step_s
            self._first = None
            self._is_late = False
            self.worked_s = 0.0

        if now - self._looked_s < limit_s / LOOKS_IN_A_LIMIT:
            return

        self._looked_s = now
        times = self._read_times()
        if self._first is None:
            self._first = times
            self._marked = times
            self._unseen_s = now - step_s
            return

        self.worked_s = self._unseen_s + _most_worked_s(times, self._first)
        if _most_worked_s(times, self._marked) >= LEAST_SHARE * (now - self._marked_s):
            self._marked = times
            self._marked_s = now

    def goes_on(self, waited_s: float, limit_s: float, now: float, pauses: Pauses) -> bool:
        """Return whether a step that lasts for `waited_s` is still one."""
        if waited_s <= limit_s:
            return True

        is_idle = pauses.ran_s(self._marked_s, now) > limit_s
        has_worked = self._first is None or self.worked_s >= limit_s
        if is_idle or has_worked or waited_s > MOST_LIMITS * limit_s:
            return False

        self._is_late = True
        return True

    def late_step(self) -> bool:
        """Return, once for each step, whether it is over its limit and goes on."""
        is_new = self._is_late and not self._is_late_told
        self._is_late_told = self._is_late
        return is_new


def _most_worked_s(times: Mapping[int, float], before: Mapping[int, float]) -> float:
    worked_s = (time_s - before.get(thread, 0.0) for thread, time_s in times.items())
    return max(worked_s, default=0.0)


@dataclass(frozen=True, slots=True)
class HangLimits:
    """How long a process may do what it does, in seconds."""

    loading_s: float
    first_step_s: float
    step_s: float
    # What it did too long when it is busy.
    work: str
    # A step takes in the requests that wait.
    waiting_counts: bool = True
    # A step may last longer than its limit while it works.
    work_counts: bool = False

    @classmethod
    def of(cls, engine: EngineConfig) -> Self:
        return cls(
            engine.model_loading_timeout_s,
            engine.first_step_timeout_s,
            engine.step_timeout_s,
            "made no step though work waits",
            work_counts=True,
        )


def hang(
    record: EngineRecord,
    limits: HangLimits,
    began_s: float,
    now: float,
    pauses: Pauses = NO_PAUSES,
    work: StepWork | None = None,
) -> str | None:
    """Return why a live process counts as hung, or None.

    A busy engine hangs if it makes no step and does not work either, an idle one if it gives no
    sign of life, and a loading one if it takes too long, and so does one that stopped by itself and
    does not end. A long prompt or a compilation advances the step counter in small parts, so its
    engine does not count as hung. `began_s` is when the load or the end began, and `work` is the
    work of the process in its step, where that counts.
    """
    if record.phase in (Phase.STARTING, Phase.LOADING):
        since_s = began_s
        complaint = "did not finish loading"
        limit_s = limits.loading_s
    elif record.phase == Phase.DRAINING:
        since_s = began_s
        complaint = "stopped its work and did not end"
        limit_s = KILL_S
    elif record.phase != Phase.READY:
        return None
    elif record.num_running or (limits.waiting_counts and record.num_waiting):
        since_s = record.step_s
        complaint = limits.work
        limit_s = limits.step_s if record.step else limits.first_step_s
        if work is not None and limits.work_counts:
            work.look(since_s, limit_s, now)
            if work.goes_on(pauses.ran_s(since_s, now), limit_s, now, pauses):
                return None
    else:
        since_s = record.beat_s
        complaint = "gave no sign of life"
        limit_s = IDLE_BEAT_S

    waited_s = pauses.ran_s(since_s, now)
    if waited_s <= limit_s:
        return None

    return f"{complaint} for {waited_s:.1f} s (limit {limit_s:g} s)"
