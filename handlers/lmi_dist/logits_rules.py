"""What changes the logits of a request before its token is drawn: functions of the user, then bias,
penalties and bans.

The functions run on the thread of the engine, between two steps of the model: every request waits
while they run. Logits are torch's tensors in the host's memory where torch is installed, and
numpy's arrays elsewhere; the stream is None. Source: LogitsPostProcessorConfig of TensorRT-LLM's
Executor API.

The repetition penalty and `no_repeat_ngram_size` count prompt and output (as in transformers);
presence and frequency penalties and bad words only the output (as in vLLM). Until `min_tokens`
tokens are generated, end ids and stop words of one token are banned. `ignore_eos` bans no token.
"""

from __future__ import annotations

import logging
import os
from array import array
from collections.abc import Collection, Iterator
from copy import copy
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from itertools import chain, groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from handlers.base.post_processors import BATCHED, check_post_processors, load_post_processors
from handlers.base.sequence import Sequence
from handlers.lmi_dist.native.sampling import Floats, Ints, Sampling
from handlers.lmi_dist.sequence import EmbeddedSequence
from lmi.errors import error_line, shorten
from lmi.executor import ExecutorConfig, LogitsPostProcessorConfig
from lmi.executor.checks import broken
from lmi.settings.config import EngineConfig

# The library whose arrays functions get.
ARRAYS = "numpy" if find_spec("torch") is None else "torch"

log = logging.getLogger(__name__)


class SequenceLogits(NamedTuple):
    """The logits of one sequence in a step, float32 (1, num_beams, vocab), a view; and what its
    beams have so far.
    """

    sequence: EmbeddedSequence
    # A tensor of torch, or an array of numpy.
    logits: Any
    # The tokens of each beam, without the prompt.
    token_ids: list[list[int]]


class PostProcessors:
    """The functions of a configuration, which is read once. Raises ValueError if it is wrong."""

    def __init__(self, config: LogitsPostProcessorConfig) -> None:
        check_post_processors(config)
        self._named = dict(config.processor_map)
        self._batched = config.processor_batched
        # A request may give one of these.
        self.names = tuple(self._named)
        if self._batched is not None:
            self.names += (BATCHED,)

    def apply(self, logits: Floats, sequences: list[EmbeddedSequence]) -> None:
        """Let the functions change the rows of `logits` (num_sequences, vocab), of sequences whose
        requests each name a function.

        The beams of a search are neighbours among the sequences. A sequence whose function fails
        gets an error.
        """
        # The batched function is called last, and once.
        batched = []
        for piece in _pieces(logits, sequences):
            if piece.sequence.error is not None:
                # The function has failed for a sibling.
                continue

            if piece.sequence.request.logits_post_processor_name == BATCHED:
                batched.append(piece)
            else:
                self._process_one(piece)

        if batched:
            self._process_batch(batched)

    def _process_one(self, piece: SequenceLogits) -> None:
        sequence, logits, token_ids = piece
        name = sequence.request.logits_post_processor_name or ""
        client_id = sequence.request.client_id

        try:
            changed = self._named[name](sequence.id, logits, token_ids, None, client_id)
            if changed is not None:
                _replace(logits, changed)
        except (Exception, SystemExit) as error:
            short_name = shorten(name)
            log.exception("logits post-processor %s failed for request %d", short_name, sequence.id)
            sequence.fail(f"logits post-processor {short_name} failed: {error_line(error)}")

    def _process_batch(self, pieces: list[SequenceLogits]) -> None:
        assert self._batched is not None
        sequences, logits, token_ids = map(list, zip(*pieces, strict=True))
        ids = [sequence.id for sequence in sequences]
        client_ids = [sequence.request.client_id for sequence in sequences]

        try:
            self._batched(ids, logits, token_ids, None, client_ids)
            # An entry of the list may be another tensor now.
            for piece, changed in zip(pieces, logits, strict=True):
                _replace(piece.logits, changed)
        except (Exception, SystemExit) as error:
            log.exception("the batched logits post-processor failed")
            for sequence in sequences:
                sequence.fail(f"the batched logits post-processor failed: {error_line(error)}")


