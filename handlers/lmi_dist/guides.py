"""The guides of all sequences: compiled beside the loop, and followed together in each step.

Each guide is compiled once, and kept for later requests. A sequence waits for its guide before it
is scheduled. Only the loop's thread uses a `Guides`, except where a method says otherwise.
"""

import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from handlers.base.waiting import Waiting
from handlers.guides.compiler import FIELD, Compiled, GuideCompiler
from handlers.guides.process import Start
from handlers.guides.support import why_no_guides
from handlers.guides.tokenizer_files import read_vocabulary
from handlers.guides.turns import GuideFuture, GuideOutcomes
from handlers.guides.vocabulary import Mask, num_words
from handlers.lmi_dist.guide import MAX_TOKEN_S, Guide
from handlers.lmi_dist.sequence import EmbeddedSequence
from lmi.errors import InvalidRequest, LmiError, cause_line
from lmi.executor import ErrorKind, GuidedDecodingConfig

# The most compiled guides that stay. One that was followed far has some megabytes of states.
MAX_KEPT = 64
# The most characters of their structures, as clients sent them.
MAX_KEPT_CHARS = 64 << 20


class _Guided(NamedTuple):
    guide: Guide
    sequence: EmbeddedSequence


class Guides(Waiting[EmbeddedSequence, Compiled]):
    """The guides of an engine, and the sequences that wait for one."""

    def __init__(
        self, config: GuidedDecodingConfig | None, folder: str | None, start: Start
    ) -> None:
        """`config` has the vocabulary. In its place a server gives the model's folder, which is
        read with the first guide. `start` has the limits of a compilation.
        """
        super().__init__()
        path = Path(folder or ".")
        self.why_none = "no GuidedDecodingConfig was given"
        if config is not None or folder is not None:
            # "" if there are guides.
            self.why_none = why_no_guides(path if config is None else None)

        def load_config() -> GuidedDecodingConfig:
            return read_vocabulary(path) if config is None else config

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
        """Let the guides of these sequences catch up on another thread meanwhile: the block must
        leave sequences alone.
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
        """Return the sequences whose wait is over. Each has its guide or an error."""
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
        """End the process that compiles, and the thread."""
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


def follow(sequences: Iterable[EmbeddedSequence]) -> None:
    """Let the guides of sequences catch up with their tokens.

    A guide that fails, or is slow, ends its request.
    """
    behind: list[_Guided] = []
    for sequence in sequences:
        guide = sequence.guide
        if guide is not None and guide.is_behind(sequence):
            behind.append(_Guided(guide, sequence))

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
    """Return the masks of sequences, (num_sequences, num_words).

    Only the sequences at `rows` have guides; others may draw any token.
    """
    masks = np.full((len(sequences), num_words(vocab_size)), -1, np.int32)
    follow([sequences[row] for row in rows])
    for row in rows:
        guide = sequences[row].guide
        # Without a mask it has failed.
        if guide is not None and guide.mask is not None:
            masks[row] = guide.mask

    return masks
