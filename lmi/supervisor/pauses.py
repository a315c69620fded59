"""The times in which a process did not run, because its machine was busy or suspended. Every time
is `time.monotonic()`.
"""

import math
from collections import deque
from typing import NamedTuple

# The least time between two lines about pauses.
PAUSES_EVERY_S = 60.0
# The supervisor's loop turns five times a second; if a turn is so late, the process did not run.
LATE_TURN_S = 1.0


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
