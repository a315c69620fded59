"""The guide of one sequence: which tokens may come next, so that its answer has the structure that
its request asks for.
"""

from handlers.base.sequence import Sequence
from handlers.guides.compiler import FIELD, RULE, Compiled
from handlers.guides.vocabulary import Mask
from lmi.executor import ErrorKind

# The most processor time that a guide may take, and for each token.
MAX_START_S = 0.05
MAX_TOKEN_S = 0.002


class Guide:
    """How far one sequence has followed its guide. `Vocabulary` says what a mask is."""

    def __init__(self, compiled: Compiled, end_ids: frozenset[int]) -> None:
        """`end_ids` may end the answer. There must be one."""
        self._compiled = compiled
        self._matcher = compiled.matcher.deep_copy()
        self._ends = compiled.vocabulary.mask_of(end_ids)
        self._no_ends = ~(self._ends | compiled.vocabulary.eos_mask)

        self._num_accepted = 0
        # Whether an end id was drawn.
        self._is_over = False
        # The processor time of its masks.
        self._spent_s = 0.0

        # Whether only end ids may come now. They may then come before `min_tokens` too.
        self.must_end = False
        # Which tokens may come behind those that were accepted.
        self.mask: Mask | None = None

    def is_behind(self, sequence: Sequence) -> bool:
        """Whether it does not know the last tokens of its sequence yet."""
        return self.mask is None or self._num_accepted < sequence.num_generated

    def follow(self, sequence: Sequence) -> None:
        """Accept the tokens since the last call, and find the mask.

        Fails the sequence if that cannot be known.
        """
        for token_id in sequence.token_ids[sequence.num_prompt_tokens + self._num_accepted :]:
            self._num_accepted += 1
            self._is_over = self._is_over or token_id in sequence.end_ids
            may_go_on = not self._is_over and sequence.error is None
            if may_go_on and not self._matcher.consume_token(token_id):
                self._fail(sequence)

        if self._is_over:
            self.mask = self._ends
        elif sequence.error is None:
            self.mask = self._compiled.vocabulary.mask_from(self._matcher) & self._no_ends
            if self._matcher.is_error():
                self._fail(sequence)
            elif self._matcher.is_accepting():
                self.mask |= self._ends

        self.must_end = False
        if sequence.min_tokens > self._num_accepted and self.mask is not None:
            self.must_end = not (self.mask & ~self._ends).any()

    def _fail(self, sequence: Sequence) -> None:
        """End the request with the error of the matcher, which would look like the end of the
        structure.
        """
        from handlers.guides.matcher import reason_of

        self._compiled.is_spent = True
        sequence.fail(f"{RULE}: {reason_of(self._matcher)}", ErrorKind.INVALID, FIELD)

    def note(self, sequence: Sequence, spent_s: float) -> None:
        """Count the processor time of a mask. Fails the sequence if its guide takes too long."""
        self._spent_s += spent_s
        if self._spent_s > MAX_START_S + MAX_TOKEN_S * self._num_accepted:
            limit = f"{MAX_START_S * 1000:g} ms and {MAX_TOKEN_S * 1000:g} ms for each token"
            why = f"must be a structure that is quick to follow: over {limit}"
            sequence.fail(why, ErrorKind.INVALID, FIELD)