def new_post_processors(
    settings: ExecutorConfig, options: EngineConfig, model: object
) -> PostProcessors | None:
    """The functions of the configuration, or of the file that an option names, in the folder
    `model`. Returns None if there are none.
    """
    config = settings.logits_post_processor_config
    if options.logits_post_processors is not None:
        folder = model if isinstance(model, str | os.PathLike) else ""
        config = load_post_processors(Path(folder, options.logits_post_processors))

    if config is None:
        return None

    return PostProcessors(config)


def _pieces(logits: Floats, sequences: list[EmbeddedSequence]) -> Iterator[SequenceLogits]:
    """A piece for each sequence, or for all beams of a search, in the same memory."""
    arrays: Any = logits
    if ARRAYS == "torch":
        import torch

        arrays = torch.from_numpy(logits)

    first = 0
    for _, group in groupby(sequences, key=attrgetter("id", "index")):
        beams = list(group)
        end = first + len(beams)
        token_ids = [beam.token_ids[beam.num_prompt_tokens :] for beam in beams]
        yield SequenceLogits(beams[0], arrays[first:end][None], token_ids)

        first = end


def _replace(logits: Any, changed: Any) -> None:
    """Copy what a function gave into the logits of the step.

    Raises ValueError if it has another shape.
    """
    if changed is logits:
        return

    is_array = isinstance(changed, type(logits))
    if not is_array or changed.shape != logits.shape:
        returned = tuple(changed.shape) if is_array else changed
        noun = "an array" if ARRAYS == "numpy" else "a tensor"
        raise broken("what it returns", f"None or {noun} of shape {tuple(logits.shape)}", returned)

    logits[...] = changed


class TokenHistory:
    """Arrays that grow with their sequence."""

    def __init__(self, sequence: Sequence, *, counts_prompt: bool) -> None:
        self.token_ids = array("i")
        # How often a token is in the output: 0 for one that is only in the prompt.
        self.counts = array("f")
        # The index of each token id in the arrays.
        self._indices: dict[int, int] = {}
        self._num_seen = sequence.num_prompt_tokens
        if counts_prompt:
            for token_id in sequence.token_ids[: self._num_seen]:
                self._index(token_id)

    def fork(self) -> TokenHistory:
        forked = copy(self)
        forked.token_ids = self.token_ids[:]
        forked.counts = self.counts[:]
        forked._indices = self._indices.copy()
        return forked

    def catch_up(self, sequence: Sequence) -> None:
        """Count the tokens that were generated since the last call."""
        for token_id in sequence.token_ids[self._num_seen :]:
            self.counts[self._index(token_id)] += 1

        self._num_seen = sequence.num_tokens

    def _index(self, token_id: int) -> int:
        index = self._indices.setdefault(token_id, len(self.token_ids))
        if index == len(self.token_ids):
            self.token_ids.append(token_id)
            self.counts.append(0)

        return index


