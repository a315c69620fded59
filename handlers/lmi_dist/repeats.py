"""The n-grams of one sequence, of prompt and output, none of which may come again. Plain Python."""

from __future__ import annotations

from collections.abc import Collection
from copy import copy

from handlers.base.sequence import Sequence


class Repeats:
    """Knows what came after each run of `size - 1` tokens. It grows with its sequence."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._num_seen = 0
        self._next: dict[tuple[int, ...], set[int]] = {}
        self._own: set[tuple[int, ...]] = set()  # the runs whose sets no fork shares

    def fork(self) -> Repeats:
        """The same for another sequence with the same tokens. Sets are copied when one of the two changes them."""
        forked = copy(self)
        forked._next = self._next.copy()
        self._own, forked._own = set(), set()
        return forked

    def next_banned_ids(self, sequence: Sequence) -> Collection[int]:
        """The tokens that would end an n-gram that the sequence has already."""
        token_ids, num_before = sequence.token_ids, self._size - 1
        for end in range(max(self._num_seen, num_before), len(token_ids)):
            self._note(tuple(token_ids[end - num_before : end]), token_ids[end])
        self._num_seen = len(token_ids)
        return self._next.get(tuple(token_ids[len(token_ids) - num_before :]), ())

    def _note(self, run: tuple[int, ...], token_id: int) -> None:
        if run not in self._own:
            self._own.add(run)
            self._next[run] = self._next.get(run, set()).copy()
        self._next[run].add(token_id)
