"""How long clients wait before they leave: learned from those who leave and those who stay."""

import math
from bisect import bisect_right

# So many clients are taken to have stayed before any was seen.
NUM_STAYED = 4
# No more clients than these count in an average.
MAX_SEEN = 32
# Clients who leave together have one reason, as a proxy that ends, and count once.
INSTANT_S = 0.1
# Half of what is known of impatience is forgotten in this time.
FORGET_S = 600.0
# Patience ends when fewer than this part of the clients still wait.
QUANTILE = 0.5
# The times at which patience is counted, from 0.1 s to 125 s.
BOUNDS_S = tuple(0.1 * 1.15**i for i in range(52))


class ClientPatience:
    """How long clients wait before they leave, by the product-limit estimate (Kaplan-Meier) over
    the times that were seen.

    A client who is answered, or refused, has stayed for so long and says nothing of later times.
    """

    def __init__(self) -> None:
        # By bound: of the clients who waited until then, the share that left before the next bound.
        self._shares_leaving = [0.0] * len(BOUNDS_S)
        # By bound: how many clients waited until then.
        self._num_seen = [NUM_STAYED] * len(BOUNDS_S)

        # When the last client left that was counted.
        self._last_leave_s = -math.inf
        # When the shares were last reduced.
        self._last_forget_s = 0.0

    def note(self, waited_s: float, *, has_left: bool, now: float) -> None:
        """Count a client that waited for so long, and then left or was answered."""
        self._forget(now)
        if has_left:
            if now - self._last_leave_s < INSTANT_S:
                return

            self._last_leave_s = now

        last_bound = bisect_right(BOUNDS_S, waited_s) - 1
        for bound in range(last_bound):
            self._count(bound, is_leaving=False)

        # Whether one that was answered would have left before the next bound, nobody knows.
        if has_left and last_bound >= 0:
            self._count(last_bound, is_leaving=True)

    def _count(self, bound: int, *, is_leaving: bool) -> None:
        """Count a client that waited until `BOUNDS_S[bound]`, and left before the next or stayed.

        The share is a mean of the clients so far, and of the last MAX_SEEN or so once there were as
        many.
        """
        num_seen = min(self._num_seen[bound] + 1, MAX_SEEN)
        self._num_seen[bound] = num_seen
        self._shares_leaving[bound] += (is_leaving - self._shares_leaving[bound]) / num_seen

    def seconds(self, now: float) -> float:
        """Return the time after which fewer than QUANTILE of the clients still wait. Infinite if
        few were seen to leave.
        """
        self._forget(now)
        share_staying = 1.0
        for bound_s, share_leaving in zip(BOUNDS_S, self._shares_leaving, strict=True):
            share_staying *= 1 - share_leaving
            if share_staying < QUANTILE:
                return bound_s

        return math.inf

    def _forget(self, now: float) -> None:
        """Reduce the shares by the time that has passed, at most once a second."""
        passed_s = now - self._last_forget_s
        if passed_s < 1.0:
            return

        self._last_forget_s = now
        factor = 0.5 ** (passed_s / FORGET_S)
        self._shares_leaving = [factor * share for share in self._shares_leaving]
