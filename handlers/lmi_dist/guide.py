"""Guided decoding: which tokens may come next, so that an answer has the structure that its request asks for.

A guide follows the tokens of its sequence, and its mask is the last rule before the temperature. It allows no special
token, and end ids only where the structure is complete. If nothing else may follow, end ids are allowed before
`min_tokens` too. After an end id only further ones are allowed: with `min_tokens` or `ignore_eos` they fill the rest.
"""

from __future__ import annotations

import time

import numpy as np

from handlers.base.guide_compiler import FIELD, RULE, Compiled
from handlers.base.guide_vocabulary import WORD_BITS, Mask
from handlers.lmi_dist.sequence import EmbeddedSequence
from lmi.errors import cause_line
from lmi.executor import ErrorKind

MAX_START_S = 0.05  # of processor time that a guide may take, and for each token
MAX_TOKEN_S = 0.002


class Guide:
    """The state of one sequence in its guide. `Vocabulary` says what a mask is."""

    def __init__(self, compiled: Compiled, end_ids: frozenset[int]) -> None:
        """`end_ids` may end the answer. There must be one."""
        self._compiled = compiled
        self._matcher = compiled.matcher.deep_copy()
        vocabulary = compiled.vocabulary
        self._ends = vocabulary.mask_of(end_ids)
        self._others = ~(self._ends | vocabulary.marks)
        self._num_accepted = 0
        self._is_over = False  # an end id was drawn
        self._spent_s = 0.0

    def fill(self, sequence: EmbeddedSequence, masks: Mask, row: int) -> None:
        """Write into row `row` of `masks` which tokens may come next. Fails the sequence if that is not known."""
        token_ids = sequence.token_ids
        for token_id in token_ids[sequence.num_prompt_tokens + self._num_accepted :]:
            self._accept(sequence, token_id)
        if self._is_over:
            masks[row] = self._ends
        elif sequence.error is None:
            masks[row] = self._compiled.vocabulary.mask_from(self._matcher) & self._others
            if self._matcher.is_error():
                self._fail(sequence)
            elif self._matcher.is_accepting():
                masks[row] |= self._ends
        sequence.must_end = sequence.min_tokens > self._num_accepted and not (masks[row] & ~self._ends).any()

    def _accept(self, sequence: EmbeddedSequence, token_id: int) -> None:
        self._num_accepted += 1
        self._is_over = self._is_over or token_id in sequence.end_ids
        if not self._is_over and sequence.error is None and not self._matcher.consume_token(token_id):
            self._fail(sequence)

    def _fail(self, sequence: EmbeddedSequence) -> None:
        """End the request with the error of the matcher, which would look like the end of the structure."""
        from handlers.base.guide_text import reason_of

        self._compiled.is_spent = True
        sequence.fail(f"{RULE}: {reason_of(self._matcher)}", ErrorKind.INVALID, FIELD)

    def note(self, sequence: EmbeddedSequence, spent_s: float) -> None:
        """Note the processor time of a mask. Fails the sequence if its guide takes too long."""
        self._spent_s += spent_s
        if self._spent_s > MAX_START_S + MAX_TOKEN_S * self._num_accepted:
            limit = f"{MAX_START_S * 1000:g} ms and {MAX_TOKEN_S * 1000:g} ms for each token"
            sequence.fail(f"must be a structure that is quick to follow: over {limit}", ErrorKind.INVALID, FIELD)


def fill_masks(sequences: list[EmbeddedSequence], rows: list[int], vocab_size: int) -> Mask:
    """The masks (num_sequences, vocab / 32). Only the sequences at `rows` have guides; others may draw any token."""
    masks = np.full((len(sequences), -(-vocab_size // WORD_BITS)), -1, np.int32)
    started_s, times_s = time.thread_time(), [time.perf_counter()]
    for row in rows:
        try:
            if (guide := sequences[row].guide) is not None:
                guide.fill(sequences[row], masks, row)
        except Exception as error:  # the other rows go on
            sequences[row].fail(f"the guide failed: {cause_line(error)}")
        times_s.append(time.perf_counter())
    spent_s = time.thread_time() - started_s  # what other threads took does not count
    if spent_s > MAX_TOKEN_S:  # less is within the limit, whoever took it
        for row, before_s, after_s in zip(rows, times_s, times_s[1:], strict=False):
            if (guide := sequences[row].guide) is not None:
                guide.note(sequences[row], min(after_s - before_s, spent_s))
    return masks
