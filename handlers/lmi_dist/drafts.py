"""Drafts: the tokens that are expected to follow, by where the sequence ended so before.

A step computes a draft together with the last token, and every token is drawn as without one. So a
draft changes no answer, only the number of steps. Source: prompt lookup decoding (Saxena 2023).
"""

from collections.abc import Iterable

from handlers.lmi_dist.pace import Pace

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
