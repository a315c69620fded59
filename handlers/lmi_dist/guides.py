"""Guided decoding: which tokens may come next, so that an answer has the structure that its request
asks for.

Each guide is compiled once, beside the loop, and kept for later requests. A sequence waits for its
guide before it is scheduled. Only the loop's thread uses a `Guides`, except where a method says
otherwise.
"""

import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from handlers.base.sequence import Sequence
from handlers.base.waiting import Waiting
from handlers.guides.compiler import FIELD, RULE, Compiled, GuideCompiler
from handlers.guides.process import Start
from handlers.guides.turns import GuideFuture, GuideOutcomes
from handlers.guides.vocabulary import WORD_BITS, Mask, read_config, why_no_guides
from handlers.lmi_dist.sequence import EmbeddedSequence
from lmi.errors import InvalidRequest, LmiError, cause_line
from lmi.executor import ErrorKind, GuidedDecodingConfig

# The most compiled guides that stay. One that was followed far has some megabytes of states.
MAX_KEPT = 64
# The most characters of their structures, as clients sent them.
MAX_KEPT_CHARS = 64 << 20
# The most processor time that a guide may take, and for each token.
MAX_START_S = 0.05
MAX_TOKEN_S = 0.002


class Guide:
    """The state of one sequence in its guide. `Vocabulary` says what a mask is."""

    def __init__(self, compiled: Compiled, end_ids: frozenset[int]) -> None:
        """`end_ids` may end the answer. There must be one."""
        self._compiled = compiled
        self._matcher = compiled.matcher.deep_copy()
        self._ends = compiled.vocabulary.mask_of(end_ids)
        self._others = ~(self._ends | compiled.vocabulary.marks)
        self._num_accepted = 0
        # Whether an end id was drawn.
        self._is_over = False
        self._spent_s = 0.0
        # Which tokens may come behind those that were accepted.
        self.mask: Mask | None = None

    def is_behind(self, sequence: Sequence) -> bool:
        return self.mask is None or self._num_accepted < sequence.num_generated

    def follow(self, sequence: EmbeddedSequence) -> None:
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
            self.mask = self._compiled.vocabulary.mask_from(self._matcher) & self._others
            if self._matcher.is_error():
                self._fail(sequence)
            elif self._matcher.is_accepting():
                self.mask |= self._ends

        sequence.must_end = False
        if sequence.min_tokens > self._num_accepted and self.mask is not None:
            sequence.must_end = not (self.mask & ~self._ends).any()

    def _fail(self, sequence: Sequence) -> None:
        """End the request with the error of the matcher, which would look like the end of the
        structure.
        """
        from handlers.guides.text import reason_of

        self._compiled.is_spent = True
        sequence.fail(f"{RULE}: {reason_of(self._matcher)}", ErrorKind.INVALID, FIELD)

    def note(self, sequence: Sequence, spent_s: float) -> None:
        """Note the processor time of a mask. Fails the sequence if its guide takes too long."""
        self._spent_s += spent_s
        if self._spent_s > MAX_START_S + MAX_TOKEN_S * self._num_accepted:
            limit = f"{MAX_START_S * 1000:g} ms and {MAX_TOKEN_S * 1000:g} ms for each token"
            why = f"must be a structure that is quick to follow: over {limit}"
            sequence.fail(why, ErrorKind.INVALID, FIELD)


def follow(sequences: Iterable[EmbeddedSequence]) -> None:
    """Let the guides of sequences catch up with their tokens.

    A guide that fails, or is slow, ends its request.
    """
    behind: list[tuple[Guide, EmbeddedSequence]] = []
    for sequence in sequences:
        guide = sequence.guide
        if guide is not None and guide.is_behind(sequence):
            behind.append((guide, sequence))

    if not behind:
        return

    started_s = time.thread_time()
    times_s = [time.perf_counter()]
    for guide, sequence in behind:
        try:
            guide.follow(sequence)
        except Exception as error:
            # The others go on.
            sequence.fail(f"the guide failed: {cause_line(error)}")

        times_s.append(time.perf_counter())

    # What other threads took does not count, and less is within the limit, whoever took it.
    spent_s = time.thread_time() - started_s
    if spent_s > MAX_TOKEN_S:
        for (guide, sequence), before_s, after_s in zip(behind, times_s, times_s[1:], strict=False):
            guide.note(sequence, min(after_s - before_s, spent_s))


