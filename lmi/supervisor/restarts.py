"""Decides when a process may start again, and how long a drain takes. Every time is
`time.monotonic()`.
"""

from collections import deque

FIRST_DELAY_S = 0.2
LONGEST_DELAY_S = 30.0
# A process without a record that ran this long counts as one that was ready.
STEADY_S = 60.0
# For a process that ends, by itself or because it was told to.
KILL_S = 3.0

# After SIGTERM new requests get 503 for a moment, the port closes, open answers end, and then the
# rest are cut: so long after drain_timeout the remaining front ends are killed.
DRAIN_CUT_S = 1.5
# So long after drain_timeout all remaining processes are killed.
DRAIN_END_S = 2.5


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
