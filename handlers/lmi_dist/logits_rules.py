"""What changes the logits of a request before its token is drawn: functions of the user, then bias,
penalties and bans.

The functions run on the thread of the engine, between two steps of the model: what they take, every
request waits for. Logits are torch's tensors in the host's memory where torch is installed, and
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
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from handlers.base.configuration import BATCHED, check_post_processors, load_post_processors, said
from handlers.base.sequence import Sequence
from handlers.lmi_dist.native.sampling import Floats, Ints, Sampling
from handlers.lmi_dist.sequence import EmbeddedSequence
from lmi.errors import shorten
from lmi.executor import ExecutorConfig, LogitsPostProcessorConfig
from lmi.executor.checks import broken
from lmi.settings.config import EngineConfig

ARRAYS = (
    "numpy" if find_spec("torch") is None else "torch"
)  # the library whose arrays functions get

log = logging.getLogger(__name__)


class SequenceLogits(NamedTuple):
    """The logits of one sequence in a step, float32 (1, num_beams, vocab), a view; and what its
    beams have so far.
    """

    sequence: EmbeddedSequence
    logits: Any  # a tensor of torch, or an array of numpy
    token_ids: list[list[int]]  # of each beam, without the prompt


class PostProcessors:
    """The functions of a configuration, which is read once. Raises ValueError if it is wrong."""

    def __init__(self, config: LogitsPostProcessorConfig) -> None:
        check_post_processors(config)
        self._named = dict(config.processor_map)
        self._batched = config.processor_batched
        self.names = (
            *self._named,
            *([] if self._batched is None else [BATCHED]),
        )  # that a request may give

    def apply(self, logits: Floats, sequences: list[EmbeddedSequence]) -> None:
        """Let the functions change rows of `logits` (num_sequences, vocab), whose requests all name
        one.

        The beams of a search are neighbours among the sequences. A sequence whose function fails
        has an error then.
        """
        batched = []  # the batched function is called last, and once
        for piece in _pieces(logits, sequences):
            if piece.sequence.error is not None:
                continue  # the function has failed for a sibling

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
            log.exception(
                "logits post-processor %s failed for request %d", shorten(name), sequence.id
            )
            sequence.fail(f"logits post-processor {shorten(name)} failed: {said(error)}")

    def _process_batch(self, pieces: list[SequenceLogits]) -> None:
        assert self._batched is not None
        sequences, logits, token_ids = map(list, zip(*pieces, strict=True))
        client_ids = [one.request.client_id for one in sequences]
        try:
            self._batched([one.id for one in sequences], logits, token_ids, None, client_ids)
            for piece, changed in zip(
                pieces, logits, strict=True
            ):  # an entry of the list may be another tensor now
                _replace(piece.logits, changed)
        except (Exception, SystemExit) as error:
            log.exception("the batched logits post-processor failed")
            for one in sequences:
                one.fail(f"the batched logits post-processor failed: {said(error)}")


def new_post_processors(
    settings: ExecutorConfig, options: EngineConfig, model: object
) -> PostProcessors | None:
    """The functions of the configuration, or of the file that an option names, in the folder
    `model`; None without.
    """
    config = settings.logits_post_processor_config
    if options.logits_post_processors is not None:
        folder = model if isinstance(model, str | os.PathLike) else ""
        config = load_post_processors(Path(folder, options.logits_post_processors))

    return None if config is None else PostProcessors(config)


def _pieces(logits: Floats, sequences: list[EmbeddedSequence]) -> Iterator[SequenceLogits]:
    """A piece for each sequence, or for all beams of a search, in the same memory."""
    given: Any = logits
    if ARRAYS == "torch":
        import torch

        given = torch.from_numpy(logits)

    for _, group in groupby(
        range(len(sequences)), key=lambda row: (sequences[row].id, sequences[row].index)
    ):
        own = list(group)
        beams = [sequences[row] for row in own]
        token_ids = [beam.token_ids[beam.num_prompt_tokens :] for beam in beams]
        yield SequenceLogits(beams[0], given[own[0] : own[-1] + 1][None], token_ids)


def _replace(logits: Any, changed: Any) -> None:
    """Copy what a function gave into the logits of the step. Raises ValueError if it has another
    shape.
    """
    if changed is logits:
        return

    is_like = isinstance(changed, type(logits))
    if not is_like or changed.shape != logits.shape:
        given = tuple(changed.shape) if is_like else changed
        noun = "an array" if ARRAYS == "numpy" else "a tensor"
        raise broken("what it returns", f"None or {noun} of shape {tuple(logits.shape)}", given)

    logits[...] = changed


class TokenHistory:
    """Arrays that grow with their sequence."""

    def __init__(self, sequence: Sequence, *, counts_prompt: bool) -> None:
        self.token_ids = array("i")
        self.counts = array("f")  # in the output: 0 for a token that is only in the prompt
        self._indices: dict[int, int] = {}  # token id -> its index in the arrays
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
        self._own: set[tuple[int, ...]] = set()  # the runs whose sets no fork shares

    def fork(self) -> Repeats:
        """The same for another sequence with the same tokens. Sets are copied when one of the two
        changes them.
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
    history: TokenHistory | None = (
        None  # the tokens that penalties count; None if no penalty is set
    )
    banned_ids: list[int] = field(default_factory=list)  # bad words of one token
    early_banned_ids: list[int] = field(
        default_factory=list
    )  # banned until `min_tokens` tokens are generated
    bad_words: list[list[int]] = field(default_factory=list)  # of several tokens
    repeats: Repeats | None = None  # n-grams that must not come again

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
        stops = {
            word[0] for words in sequence.stop_words.values() for word in words if len(word) == 1
        }
        rules.early_banned_ids = [one for one in sequence.end_ids | stops if 0 <= one < vocab_size]

    if request.embedding_bias:
        token_ids, values = zip(*request.embedding_bias, strict=True)
        rules.bias = Bias(np.array(token_ids, np.int32), np.array(values, np.float32))

    if config.repetition_penalty is not None or config.presence_penalty or config.frequency_penalty:
        rules.history = TokenHistory(sequence, counts_prompt=config.repetition_penalty is not None)

    if config.no_repeat_ngram_size:
        rules.repeats = Repeats(config.no_repeat_ngram_size)

    return None if rules == LogitsRules() else rules


def add_rules(sampling: Sampling, ruled: list[RuledRow]) -> None:
    """Put into the lists of a sampling what the rules of its wishes are about in this step."""
    if biases := [one.rules.bias for one in ruled if one.rules.bias is not None]:
        sampling.biased_ids = np.concatenate([bias.token_ids for bias in biases])
        sampling.biases = np.concatenate([bias.values for bias in biases])

    penalised = [(one, one.rules.history) for one in ruled if one.rules.history is not None]
    for one, history in penalised:
        history.catch_up(one.sequence)

    if penalised:
        sizes = [len(history.token_ids) for _, history in penalised]
        sampling.wishes["num_seen"][[one.place for one, _ in penalised]] = sizes
        sampling.seen_ids = np.concatenate([history.token_ids for _, history in penalised])
        sampling.counts = np.concatenate([history.counts for _, history in penalised])

    banned = [one.rules.next_banned_ids(one.sequence) for one in ruled]
    if any(banned):
        sampling.wishes["num_banned"][[one.place for one in ruled]] = [len(ids) for ids in banned]
        sampling.banned_ids = np.array([token_id for ids in banned for token_id in ids], np.int32)