class Repeats:
    """Knows what came after each run of `size - 1` tokens. It grows with its sequence."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._num_seen = 0
        self._next: dict[tuple[int, ...], set[int]] = {}
        # The runs whose sets no fork shares.
        self._own: set[tuple[int, ...]] = set()

    def fork(self) -> Repeats:
        """The same for another sequence with the same tokens.

        Sets are copied when one of the two changes them.
        """
        forked = copy(self)
        forked._next = self._next.copy()
        self._own = set()
        forked._own = set()
        return forked

    def next_banned_ids(self, sequence: Sequence) -> Collection[int]:
        """The tokens that would end an n-gram that the sequence has already."""
        token_ids = sequence.token_ids
        num_before = self._size - 1
        for end in range(max(self._num_seen, num_before), len(token_ids)):
            run = tuple(token_ids[end - num_before : end])
            if run not in self._own:
                self._own.add(run)
                self._next[run] = self._next.get(run, set()).copy()

            self._next[run].add(token_ids[end])

        self._num_seen = len(token_ids)
        return self._next.get(tuple(token_ids[len(token_ids) - num_before :]), ())


class Bias(NamedTuple):
    token_ids: Ints
    values: Floats


@dataclass(slots=True)
class LogitsRules:
    """The rules of one sequence."""

    bias: Bias | None = None
    # The tokens that penalties count. None if no penalty is set.
    history: TokenHistory | None = None
    # Bad words of one token.
    banned_ids: list[int] = field(default_factory=list)
    # Tokens that are banned until `min_tokens` tokens are generated.
    early_banned_ids: list[int] = field(default_factory=list)
    # Bad words of several tokens.
    bad_words: list[list[int]] = field(default_factory=list)
    # N-grams that must not come again.
    repeats: Repeats | None = None

    def fork(self) -> LogitsRules:
        return replace(
            self,
            history=self.history and self.history.fork(),
            repeats=self.repeats and self.repeats.fork(),
        )

    def next_banned_ids(self, sequence: EmbeddedSequence) -> list[int]:
        """Token ids that must not come next."""
        banned = self.banned_ids
        num_generated = sequence.num_generated
        is_early = num_generated < sequence.min_tokens and not sequence.must_end
        if self.early_banned_ids and is_early:
            banned = banned + self.early_banned_ids

        for word in self.bad_words:
            start = len(word) - 1
            if start <= num_generated and sequence.token_ids[-start:] == word[:-1]:
                banned = [*banned, word[-1]]

        if self.repeats is not None:
            banned = [*banned, *self.repeats.next_banned_ids(sequence)]

        return banned


class RuledRow(NamedTuple):
    """The place of a wish among those of a step, the sequence that it belongs to, and the rules of
    that sequence.
    """

    place: int
    sequence: EmbeddedSequence
    rules: LogitsRules


def new_rules(sequence: EmbeddedSequence, vocab_size: int) -> LogitsRules | None:
    """The rules that the request of a sequence asks for, or None if it asks for none."""
    request = sequence.request
    config = sequence.request.sampling_config
    rules = LogitsRules(
        banned_ids=[word[0] for word in request.bad_words if len(word) == 1],
        bad_words=[list(word) for word in request.bad_words if len(word) > 1],
    )
    if config.min_tokens:
        words = chain.from_iterable(sequence.stop_words.values())
        ends = sequence.end_ids | {word[0] for word in words if len(word) == 1}
        rules.early_banned_ids = [token_id for token_id in ends if 0 <= token_id < vocab_size]

    if request.embedding_bias:
        token_ids, values = zip(*request.embedding_bias, strict=True)
        rules.bias = Bias(np.array(token_ids, np.int32), np.array(values, np.float32))

    if config.repetition_penalty is not None or config.presence_penalty or config.frequency_penalty:
        rules.history = TokenHistory(sequence, counts_prompt=config.repetition_penalty is not None)

    if config.no_repeat_ngram_size:
        rules.repeats = Repeats(config.no_repeat_ngram_size)

    if rules == LogitsRules():
        return None

    return rules


def add_rules(sampling: Sampling, ruled: list[RuledRow]) -> None:
    """Put into the lists of a sampling the ids that the rules of its wishes name in this step, with
    their biases and counts.
    """
    biases = [row.rules.bias for row in ruled if row.rules.bias is not None]
    if biases:
        sampling.biased_ids = np.concatenate([bias.token_ids for bias in biases])
        sampling.biases = np.concatenate([bias.values for bias in biases])

    _add_penalties(sampling, ruled)

    banned = [row.rules.next_banned_ids(row.sequence) for row in ruled]
    if any(banned):
        places = [row.place for row in ruled]
        sampling.wishes["num_banned"][places] = [len(token_ids) for token_ids in banned]
        sampling.banned_ids = np.array(list(chain.from_iterable(banned)), np.int32)


def _add_penalties(sampling: Sampling, ruled: list[RuledRow]) -> None:
    """Put the tokens that penalties count, and how often each came, into the lists."""
    places: list[int] = []
    histories: list[TokenHistory] = []
    for row in ruled:
        history = row.rules.history
        if history is not None:
            history.catch_up(row.sequence)
            places.append(row.place)
            histories.append(history)

    if not histories:
        return

    sampling.wishes["num_seen"][places] = [len(history.token_ids) for history in histories]
    sampling.seen_ids = np.concatenate([history.token_ids for history in histories])
    sampling.counts = np.concatenate([history.counts for history in histories])
