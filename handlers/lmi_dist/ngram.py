"""Drafts of the next tokens: those that followed when the sequence last ended as it does now.

A step computes the draft together with the last token, and every token is drawn as without a draft. So a draft changes
no answer, only the number of steps. Source: prompt lookup decoding (Saxena 2023).
"""

from collections.abc import Iterable

from handlers.lmi_dist.pace import Pace

MAX_DRAFT = 7  # tokens
MAX_NGRAM = 4  # the longest end of a sequence that is looked up; the shortest is a pair
MAX_LOOKS = 16  # places of a pair that are looked at for a longer n-gram
MIN_GAIN = 1.05  # in tokens per second, below which drafts are not worth their rows
_FIRST_SHARE = 0.5  # of a draft that is expected to be right before any was computed
_NEW = 0.1  # weight of a new draft in the average share
_RECOVERY = 0.01  # weight of the first share for each step in which a draft was not worth it


class Drafter:
    """Where each pair of tokens of one sequence ended, and how often its drafts are right. It grows with the sequence.

    An end is the number of tokens up to it. 0 stands for none.
    """

    def __init__(self) -> None:
        self.share = _FIRST_SHARE  # average share of a draft that is right
        self._ends: dict[tuple[int, int], int] = {}  # where each pair ended last
        self._earlier = [0, 0]  # by end: where the same pair ended before

    def draft(self, token_ids: list[int]) -> list[int]:
        """The tokens that followed when the sequence last ended as it does now, or [] if it never did."""
        for end in range(len(self._earlier), len(token_ids) + 1):
            pair = token_ids[end - 2], token_ids[end - 1]
            self._earlier.append(self._ends.get(pair, 0))
            self._ends[pair] = end
        end = self._earlier[len(token_ids)]
        return _continued(token_ids, self._best(token_ids, end)) if end else []

    def _best(self, token_ids: list[int], end: int) -> int:
        """Where the longest n-gram with which the sequence ends, ended before: the latest, among a few ends."""
        best, longest = end, 0
        for _ in range(MAX_LOOKS):
            length = 2  # at least the pair is equal
            while length < min(MAX_NGRAM, end) and token_ids[end - length - 1] == token_ids[-length - 1]:
                length += 1
            if length > longest:
                best, longest = end, length
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
    """How many of the drafts, best first, to add to a step of `num_rows` tokens for the most tokens per second."""
    if not (seconds := pace.seconds(num_rows)):
        return 0
    best, worth, rows, tokens = num_rows / seconds * MIN_GAIN, 0, num_rows, float(num_rows)
    for number, (drafter, draft) in enumerate(drafts, start=1):
        rows, tokens = rows + len(draft), tokens + drafter.share * len(draft)
        speed = tokens / pace.seconds(rows)  # more rows never take less time
        if speed > best:
            best, worth = speed, number
    return worth


def _continued(token_ids: list[int], start: int) -> list[int]:
    """The tokens from `start` on. Where they reach the end of the sequence, they go on with themselves."""
    period = len(token_ids) - start
    continued = token_ids[start : start + MAX_DRAFT]
    while len(continued) < MAX_DRAFT:
        continued.append(continued[-period])
    return continued
