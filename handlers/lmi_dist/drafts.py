"""Drafts: the tokens that are expected to follow the last one, found earlier in the same sequence.

If a sequence ends with tokens that it has had before, it may go on as it did then. A step computes
such a draft together with the last token, and every token is drawn as without one. So a draft
changes no answer, only the number of steps. Source: prompt lookup decoding (Saxena 2023).
"""

from collections.abc import Iterable
from typing import NamedTuple

from handlers.lmi_dist.pace import Pace

# The longest draft, in tokens.
MAX_DRAFT = 7
# The longest end of a sequence that is looked up. The shortest is a pair.
MAX_NGRAM = 4
# The most places of a pair that are looked at for a longer n-gram.
MAX_LOOKS = 16
# The gain in tokens per second below which drafts are not worth their rows.
MIN_GAIN = 1.05
# The share of a draft that is expected to be right before any was computed.
_FIRST_SHARE = 0.5
# The weight of a new draft in the average share.
_WEIGHT_OF_NEW = 0.1
# How far the share goes back to the first one with each draft that was not worth it.
_RECOVERY = 0.01


class Drafter:
    """Makes the drafts of one sequence, with which it grows.

    An end of tokens is the number of tokens up to it. 0 stands for no end.
    """

    def __init__(self) -> None:
        # The average share of a draft that is right.
        self.share = _FIRST_SHARE
        # By pair of tokens: where it ended last.
        self._last_ends: dict[tuple[int, int], int] = {}
        # By end: where the pair that ends there ended before. No pair ends at 0 or 1.
        self._previous_ends = [0, 0]

    def draft(self, token_ids: list[int]) -> list[int]:
        """Return what followed when the sequence ended as it does now, or [] if it never did."""
        self._catch_up(token_ids)
        last_end = self._previous_ends[len(token_ids)]
        if not last_end:
            return []

        return _tokens_from(self._best_end(token_ids, last_end), token_ids)

    def _catch_up(self, token_ids: list[int]) -> None:
        """Note the pairs of the tokens that are new since the last call."""
        for end in range(len(self._previous_ends), len(token_ids) + 1):
            pair = token_ids[end - 2], token_ids[end - 1]
            previous_end = self._last_ends.get(pair, 0)
            self._previous_ends.append(previous_end)
            self._last_ends[pair] = end

    def _best_end(self, token_ids: list[int], last_end: int) -> int:
        """Return where most of the tokens before equal those with which the sequence ends.

        It goes back from `last_end`, where the last pair ended, over a few places of that pair.
        """
        end = last_end
        best_end = last_end
        longest = 0
        for _ in range(MAX_LOOKS):
            length = _num_equal_before(end, token_ids)
            if length > longest:
                best_end = end
                longest = length

            end = self._previous_ends[end]
            if longest == MAX_NGRAM or not end:
                break

        return best_end

    def note(self, num_right: int, num_drafted: int) -> None:
        """Learn from a draft that was computed."""
        self.share += _WEIGHT_OF_NEW * (num_right / num_drafted - self.share)

    def rest(self) -> None:
        """Note that a draft was not worth its rows. After some time the next one is tried again."""
        self.share += _RECOVERY * (_FIRST_SHARE - self.share)


class PossibleDraft(NamedTuple):
    """A draft that a step may have, and who made it."""

    drafter: Drafter
    token_ids: list[int]


def num_worth(drafts: Iterable[PossibleDraft], num_rows: int, pace: Pace) -> int:
    """Return how many of the drafts, best first, to add to a step of `num_rows` tokens for the most
    tokens per second.
    """
    seconds = pace.seconds(num_rows)
    if not seconds:
        return 0

    best_speed = num_rows / seconds * MIN_GAIN
    num_drafts = 0
    num_tokens = float(num_rows)
    for number, draft in enumerate(drafts, start=1):
        num_rows += len(draft.token_ids)
        num_tokens += draft.drafter.share * len(draft.token_ids)
        # More rows never take less time.
        speed = num_tokens / pace.seconds(num_rows)
        if speed > best_speed:
            best_speed = speed
            num_drafts = number

    return num_drafts


def _num_equal_before(end: int, token_ids: list[int]) -> int:
    """Return how many tokens before `end` equal the last ones, up to MAX_NGRAM.

    Two do: the same pair ends at both places.
    """
    length = 2
    max_length = min(MAX_NGRAM, end)
    while length < max_length and token_ids[end - length - 1] == token_ids[-length - 1]:
        length += 1

    return length


def _tokens_from(start: int, token_ids: list[int]) -> list[int]:
    """Return MAX_DRAFT tokens from `start` on.

    Where the sequence ends before, those that there are come again.
    """
    num_known = len(token_ids) - start
    tokens = token_ids[start : start + MAX_DRAFT]
    while len(tokens) < MAX_DRAFT:
        tokens.append(tokens[-num_known])

    return tokens
