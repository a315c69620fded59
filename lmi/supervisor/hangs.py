"""Decides when a live process counts as hung. Every time is `time.monotonic()`."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

from lmi.settings.config import EngineConfig
from lmi.shared.state import EngineRecord, Phase
from lmi.supervisor.pauses import NO_PAUSES, Pauses
from lmi.supervisor.restarts import KILL_S

IDLE_BEAT_S = 10.0
# A step that lasts longer than its limit goes on while a thread of the engine works in it with this
# share of a core at least, until a thread has worked for the limit, or the step has lasted for so
# many limits.
LEAST_SHARE = 0.02
MOST_LIMITS = 10
# How often the processor time of an engine is read while its step is long.
LOOKS_IN_A_LIMIT = 20


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
