"""Notes when this process did not run, so that it does not count that time against other processes."""

import math
from collections import deque


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
