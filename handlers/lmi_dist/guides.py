"""Guided decoding: which tokens may come next, so that an answer has the structure that its request asks for.

Each guide is compiled once, beside the loop, and kept for later requests. A sequence waits for its guide before it is
scheduled. Only the loop's thread uses a `Guides`, except where a method says otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Event

import numpy as np

from handlers.base.sequence import Sequence
from handlers.guides.compiler import FIELD, RULE, Compiled, GuideCompiler, Wait
from handlers.guides.process import MAX_COMPILATIONS
from handlers.guides.turns import GuideTurns, Kept, may_change
from handlers.guides.vocabulary import WORD_BITS, Mask, read_config, why_no_guides
from handlers.lmi_dist.sequence import EmbeddedSequence
from lmi.errors import BadConfiguration, InvalidRequest, LmiError, cause_line
from lmi.executor import ErrorKind, GuidedDecodingConfig, GuidedDecodingParams
from lmi.settings.kinds import BOOLEAN

COMPACT = "disable_any_whitespace"  # vLLM's name
MAX_KEPT = 64  # guides; one that was followed far has some megabytes of states
MAX_KEPT_CHARS = 64 << 20  # of all that clients sent
WAIT_S = 0.1  # a request may time out meanwhile
MAX_START_S = 0.05  # of processor time that a guide may take, and for each token
MAX_TOKEN_S = 0.002

Outcome = Compiled | Exception


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
            self._num_accepted += 1
            self._is_over = self._is_over or token_id in sequence.end_ids
            if not self._is_over and sequence.error is None and not self._matcher.consume_token(token_id):
                self._fail(sequence)
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

    def _fail(self, sequence: Sequence) -> None:
        """End the request with the error of the matcher, which would look like the end of the structure."""
        from handlers.guides.text import reason_of

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


@dataclass(slots=True)
class Awaited:
    """A guide that is being compiled, and the sequences that wait for it."""

    future: Future[Compiled]
    wait: Wait
    compile: Callable[[], Compiled]
    sequences: list[EmbeddedSequence] = field(default_factory=list)


class Guides:
    def __init__(
        self,
        read_config: Callable[[], GuidedDecodingConfig],
        vocab_size: int,
        max_compile_s: float,
        *,
        is_compact: bool = True,
    ) -> None:
        self.num_compiled = 0
        self.is_waiting = False  # nothing else is to do
        self._compiler = GuideCompiler(read_config, vocab_size, max_compile_s, is_compact=is_compact)
        self._turns: GuideTurns[Compiled] = GuideTurns(MAX_COMPILATIONS)
        self._follower = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._kept = Kept[Outcome](MAX_KEPT, MAX_KEPT_CHARS)
        self._awaited: dict[GuidedDecodingParams, Awaited] = {}
        self._done: SimpleQueue[GuidedDecodingParams] = SimpleQueue()
        self._changed = Event()

    def admit(self, sequence: EmbeddedSequence) -> bool:
        """Give a sequence its guide. Returns False if the sequence waits for it, or has failed."""
        params = sequence.request.guided_decoding_params
        if params is None:
            return True
        outcome = self._kept.get(params)
        if outcome is None or (isinstance(outcome, Compiled) and outcome.is_spent):
            self._await(sequence, params)
            return False
        equip(sequence, outcome)
        return sequence.error is None

    def _await(self, sequence: EmbeddedSequence, params: GuidedDecodingParams) -> None:
        client, awaited = sequence.request.client_id, self._awaited.get(params)
        if awaited is None:
            wait = Wait()
            compile = partial(self._compiler.compile, params, wait)
            awaited = self._awaited[params] = Awaited(self._turns.submit(client, compile), wait, compile)
            awaited.future.add_done_callback(lambda _: self._note_done(params))
        elif client not in {one.request.client_id for one in awaited.sequences}:
            self._turns.submit(client, awaited.compile, awaited.future)
        awaited.sequences.append(sequence)

    @contextmanager
    def following(self, sequences: list[EmbeddedSequence]) -> Iterator[None]:
        """The guides of these sequences catch up on another thread meanwhile: the block must leave sequences alone."""
        guided = [sequence for sequence in sequences if sequence.guide is not None]
        followed = self._follower.submit(follow, guided) if guided else None
        try:
            yield
        finally:
            if followed is not None and not followed.cancel():  # without a core for the thread, the caller does it
                followed.result()

    def take_ready(self) -> list[EmbeddedSequence]:
        """The sequences whose wait is over. Each has its guide or an error."""
        ready: list[EmbeddedSequence] = []
        while not self._done.empty():
            ready += self._end(self._done.get())
        return ready

    def forget(self, sequence: EmbeddedSequence) -> bool:
        """Forget a sequence that waits for its guide or was refused. Returns whether it is such a one."""
        params = sequence.request.guided_decoding_params
        if params is None or sequence.guide is not None:
            return False
        awaited = self._awaited.get(params)
        if awaited is not None and sequence in awaited.sequences:
            awaited.sequences.remove(sequence)
            if not awaited.sequences:
                del self._awaited[params]
                awaited.future.cancel()
                awaited.wait.end()
        return True

    @property
    def waiting(self) -> list[EmbeddedSequence]:
        """The sequences that wait for their guides; called from any thread."""
        return [sequence for awaited in list(self._awaited.values()) for sequence in list(awaited.sequences)]

    def wait(self) -> None:
        """Sleep until a guide is ready, `wake` is called, or some time has passed."""
        self.is_waiting = True
        self._changed.wait(WAIT_S)
        self._changed.clear()
        self.is_waiting = False

    def wake(self) -> None:
        """End a `wait`; called from any thread."""
        self._changed.set()

    def close(self) -> None:
        self._turns.close()
        self._follower.shutdown()
        self._compiler.close()

    def _note_done(self, params: GuidedDecodingParams) -> None:
        """Runs on the thread that has compiled the guide."""
        self._done.put(params)
        self._changed.set()

    def _end(self, params: GuidedDecodingParams) -> list[EmbeddedSequence]:
        awaited = self._awaited.get(params)
        if awaited is None or not awaited.future.done():  # all have left, and perhaps others have come
            return []
        del self._awaited[params]
        if awaited.future.cancelled():
            return []
        self.num_compiled += 1
        outcome = awaited.future.exception() or awaited.future.result()
        assert isinstance(outcome, Outcome)
        if isinstance(outcome, Compiled) or not may_change(outcome):
            self._kept.put(params, outcome)
        for sequence in awaited.sequences:
            equip(sequence, outcome)
        return awaited.sequences


def are_compact(options: Mapping[str, str]) -> bool:
    """Whether JSON in answers has no spaces between its values. Raises BadConfiguration."""
    text = options.get(COMPACT, "true")
    try:
        return bool(BOOLEAN.parse(text))
    except ValueError:
        raise BadConfiguration(f"option.{COMPACT}={text}: allowed is {BOOLEAN.allowed}") from None


def open_guides(
    config: GuidedDecodingConfig | None,
    folder: str | None,
    vocab_size: int,
    max_compile_s: float,
    *,
    is_compact: bool = True,
) -> tuple[Guides | None, str]:
    """The guides of an engine, or None and the reason why it has none.

    Without a config it is that of the model's folder, which is given where a server runs. It is read with the first
    guide.
    """
    if config is None and folder is None:
        return None, "no GuidedDecodingConfig was given"
    path = Path(folder or ".")
    if reason := why_no_guides(path if config is None else None):
        return None, reason
    read = partial(read_config, path) if config is None else lambda: config
    return Guides(read, vocab_size, max_compile_s, is_compact=is_compact), ""


def equip(sequence: EmbeddedSequence, outcome: Outcome) -> None:
    """Give a sequence the state of its guide, or the error that there was."""
    if isinstance(outcome, LmiError):
        kind = ErrorKind.INVALID if isinstance(outcome, InvalidRequest) else ErrorKind.UNAVAILABLE
        sequence.fail(outcome.message, kind, outcome.field)
    elif isinstance(outcome, Exception):
        sequence.fail(f"the guide cannot be compiled: {cause_line(outcome)}")
    else:
        sequence.end_ids |= outcome.vocabulary.end_ids
        if sequence.end_ids:
            sequence.guide = Guide(outcome, sequence.end_ids)
        else:
            sequence.fail("needs an end id, of the request or of the GuidedDecodingConfig", ErrorKind.INVALID, FIELD)
