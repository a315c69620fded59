"""How many prompt tokens a step may take, by time.

While sequences decode, a long step is a gap in every stream, so prompt tokens join it only as far as it stays short, or
if a crowd of prompts waits. The time of a step follows from its number of rows (a row is one token, of a decode or of a
prompt): a `Pace` remembers how long steps of about each size took, and draws lines between them.
"""

from bisect import bisect_left, bisect_right
from itertools import accumulate

MIN_PIECE = 64  # prompt tokens that a step takes in any case, so that a prompt always goes on
MIN_CROWD = 4  # prompts
LIMIT_IN_DECODE_STEPS = 1.8  # the default limit of a step that also has prompt tokens
_SHARE = 0.2  # of a new measurement in the average of its size
_MAX_OUTLIER = 4.0  # a step that lost its core says little: it counts as at most so many times the average


class Pace:
    """The times of the steps of one engine."""

    def __init__(self, max_tokens: int, max_step_s: float | None = None) -> None:
        """`max_tokens`: of prompts in one step. `max_step_s`: of a step with decodes; None follows their own time."""
        self._max_tokens, self._max_step_s = max_tokens, max_step_s
        self._averages: dict[int, tuple[float, float]] = {}  # rows and seconds of steps whose sizes have so many bits
        self._rows: list[float] = []  # the same in order
        self._seconds: list[float] = []  # of these numbers of rows; they never fall

    def note(self, num_rows: int, seconds: float) -> None:
        """Learn from a step."""
        rows, average = self._averages.get(num_rows.bit_length(), (num_rows, seconds))
        seconds = min(seconds, _MAX_OUTLIER * average)
        self._averages[num_rows.bit_length()] = (
            rows + _SHARE * (num_rows - rows),
            average + _SHARE * (seconds - average),
        )
        points = sorted(self._averages.values())
        self._rows = [one for one, _ in points]
        self._seconds = list(accumulate((one for _, one in points), max))

    def seconds(self, num_rows: int) -> float:
        """The time of a step of so many rows. 0 if no step was measured."""
        if not self._rows:
            return 0.0
        place = max(bisect_right(self._rows, num_rows) - 1, 0)
        return self._seconds[place] + max(0.0, num_rows - self._rows[place]) * self._seconds_per_row(num_rows)

    def num_prompt_tokens(self, num_decodes: int, num_prompts: int = 1) -> int:
        """The most prompt tokens for a step with so many decodes, while so many prompts are not computed."""
        is_crowd = self._max_step_s is None and num_prompts >= max(num_decodes, MIN_CROWD)
        if num_decodes == 0 or is_crowd:
            return self._max_tokens
        decode_s, row_s = self.seconds(num_decodes), self._seconds_per_row(num_decodes + MIN_PIECE)
        limit_s = self._max_step_s or LIMIT_IN_DECODE_STEPS * decode_s
        num_tokens = int((limit_s - decode_s) / row_s) if row_s else 0
        return min(max(MIN_PIECE, num_tokens), self._max_tokens)

    def _seconds_per_row(self, num_rows: int) -> float:
        """What one more row costs at the measured sizes around `num_rows`. 0 with fewer than two sizes."""
        rows, seconds = self._rows, self._seconds
        if len(rows) < 2:
            return 0.0
        end = min(max(bisect_left(rows, num_rows), 1), len(rows) - 1)
        return (seconds[end] - seconds[end - 1]) / (rows[end] - rows[end - 1])
