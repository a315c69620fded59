"""Decides when a live process counts as hung. The Child of a process asks in each turn of the
supervisor, and ends a process that does.

Every time is `time.monotonic()`.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple, Self

from msgspec import Struct

from lmi.settings.config import EngineConfig
from lmi.shared.state import EngineRecord, Phase
from lmi.supervisor.pauses import NO_PAUSES, Pauses
from lmi.supervisor.restarts import KILL_S

IDLE_BEAT_S = 10.0
# The share of a core with which a thread has to work in a step that is over its limit.
MIN_CORE_SHARE = 0.02
# No step lasts longer than so many of its limits, whatever its threads do.
MAX_STEP_LIMITS = 10
# How often the processor times of an engine are read within the limit of a step.
READS_IN_A_LIMIT = 20

# The processor time of each thread of an engine in seconds, by the id of the thread.
ThreadTimes = Mapping[int, float]


class HangLimits(Struct, frozen=True, kw_only=True):
    """How long a process may do what it does, in seconds."""

    loading_s: float
    first_step_s: float
    step_s: float
    # What a busy process did for too long, as the log says it.
    step_complaint: str
    # Whether a process is busy, too, for which requests only wait.
    waiting_counts: bool = True
    # Whether a step may last longer than its limit while it works.
    work_counts: bool = False

    @classmethod
    def of(cls, engine: EngineConfig) -> Self:
        return cls(
            loading_s=engine.model_loading_timeout_s,
            first_step_s=engine.first_step_timeout_s,
            step_s=engine.step_timeout_s,
            step_complaint="made no step though work waits",
            work_counts=True,
        )


class _Wait(NamedTuple):
    """What a process has not done since a time, and how long that may take."""

    complaint: str
    since_s: float
    limit_s: float
    is_for_step: bool = False


def hang(
    record: EngineRecord,
    limits: HangLimits,
    began_s: float,
    now: float,
    pauses: Pauses = NO_PAUSES,
    work: "StepWork | None" = None,
) -> str | None:
    """Return why a live process counts as hung, or None.

    A busy engine hangs if it makes no step and does not work either, an idle one if it gives no
    sign of life, and a loading one if it takes too long, and so does one that stopped by itself and
    does not end. A long prompt or a compilation advances the step counter in small parts, so its
    engine does not count as hung. `began_s` is when the load or the end began, and `work` is the
    work of the process in its step, where that counts.
    """
    wait = _wait_of(record, limits, began_s)
    if wait is None:
        return None

    waited_s = pauses.ran_s(wait.since_s, now)
    if wait.is_for_step and limits.work_counts and work is not None:
        work.look(wait.since_s, wait.limit_s, now, pauses)
        if work.goes_on(waited_s, wait.limit_s, now, pauses):
            return None

    if waited_s <= wait.limit_s:
        return None

    return f"{wait.complaint} for {waited_s:.1f} s (limit {wait.limit_s:g} s)"


def _wait_of(record: EngineRecord, limits: HangLimits, began_s: float) -> _Wait | None:
    """Return what the phase of a process makes the supervisor wait for, or None."""
    if record.phase in (Phase.STARTING, Phase.LOADING):
        return _Wait("did not finish loading", began_s, limits.loading_s)

    if record.phase == Phase.DRAINING:
        return _Wait("stopped its work and did not end", began_s, KILL_S)

    if record.phase != Phase.READY:
        return None

    if record.num_running or (limits.waiting_counts and record.num_waiting):
        limit_s = limits.step_s if record.step else limits.first_step_s
        return _Wait(limits.step_complaint, record.step_s, limit_s, is_for_step=True)

    return _Wait("gave no sign of life", record.beat_s, IDLE_BEAT_S)


class _Step:
    """What is known of one step of an engine."""

    def __init__(self, began_s: float) -> None:
        self.began_s = began_s
        # When the processor times were read last.
        self.read_s = began_s
        # The times as they were read first, and how long the step had lasted by then.
        self.first_times: ThreadTimes | None = None
        self.unseen_s = 0.0
        # When a thread was last seen to have worked with MIN_CORE_SHARE, and the times then.
        self.last_work_s = began_s
        self.last_work_times: ThreadTimes = {}
        # The processor time of the thread that worked most.
        self.worked_s = 0.0
        # Whether it is over its limit and goes on, and whether that was told.
        self.is_late = False
        self.is_late_told = False


class StepWork:
    """How the threads of an engine work in a step that takes long, so that an engine which starves
    is not killed.

    A step goes on after its limit while a thread works, until a thread has worked for the limit.

    Call `look` in each turn while the engine is busy. `read_times` returns the times of all threads
    but the one that never steps. The time before the first look at a step counts as worked, pauses
    count for nothing.
    """

    def __init__(self, read_times: Callable[[], ThreadTimes]) -> None:
        self._read_times = read_times
        self._step = _Step(-math.inf)

    @property
    def worked_s(self) -> float:
        """The processor time of the thread that worked most in the step."""
        return self._step.worked_s

    def look(self, step_s: float, limit_s: float, now: float, pauses: Pauses) -> None:
        """Look at the step that began at `step_s`, and read its times if they are old."""
        if step_s != self._step.began_s:
            self._step = _Step(step_s)

        step = self._step
        if now - step.read_s < limit_s / READS_IN_A_LIMIT:
            return

        times = self._read_times()
        step.read_s = now
        if step.first_times is None:
            step.first_times = times
            step.last_work_times = times
            step.unseen_s = pauses.ran_s(step_s, now)
            return

        step.worked_s = step.unseen_s + _most_worked_s(times, step.first_times)
        least_s = MIN_CORE_SHARE * pauses.ran_s(step.last_work_s, now)
        if _most_worked_s(times, step.last_work_times) >= least_s:
            step.last_work_times = times
            step.last_work_s = now

    def goes_on(self, waited_s: float, limit_s: float, now: float, pauses: Pauses) -> bool:
        """Return whether a step that lasts for `waited_s` may last longer."""
        if waited_s <= limit_s:
            return True

        step = self._step
        is_idle = pauses.ran_s(step.last_work_s, now) > limit_s
        has_worked = step.first_times is None or step.worked_s >= limit_s
        if is_idle or has_worked or waited_s > MAX_STEP_LIMITS * limit_s:
            return False

        step.is_late = True
        return True

    def is_newly_late(self) -> bool:
        """Return, once for each step, whether it is over its limit and goes on."""
        is_new = self._step.is_late and not self._step.is_late_told
        self._step.is_late_told = self._step.is_late
        return is_new


def _most_worked_s(times: ThreadTimes, before: ThreadTimes) -> float:
    """Return the time for which the thread that worked most has worked since `before`."""
    worked_s = (time_s - before.get(thread, 0.0) for thread, time_s in times.items())
    return max(worked_s, default=0.0)
