"""The tokens that penalties count: the distinct tokens of one sequence, and how often each was generated."""

from __future__ import annotations

from copy import copy

import numpy as np

from handlers.base.sequence import Sequence


class TokenHistory:
    """Arrays that grow with their sequence; only the first `size` entries count."""

    def __init__(self, sequence: Sequence, *, counts_prompt: bool) -> None:
        self.size = 0
        self.token_ids = np.empty(64, np.int32)
        self.counts = np.zeros(64, np.float32)  # in the output: 0 for a token that is only in the prompt
        self._indices: dict[int, int] = {}  # token id -> its index in the arrays
        self._num_seen = sequence.num_prompt_tokens
        if counts_prompt:
            for token_id in sequence.token_ids[: self._num_seen]:
                self._index(token_id)

    def fork(self) -> TokenHistory:
        """The same history for another sequence with the same tokens."""
        forked = copy(self)
        forked.token_ids, forked.counts = self.token_ids.copy(), self.counts.copy()
        forked._indices = self._indices.copy()
        return forked

    def catch_up(self, sequence: Sequence) -> None:
        """Count the tokens that were generated since the last call."""
        for token_id in sequence.token_ids[self._num_seen :]:
            index = self._index(token_id)  # first: it may replace the arrays
            self.counts[index] += 1
        self._num_seen = sequence.num_tokens

    def _index(self, token_id: int) -> int:
        index = self._indices.get(token_id)
        if index is None:
            index = self._indices[token_id] = self.size
            if index == len(self.token_ids):
                self.token_ids = np.concatenate([self.token_ids, np.empty_like(self.token_ids)])
                self.counts = np.concatenate([self.counts, np.zeros_like(self.counts)])
            self.token_ids[index] = token_id
            self.size += 1
        return index
