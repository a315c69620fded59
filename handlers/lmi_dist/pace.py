"""How long steps take, and so how many prompt tokens may join a step that decodes.

While sequences decode, a long step is a gap in every stream. So prompt tokens join it only as far
as it stays short, unless a crowd of prompts waits. The time of a step depends on its number of
rows, which are tokens of decodes and of prompts.
"""

from bisect import bisect_left, bisect_right
from itertools import accumulate
from typing import NamedTuple

# The least number of prompt tokens in a step, so that a prompt always goes on.
MIN_PIECE = 64
# The least number of prompts that count as a crowd.
MIN_CROWD = 4
# The default limit of a step that also has prompt tokens.
LIMIT_IN_DECODE_STEPS = 1.8
# The weight of a new step in the average of its size.
_SHARE = 0.2
# The longest that a step counts, in averages of its size: it may have lost its core.
_MAX_OUTLIER = 4.0


class _Average(NamedTuple):
    """Steps of about the same size."""

    num_rows: float
    seconds: float


class Pace:
    """The times of the steps of one engine: an average for each size, and lines between them."""

    def __init__(self, max_tokens: int, max_step_s: float | None = None) -> None:
        """`max_tokens`: of prompts in one step.

        `max_step_s`: of a step that decodes. None: a multiple of what its decodes alone would take.
        """
        self._max_tokens = max_tokens
        self._max_step_s = max_step_s
        # By size, which is the number of bits of the number of rows.
        self._averages: dict[int, _Average] = {}
        # The averages, ordered by their rows. Seconds are made to never fall.
        self._rows: list[float] = []
        self._seconds: list[float] = []

    def note(self, num_rows: int, seconds: float) -> None:
        """Learn from a step."""
        size = num_rows.bit_length()
        average = self._averages.get(size, _Average(num_rows, seconds))
        counted_s = min(seconds, _MAX_OUTLIER * average.seconds)
        self._averages[size] = _Average(
            average.num_rows + _SHARE * (num_rows - average.num_rows),
            average.seconds + _SHARE * (counted_s - average.seconds),
        )

        averages = sorted(self._averages.values())
        self._rows = [average.num_rows for average in averages]
        self._seconds = list(accumulate([average.seconds for average in averages], max))

    def seconds(self, num_rows: int) -> float:
        """Return the time of a step of so many rows, or 0 if no step was measured."""
        if not self._rows:
            return 0.0

        place = max(bisect_right(self._rows, num_rows) - 1, 0)
        num_more = max(0.0, num_rows - self._rows[place])
        return self._seconds[place] + num_more * self._seconds_per_row(num_rows)

    def num_prompt_tokens(self, num_decodes: int, num_prompts: int = 1) -> int:
        """Return how many prompt tokens may join so many decodes, while so many prompts wait.

        A crowd of prompts, as many as decodes or more, fills the step, unless the operator has set
        how long one may take.
        """
        is_crowd = self._max_step_s is None and num_prompts >= max(num_decodes, MIN_CROWD)
        if num_decodes == 0 or is_crowd:
            return self._max_tokens

        decode_s = self.seconds(num_decodes)
        row_s = self._seconds_per_row(num_decodes + MIN_PIECE)
        if not row_s:
            return min(MIN_PIECE, self._max_tokens)

        limit_s = self._max_step_s or LIMIT_IN_DECODE_STEPS * decode_s
        num_tokens = int((limit_s - decode_s) / row_s)
        return min(max(MIN_PIECE, num_tokens), self._max_tokens)

    def _seconds_per_row(self, num_rows: int) -> float:
        """Return what one more row costs at the measured sizes around `num_rows`, or 0 with fewer
        than two sizes.
        """
        rows = self._rows
        seconds = self._seconds
        if len(rows) < 2:
            return 0.0

        end = min(max(bisect_left(rows, num_rows), 1), len(rows) - 1)
        return (seconds[end] - seconds[end - 1]) / (rows[end] - rows[end - 1])
