"""Short steps, in which only express sequences decode.

A step of the whole batch may take many times as long, so that an express sequence gains from steps
without the others. These lose time by it, so it is bounded.
"""

from handlers.lmi_dist.pace import Pace

# How much time short steps may take for each second of whole steps.
SHARE_OF_TIME = 0.25
# The most time of short steps in a row, so that no stream has a long gap.
MAX_IN_A_ROW_S = 0.1


class ShortSteps:
    """Says of each step whether it is short."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        # The time that short steps may take until the next whole step.
        self._budget_s = 0.0

    def begin(self, num_express: int, num_decodes: int) -> bool:
        """Return whether the next step is short, and count it.

        `num_decodes` sequences decode, of which `num_express` are express. It is short if it takes
        less than half of the time of a whole step, and there is time for it.
        """
        short_s = self._pace.seconds(num_express)
        whole_s = self._pace.seconds(num_decodes)
        is_worth_it = short_s < whole_s / 2
        if num_express and is_worth_it and short_s < self._budget_s:
            self._budget_s -= short_s
            return True

        self._budget_s = min(self._budget_s + SHARE_OF_TIME * whole_s, MAX_IN_A_ROW_S)
        return False