def fill_masks(sequences: list[EmbeddedSequence], rows: list[int], vocab_size: int) -> Mask:
    """The masks (num_sequences, vocab / 32).

    Only the sequences at `rows` have guides; others may draw any token.
    """
    masks = np.full((len(sequences), -(-vocab_size // WORD_BITS)), -1, np.int32)
    follow([sequences[row] for row in rows])
    for row in rows:
        guide = sequences[row].guide
        # Without a mask it has failed.
        if guide is not None and guide.mask is not None:
            masks[row] = guide.mask

    return masks


class Guides(Waiting[EmbeddedSequence, Compiled]):
    def __init__(
        self, config: GuidedDecodingConfig | None, folder: str | None, start: Start
    ) -> None:
        """Without a config it is that of the model's folder, where a server runs.

        It is read with the first guide.
        """
        super().__init__()
        path = Path(folder or ".")
        self.why_none = "no GuidedDecodingConfig was given"
        if config is not None or folder is not None:
            # It is "" if there are guides.
            self.why_none = why_no_guides(path if config is None else None)

        def load_config() -> GuidedDecodingConfig:
            return read_config(path) if config is None else config

        compiler = GuideCompiler(load_config, start)
        self._compiler = compiler
        self.outcomes = GuideOutcomes(compiler, compiler.compile, MAX_KEPT, MAX_KEPT_CHARS)
        self._follower = ThreadPoolExecutor(1, thread_name_prefix="masks")

    def admit(self, sequence: EmbeddedSequence) -> bool:
        """Give a sequence its guide. Returns False if the sequence waits for it, or has failed."""
        params = sequence.request.guided_decoding_params
        if params is None:
            return True

        future = self.outcomes.of(params, sequence.request.client_id)
        if not future.done():
            self.add_waiting(sequence, future)
            return False

        equip(sequence, future.exception() or future.result())
        return sequence.error is None

    @contextmanager
    def following(self, sequences: list[EmbeddedSequence]) -> Iterator[None]:
        """The guides of these sequences catch up on another thread meanwhile: the block must leave
        sequences alone.
        """
        guided = [sequence for sequence in sequences if sequence.guide is not None]
        followed: Future[None] | None = None
        if guided:
            followed = self._follower.submit(follow, guided)

        try:
            yield
        finally:
            # Without a core for the thread, the caller does it.
            if followed is not None and not followed.cancel():
                followed.result()

    def take_ready(self) -> list[EmbeddedSequence]:
        """The sequences whose wait is over. Each has its guide or an error."""
        ready = self.take_done()
        for sequence, future in ready:
            equip(sequence, future.exception() or future.result())

        return [sequence for sequence, _ in ready]

    def forget(self, sequence: EmbeddedSequence) -> bool:
        """Forget a sequence that waits for its guide or was refused.

        Returns whether it is such a one.
        """
        if sequence.request.guided_decoding_params is None or sequence.guide is not None:
            return False

        future = self.drop_waiting(sequence)
        if isinstance(future, GuideFuture):
            future.give_up()

        return True

    def close(self) -> None:
        self.outcomes.close()
        self._follower.shutdown()


def equip(sequence: EmbeddedSequence, outcome: Compiled | BaseException) -> None:
    """Give a sequence the state of its guide, or the error that there was."""
    if isinstance(outcome, InvalidRequest):
        sequence.fail(outcome.message, ErrorKind.INVALID, outcome.field)
        return

    if isinstance(outcome, LmiError):
        sequence.fail(outcome.message, ErrorKind.UNAVAILABLE, outcome.field)
        return

    if isinstance(outcome, BaseException):
        sequence.fail(f"the guide cannot be compiled: {cause_line(outcome)}")
        return

    sequence.end_ids |= outcome.vocabulary.end_ids
    if sequence.end_ids:
        sequence.guide = Guide(outcome, sequence.end_ids)
    else:
        why = "needs an end id, of the request or of the GuidedDecodingConfig"
        sequence.fail(why, ErrorKind.INVALID, FIELD)
