"""How many prompt tokens a step takes beside its decodes, by the time of steps.

While sequences decode, a long step is a gap in every stream, so prompt tokens join it only as far
as it stays short, or if a crowd of prompts waits. The time of a step follows from its number of
rows (a row is one token, of a decode or of a prompt): a `Pace` remembers how long steps of about
each size took, and draws lines between them.
"""

from bisect import bisect_left, bisect_right
from itertools import accumulate

# A step takes so many prompt tokens in any case, so that a prompt always goes on.
MIN_PIECE = 64
MIN_CROWD = 4  # prompts
# The default limit of a step that also has prompt tokens.
LIMIT_IN_DECODE_STEPS = 1.8
# The weight of a new measurement in the average of its size.
_SHARE = 0.2
# A step that lost its core says little: it counts as at most so many times the average.
_MAX_OUTLIER = 4.0


class Pace:
    """The times of the steps of one engine."""

    def __init__(self, max_tokens: int, max_step_s: float | None = None) -> None:
        """`max_tokens`: of prompts in one step.

        `max_step_s`: of a step with decodes; None follows their own time.
        """
        self._max_tokens = max_tokens
        self._max_step_s = max_step_s
        # By the bits of the number of rows: average rows and seconds of steps of such a size.
        self._averages: dict[int, tuple[float, float]] = {}
        # The average numbers of rows in order, and the seconds of each, which never fall.
        self._rows: list[float] = []
        self._seconds: list[float] = []

    def note(self, num_rows: int, seconds: float) -> None:
        """Learn from a step."""
        size = num_rows.bit_length()
        average_rows, average_s = self._averages.get(size, (num_rows, seconds))
        seconds = min(seconds, _MAX_OUTLIER * average_s)
        average_rows += _SHARE * (num_rows - average_rows)
        average_s += _SHARE * (seconds - average_s)
        self._averages[size] = average_rows, average_s

        points = sorted(self._averages.values())
        self._rows = [rows for rows, _ in points]
        self._seconds = list(accumulate([step_s for _, step_s in points], max))

    def seconds(self, num_rows: int) -> float:
        """The time of a step of so many rows. 0 if no step was measured."""
        if not self._rows:
            return 0.0

        place = max(bisect_right(self._rows, num_rows) - 1, 0)
        num_more = max(0.0, num_rows - self._rows[place])
        return self._seconds[place] + num_more * self._seconds_per_row(num_rows)

    def num_prompt_tokens(self, num_decodes: int, num_prompts: int = 1) -> int:
        """The most prompt tokens for a step with so many decodes, while so many prompts are not
        computed.
        """
        is_crowd = self._max_step_s is None and num_prompts >= max(num_decodes, MIN_CROWD)
        if num_decodes == 0 or is_crowd:
            return self._max_tokens

        decode_s = self.seconds(num_decodes)
        row_s = self._seconds_per_row(num_decodes + MIN_PIECE)
        limit_s = self._max_step_s or LIMIT_IN_DECODE_STEPS * decode_s
        if not row_s:
            return min(MIN_PIECE, self._max_tokens)

        num_tokens = int((limit_s - decode_s) / row_s)
        return min(max(MIN_PIECE, num_tokens), self._max_tokens)

    def _seconds_per_row(self, num_rows: int) -> float:
        """What one more row costs at the measured sizes around `num_rows`. 0 with fewer than two
        sizes.
        """
        rows = self._rows
        seconds = self._seconds
        if len(rows) < 2:
            return 0.0

        end = min(max(bisect_left(rows, num_rows), 1), len(rows) - 1)
        return (seconds[end] - seconds[end - 1]) / (rows[end] - rows[end - 1])
