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

MIN_PIECE = 64  # prompt tokens that a step takes in any case, so that a prompt always goes on
MIN_CROWD = 4  # prompts
LIMIT_IN_DECODE_STEPS = 1.8  # the default limit of a step that also has prompt tokens
_SHARE = 0.2  # of a new measurement in the average of its size
_MAX_OUTLIER = (
    4.0  # a step that lost its core says little: it counts as at most so many times the average
)
MAX_DRAFT = 7  # tokens
MAX_NGRAM = 4  # the longest end of a sequence that is looked up; the shortest is a pair
MAX_LOOKS = 16  # places of a pair that are looked at for a longer n-gram
MIN_GAIN = 1.05  # in tokens per second, below which drafts are not worth their rows
_FIRST_SHARE = 0.5  # of a draft that is expected to be right before any was computed
_NEW = 0.1  # weight of a new draft in the average share
_RECOVERY = 0.01  # weight of the first share for each step in which a draft was not worth it


class Pace:
    """The times of the steps of one engine."""

    def __init__(self, max_tokens: int, max_step_s: float | None = None) -> None:
        """`max_tokens`: of prompts in one step. `max_step_s`: of a step with decodes; None follows
        their own time.
        """
        self._max_tokens = max_tokens
        self._max_step_s = max_step_s
        self._averages: dict[
            int, tuple[float, float]
        ] = {}  # rows and seconds of steps whose sizes have so many bits
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
        return self._seconds[place] + max(
            0.0, num_rows - self._rows[place]
        ) * self._seconds_per_row(num_rows)

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
        num_tokens = int((limit_s - decode_s) / row_s) if row_s else 0
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
    """Where each pair of tokens of one sequence ended, and how often its drafts are right. It grows
    with the sequence.

    An end is the number of tokens up to it. 0 stands for none.
    """

    def __init__(self) -> None:
        self.share = _FIRST_SHARE  # average share of a draft that is right
        self._ends: dict[tuple[int, int], int] = {}  # where each pair ended last
        self._earlier = [0, 0]  # by end: where the same pair ended before

    def draft(self, token_ids: list[int]) -> list[int]:
        """The tokens that followed when the sequence last ended as it does now, or [] if it never
        did.
        """
        for end in range(len(self._earlier), len(token_ids) + 1):
            pair = token_ids[end - 2], token_ids[end - 1]
            self._earlier.append(self._ends.get(pair, 0))
            self._ends[pair] = end

        end = self._earlier[len(token_ids)]
        return _continued(token_ids, self._best(token_ids, end)) if end else []

    def _best(self, token_ids: list[int], end: int) -> int:
        """Where the longest n-gram with which the sequence ends, ended before: the latest, among a
        few ends.
        """
        best = end
        longest = 0
        for _ in range(MAX_LOOKS):
            length = 2  # at least the pair is equal
            while (
                length < min(MAX_NGRAM, end)
                and token_ids[end - length - 1] == token_ids[-length - 1]
            ):
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
    if not (seconds := pace.seconds(num_rows)):
        return 0

    best = num_rows / seconds * MIN_GAIN
    worth = 0
    rows = num_rows
    tokens = float(num_rows)
    for number, (drafter, draft) in enumerate(drafts, start=1):
        rows, tokens = rows + len(draft), tokens + drafter.share * len(draft)
        speed = tokens / pace.seconds(rows)  # more rows never take less time
        if speed > best:
            best = speed
            worth = number

    return worth


def _continued(token_ids: list[int], start: int) -> list[int]:
    """The tokens from `start` on. Where they reach the end of the sequence, they go on with
    themselves.
    """
    period = len(token_ids) - start
    continued = token_ids[start : start + MAX_DRAFT]
    while len(continued) < MAX_DRAFT:
        continued.append(continued[-period])

    return continued
