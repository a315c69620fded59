"""Guided decoding: which tokens may come next, so that an answer has the structure that its request asks for.

A guide follows the tokens of its sequence, and its mask is the last rule before the temperature. It allows no special
token, and end ids only where the structure is complete. If nothing else may follow, end ids are allowed before
`min_tokens` too. After an end id only further ones are allowed: with `min_tokens` or `ignore_eos` they fill the rest.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import numpy as np

from handlers.base.guide_compiler import FIELD, RULE, Compiled
from handlers.base.guide_vocabulary import WORD_BITS, Mask
from handlers.base.sequence import Sequence
from handlers.lmi_dist.sequence import EmbeddedSequence
from lmi.errors import cause_line
from lmi.executor import ErrorKind

MAX_START_S = 0.05  # of processor time that a guide may take, and for each token
MAX_TOKEN_S = 0.002


class Guide:
    """The state of one sequence in its guide. `Vocabulary` says what a mask is."""

    def __init__(self, compiled: Compiled, end_ids: frozenset[int]) -> None:
        """`end_ids` may end the answer. There must be one."""
        self._compiled, self._matcher = compiled, compiled.matcher.deep_copy()
        self._ends = compiled.vocabulary.mask_of(end_ids)
        self._others = ~(self._ends | compiled.vocabulary.marks)
        self._num_accepted = 0
        self._is_over = False  # an end id was drawn
        self._spent_s = 0.0
        self.mask: Mask | None = None  # which tokens may come behind those that were accepted

    def is_behind(self, sequence: Sequence) -> bool:
        return self.mask is None or self._num_accepted < sequence.num_generated

    def follow(self, sequence: EmbeddedSequence) -> None:
        """Accept the tokens since the last call, and find the mask. Fails the sequence if that cannot be known."""
        for token_id in sequence.token_ids[sequence.num_prompt_tokens + self._num_accepted :]:
            self._accept(sequence, token_id)
        if self._is_over:
            self.mask = self._ends
        elif sequence.error is None:
            self.mask = self._compiled.vocabulary.mask_from(self._matcher) & self._others
            if self._matcher.is_error():
                self._fail(sequence)
            elif self._matcher.is_accepting():
                self.mask |= self._ends
        is_early = sequence.min_tokens > self._num_accepted
        sequence.must_end = is_early and self.mask is not None and not (self.mask & ~self._ends).any()

    def _accept(self, sequence: Sequence, token_id: int) -> None:
        self._num_accepted += 1
        self._is_over = self._is_over or token_id in sequence.end_ids
        if not self._is_over and sequence.error is None and not self._matcher.consume_token(token_id):
            self._fail(sequence)

    def _fail(self, sequence: Sequence) -> None:
        """End the request with the error of the matcher, which would look like the end of the structure."""
        from handlers.base.guide_text import reason_of

        self._compiled.is_spent = True
        sequence.fail(f"{RULE}: {reason_of(self._matcher)}", ErrorKind.INVALID, FIELD)

    def note(self, sequence: Sequence, spent_s: float) -> None:
        """Note the processor time of a mask. Fails the sequence if its guide takes too long."""
        self._spent_s += spent_s
        if self._spent_s > MAX_START_S + MAX_TOKEN_S * self._num_accepted:
            limit = f"{MAX_START_S * 1000:g} ms and {MAX_TOKEN_S * 1000:g} ms for each token"
            sequence.fail(f"must be a structure that is quick to follow: over {limit}", ErrorKind.INVALID, FIELD)


def follow(sequences: Iterable[EmbeddedSequence]) -> None:
    """Let the guides of sequences catch up with their tokens. A guide that fails, or is slow, ends its request."""
    behind = [(guide, one) for one in sequences if (guide := one.guide) is not None and guide.is_behind(one)]
    if not behind:
        return
    started_s, times_s = time.thread_time(), [time.perf_counter()]
    for guide, sequence in behind:
        try:
            guide.follow(sequence)
        except Exception as error:  # the others go on
            sequence.fail(f"the guide failed: {cause_line(error)}")
        times_s.append(time.perf_counter())
    spent_s = time.thread_time() - started_s  # what other threads took does not count
    if spent_s > MAX_TOKEN_S:  # less is within the limit, whoever took it
        for (guide, sequence), before_s, after_s in zip(behind, times_s, times_s[1:], strict=False):
            guide.note(sequence, min(after_s - before_s, spent_s))


def fill_masks(sequences: list[EmbeddedSequence], rows: list[int], vocab_size: int) -> Mask:
    """The masks (num_sequences, vocab / 32). Only the sequences at `rows` have guides; others may draw any token."""
    masks = np.full((len(sequences), -(-vocab_size // WORD_BITS)), -1, np.int32)
    follow([sequences[row] for row in rows])
    for row in rows:
        guide = sequences[row].guide
        if guide is not None and guide.mask is not None:  # else it has failed
            masks[row] = guide.mask
    return masks
