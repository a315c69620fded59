"""How many rows a step takes beside its decodes: prompt tokens as time allows, and drafts where
they pay.

While sequences decode, a long step is a gap in every stream, so prompt tokens join it only as far
as it stays short, or if a crowd of prompts waits. The time of a step follows from its number of
rows (a row is one token, of a decode or of a prompt): a `Pace` remembers how long steps of about
each size took, and draws lines between them.

A step computes a draft together with the last token, and every token is drawn as without one. So a
draft changes no answer, only the number of steps. Source: prompt lookup decoding (Saxena 2023).
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
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
MAX_DRAFT = 7  # tokens
# The longest end of a sequence that is looked up. The shortest is a pair.
MAX_NGRAM = 4
# The most places of a pair that are looked at for a longer n-gram.
MAX_LOOKS = 16
# The gain in tokens per second below which drafts are not worth their rows.
MIN_GAIN = 1.05
# The share of a draft that is expected to be right before any was computed.
_FIRST_SHARE = 0.5
# The weight of a new draft in the average share.
_NEW = 0.1
# The weight of the first share for each step in which a draft was not worth it.
_RECOVERY = 0.01


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


class Drafter:
    """Where each pair of tokens of one sequence ended, and how often its drafts are right.

    It grows with the sequence.

    An end is the number of tokens up to it. 0 stands for none.
    """

    def __init__(self) -> None:
        # The average share of a draft that is right.
        self.share = _FIRST_SHARE
        # Where each pair ended last.
        self._ends: dict[tuple[int, int], int] = {}
        # By end: where the same pair ended before.
        self._earlier = [0, 0]

    def draft(self, token_ids: list[int]) -> list[int]:
        """The tokens that followed when the sequence last ended as it does now, or [] if it never
        did.
        """
        for end in range(len(self._earlier), len(token_ids) + 1):
            pair = token_ids[end - 2], token_ids[end - 1]
            earlier = self._ends.get(pair, 0)
            self._earlier.append(earlier)
            self._ends[pair] = end

        end = self._earlier[len(token_ids)]
        if not end:
            return []

        return _continued(token_ids, self._best(token_ids, end))

    def _best(self, token_ids: list[int], end: int) -> int:
        """Where the longest n-gram with which the sequence ends, ended before: the latest, among a
        few ends.
        """
        best = end
        longest = 0
        for _ in range(MAX_LOOKS):
            # At least the pair is equal.
            length = 2
            max_length = min(MAX_NGRAM, end)
            while length < max_length and token_ids[end - length - 1] == token_ids[-length - 1]:
                length += 1

            if length > longest:
                best = end
                longest = length

            end = self._earlier[end]
            if longest == MAX_NGRAM or not end:
                break

        return best

    def note(self, num_right: int, num_drafted: int) -> None:
        """Learn from a draft that was computed."""
        self.share += _NEW * (num_right / num_drafted - self.share)

    def rest(self) -> None:
        """Note that a draft was not worth its rows. After some time the next one is tried again."""
        self.share += _RECOVERY * (_FIRST_SHARE - self.share)


def num_worth(drafts: Iterable[tuple[Drafter, list[int]]], num_rows: int, pace: Pace) -> int:
    """How many of the drafts, best first, to add to a step of `num_rows` tokens for the most tokens
    per second.
    """
    seconds = pace.seconds(num_rows)
    if not seconds:
        return 0

    best = num_rows / seconds * MIN_GAIN
    worth = 0
    rows = num_rows
    tokens = float(num_rows)
    for number, (drafter, draft) in enumerate(drafts, start=1):
        rows += len(draft)
        tokens += drafter.share * len(draft)
        # More rows never take less time.
        speed = tokens / pace.seconds(rows)
        if speed > best:
            best = speed
            worth = number

    return worth


def _continued(token_ids: list[int], start: int) -> list[int]:
    """The tokens from `start` on.

    Where they reach the end of the sequence, they go on with themselves.
    """
    period = len(token_ids) - start
    continued = token_ids[start : start + MAX_DRAFT]
    while len(continued) < MAX_DRAFT:
        continued.append(continued[-period])

    return continued
