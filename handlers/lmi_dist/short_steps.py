"""Steps of express sequences only, for a part of the time.

A step of a full batch may take many times as long.
"""

from handlers.lmi_dist.pace import Pace

# The time of short steps, as a share of the time of the other steps.
SHARE_OF_TIME = 0.25
# The most time of short steps in a row, so that no stream has a long gap.
MAX_TOGETHER_S = 0.1


class ShortSteps:
    """Says of each step whether it is short."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        # The time that is left for short steps.
        self._left_s = 0.0

    def begin(self, num_express: int, num_decodes: int) -> bool:
        """Whether the next step is one of the express sequences among those that decode: if it
        gains them at least half of its time.
        """
        short_s = self._pace.seconds(num_express)
        whole_s = self._pace.seconds(num_decodes)
        if num_express and short_s < min(whole_s / 2, self._left_s):
            self._left_s -= short_s
            return True

        self._left_s = min(self._left_s + SHARE_OF_TIME * whole_s, MAX_TOGETHER_S)
        return False
