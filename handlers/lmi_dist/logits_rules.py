"""The rules of a request that change its logits before a token is drawn: bias, penalties, and bans.

The repetition penalty and `no_repeat_ngram_size` count prompt and output (as in transformers);
presence and frequency penalties and bad words only the output (as in vLLM). Until `min_tokens`
tokens are generated, end ids and stop words of one token are banned. `ignore_eos` bans no token.
"""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from handlers.base.sequence import Sequence
from handlers.lmi_dist.native.sampling_records import Floats, Ints, Sampling
from handlers.lmi_dist.token_history import Repeats, TokenHistory


class Bias(NamedTuple):
    """What is added to the logits of tokens."""

    # (num_tokens,)
    token_ids: Ints
    # (num_tokens,)
    values: Floats


class LogitsRules(Struct):
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
        """Return the rules of another sequence with the same tokens."""
        return replace(
            self,
            history=self.history and self.history.fork(),
            repeats=self.repeats and self.repeats.fork(),
        )

    def next_banned_ids(self, sequence: Sequence, *, must_end: bool) -> list[int]:
        """Return the token ids that must not come next.

        Before `min_tokens` these include the ends, unless a guide lets nothing else come, which
        `must_end` says.
        """
        banned = self.banned_ids
        num_generated = sequence.num_generated
        is_early = num_generated < sequence.min_tokens and not must_end
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
    """A row of a step whose sequence has rules."""

    # Its place among the rows of the step.
    place: int
    sequence: Sequence
    rules: LogitsRules
    # Whether a guide lets only end ids come, which then may come before `min_tokens` too.
    must_end: bool = False


def new_rules(sequence: Sequence, vocab_size: int) -> LogitsRules | None:
    """Return the rules that the request of a sequence asks for, or None if it asks for none."""
    request = sequence.request
    config = request.sampling_config
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
    """Put into the lists of a sampling the ids that the rules of its rows name in this step, with
    their biases and counts.
    """
    biases = [row.rules.bias for row in ruled if row.rules.bias is not None]
    if biases:
        sampling.biased_ids = np.concatenate([bias.token_ids for bias in biases])
        sampling.biases = np.concatenate([bias.values for bias in biases])

    _add_penalties(sampling, ruled)

    banned: list[list[int]] = []
    for row in ruled:
        rules = row.rules
        banned.append(rules.next_banned_ids(row.sequence, must_end=row.must_end))

    if any(banned):
        places = [row.place for row in ruled]
        sampling.params["num_banned"][places] = [len(token_ids) for token_ids in banned]
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

    sampling.params["num_seen"][places] = [len(history.token_ids) for history in histories]
    sampling.seen_ids = np.concatenate([history.token_ids for history in histories])
    sampling.counts = np.concatenate([history.counts for history in histories])
