"""The tokens of one sequence, as penalties count them and as the ban of repeated n-grams finds
them.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection
from copy import copy

from handlers.base.sequence import Sequence


class TokenHistory:
    """How often each token was generated in a sequence, with which it grows."""

    def __init__(self, sequence: Sequence, *, counts_prompt: bool) -> None:
        """`counts_prompt`: whether the tokens of the prompt are listed too."""
        # Every token once.
        self.token_ids = array("i")
        # How often a token is in the output: 0 for one that is only in the prompt.
        self.counts = array("f")
        # The index of each token id in the arrays.
        self._indices: dict[int, int] = {}
        self._num_seen = sequence.num_prompt_tokens
        if counts_prompt:
            for token_id in sequence.token_ids[: self._num_seen]:
                self._index_of(token_id)

    def fork(self) -> TokenHistory:
        """Return the same for another sequence with the same tokens."""
        forked = copy(self)
        forked.token_ids = self.token_ids[:]
        forked.counts = self.counts[:]
        forked._indices = self._indices.copy()
        return forked

    def catch_up(self, sequence: Sequence) -> None:
        """Count the tokens that were generated since the last call."""
        for token_id in sequence.token_ids[self._num_seen :]:
            self.counts[self._index_of(token_id)] += 1

        self._num_seen = sequence.num_tokens

    def _index_of(self, token_id: int) -> int:
        """Return the index of a token in the arrays, which get one that is new."""
        index = self._indices.setdefault(token_id, len(self.token_ids))
        if index == len(self.token_ids):
            self.token_ids.append(token_id)
            self.counts.append(0)

        return index


class Repeats:
    """What came after each run of tokens in a sequence, with which it grows."""

    def __init__(self, size: int) -> None:
        """`size` is that of the n-grams which must not come again: a run is one token shorter."""
        self._size = size
        self._num_seen = 0
        self._next: dict[tuple[int, ...], set[int]] = {}
        # The runs whose sets no fork shares.
        self._unshared: set[tuple[int, ...]] = set()

    def fork(self) -> Repeats:
        """Return the same for another sequence with the same tokens.

        Sets are copied when one of the two changes them.
        """
        forked = copy(self)
        forked._next = self._next.copy()
        self._unshared = set()
        forked._unshared = set()
        return forked

    def next_banned_ids(self, sequence: Sequence) -> Collection[int]:
        """Return the tokens that would end an n-gram that the sequence has already."""
        token_ids = sequence.token_ids
        num_before = self._size - 1
        for end in range(max(self._num_seen, num_before), len(token_ids)):
            run = tuple(token_ids[end - num_before : end])
            if run not in self._unshared:
                self._unshared.add(run)
                self._next[run] = self._next.get(run, set()).copy()

            self._next[run].add(token_ids[end])

        self._num_seen = len(token_ids)
        return self._next.get(tuple(token_ids[len(token_ids) - num_before :]), ())
