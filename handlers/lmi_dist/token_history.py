"""What was generated in one sequence: how often each token came, and what followed each n-gram.

Penalties need the first, the ban of repeated n-grams the second. Both grow with the sequence.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection
from copy import copy

from handlers.base.sequence import Sequence


class TokenHistory:
    """How often each token was generated in a sequence."""

    def __init__(self, sequence: Sequence, *, counts_prompt: bool) -> None:
        """`counts_prompt`: whether the tokens of the prompt are listed too."""
        # Each token once, and beside it how often it was generated: 0 for one of the prompt.
        self.token_ids = array("i")
        self.counts = array("f")
        # The index in both arrays, by token.
        self._indices: dict[int, int] = {}
        # How many tokens of the sequence are counted.
        self._num_counted = sequence.num_prompt_tokens
        if counts_prompt:
            for token_id in sequence.token_ids[: sequence.num_prompt_tokens]:
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
        for token_id in sequence.token_ids[self._num_counted :]:
            self.counts[self._index_of(token_id)] += 1

        self._num_counted = sequence.num_tokens

    def _index_of(self, token_id: int) -> int:
        """Return the index of a token in the arrays, to which a new one is added."""
        index = self._indices.setdefault(token_id, len(self.token_ids))
        if index == len(self.token_ids):
            self.token_ids.append(token_id)
            self.counts.append(0)

        return index


class Repeats:
    """Which tokens came after each run of tokens in a sequence."""

    def __init__(self, size: int) -> None:
        """`size` is that of the n-grams which must not come again."""
        # A run is an n-gram without its last token.
        self._run_length = size - 1
        # How many tokens of the sequence were looked at.
        self._num_seen = 0
        self._tokens_after: dict[tuple[int, ...], set[int]] = {}
        # The runs whose sets no fork shares.
        self._unshared: set[tuple[int, ...]] = set()

    def fork(self) -> Repeats:
        """Return the same for another sequence with the same tokens.

        Both share the sets. Who changes one copies it before.
        """
        forked = copy(self)
        forked._tokens_after = self._tokens_after.copy()
        self._unshared = set()
        forked._unshared = set()
        return forked

    def next_banned_ids(self, sequence: Sequence) -> Collection[int]:
        """Return the tokens that would complete an n-gram that the sequence has already."""
        token_ids = sequence.token_ids
        length = self._run_length
        for end in range(max(self._num_seen, length), len(token_ids)):
            run = tuple(token_ids[end - length : end])
            if run not in self._unshared:
                self._unshared.add(run)
                self._tokens_after[run] = self._tokens_after.get(run, set()).copy()

            self._tokens_after[run].add(token_ids[end])

        self._num_seen = len(token_ids)
        last_run = tuple(token_ids[len(token_ids) - length :])
        return self._tokens_after.get(last_run, ())
