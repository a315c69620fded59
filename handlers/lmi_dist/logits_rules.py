"""The rules of a request that change logits before a token is drawn: first bias, then penalties, then bans.

The repetition penalty counts prompt and output (as transformers does). Presence and frequency penalties count only the
output (as vLLM does). Bad words are matched on the output. An n-gram of `no_repeat_ngram_size` tokens comes only once
in prompt and output (as in transformers). Until `min_tokens` tokens are generated, end ids and stop
words of one token are banned. `ignore_eos` bans no token: an end token may be drawn and generation continues (as in
vLLM).

Each kind of rule is one gather or scatter over a flat view of the logits, for all rows that have such a rule.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from handlers.base.sequence import Sequence
from handlers.lmi_dist.repeats import Repeats
from handlers.lmi_dist.token_history import FloatArray, IntArray, TokenHistory


class Bias(NamedTuple):
    token_ids: IntArray
    values: FloatArray


@dataclass(slots=True)
class LogitsRules:
    """The rules of one sequence."""

    bias: Bias | None = None
    history: TokenHistory | None = None  # the tokens that penalties count; None if no penalty is set
    banned_ids: list[int] = field(default_factory=list)  # bad words of one token
    early_banned_ids: list[int] = field(default_factory=list)  # banned until `min_tokens` tokens are generated
    bad_words: list[list[int]] = field(default_factory=list)  # of several tokens
    repeats: Repeats | None = None  # n-grams that must not come again

    def is_empty(self) -> bool:
        is_off = self.bias is None and self.history is None and self.repeats is None
        return is_off and not (self.banned_ids or self.early_banned_ids or self.bad_words)

    def fork(self) -> LogitsRules:
        """The same rules for another sequence with the same tokens."""
        return replace(self, history=self.history and self.history.fork(), repeats=self.repeats and self.repeats.fork())

    def next_banned_ids(self, sequence: Sequence) -> list[int]:
        """Token ids that must not come next."""
        banned, num_generated = self.banned_ids, sequence.num_generated
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
    """A row of the logits, the sequence that it belongs to, and the rules of that sequence."""

    row: int
    sequence: Sequence
    rules: LogitsRules


def new_rules(sequence: Sequence, vocab_size: int) -> LogitsRules | None:
    """The rules that the request of a sequence asks for, or None if it asks for none."""
    request, config = sequence.request, sequence.request.sampling_config
    rules = LogitsRules(
        banned_ids=[word[0] for word in request.bad_words if len(word) == 1],
        bad_words=[list(word) for word in request.bad_words if len(word) > 1],
    )
    if config.min_tokens:
        stops = {word[0] for words in sequence.stop_words.values() for word in words if len(word) == 1}
        rules.early_banned_ids = [one for one in sequence.end_ids | stops if 0 <= one < vocab_size]
    if request.embedding_bias:
        token_ids, values = zip(*request.embedding_bias, strict=True)
        rules.bias = Bias(np.array(token_ids, np.int64), np.array(values, np.float32))
    if config.repetition_penalty is not None or config.presence_penalty or config.frequency_penalty:
        rules.history = TokenHistory(sequence, counts_prompt=config.repetition_penalty is not None)
    if config.no_repeat_ngram_size:
        rules.repeats = Repeats(config.no_repeat_ngram_size)
    return None if rules.is_empty() else rules


def apply_rules(logits: Tensor, ruled: list[RuledRow]) -> None:
    """Change, in place, the rows of `logits` (num_rows, vocab) that have rules."""
    if ruled:
        _add_bias(logits, [(one.row, one.rules.bias) for one in ruled if one.rules.bias is not None])
        _penalise(logits, [(one, one.rules.history) for one in ruled if one.rules.history is not None])
        _ban(logits, ruled)


def _add_bias(logits: Tensor, biased: list[tuple[int, Bias]]) -> None:
    """Add the bias of each row to `logits` (num_rows, vocab)."""
    if not biased:
        return
    index = np.concatenate([bias.token_ids + row * logits.shape[1] for row, bias in biased])
    values = np.concatenate([bias.values for _, bias in biased])
    logits.view(-1).index_put_((_on(logits, index),), _on(logits, values), accumulate=True)


def _penalise(logits: Tensor, penalised: list[tuple[RuledRow, TokenHistory]]) -> None:
    """Apply penalties to `logits` (num_rows, vocab). Other arrays have one entry for each token of each history."""
    if not penalised:
        return
    for one, history in penalised:
        history.catch_up(one.sequence)
    sizes = [history.size for _, history in penalised]
    configs = [one.sequence.request.sampling_config for one, _ in penalised]

    def spread(values: list[float]) -> FloatArray:  # one value per row -> one per token of its history
        return np.repeat(np.array(values, np.float32), sizes)

    index = np.concatenate([history.token_ids[: history.size] for _, history in penalised])
    index += np.repeat(np.array([one.row * logits.shape[1] for one, _ in penalised], np.int64), sizes)
    counts = np.concatenate([history.counts[: history.size] for _, history in penalised])
    repetition = _on(logits, spread([config.repetition_penalty or 1.0 for config in configs]))
    less = spread([config.frequency_penalty or 0.0 for config in configs]) * counts
    less += spread([config.presence_penalty or 0.0 for config in configs]) * (counts > 0)
    flat, where = logits.view(-1), _on(logits, index)
    scores = flat[where]
    scores = torch.where(scores > 0, scores / repetition, scores * repetition)
    flat[where] = scores - _on(logits, less)


def _ban(logits: Tensor, ruled: list[RuledRow]) -> None:
    """Set the banned tokens of `logits` (num_rows, vocab) to -inf."""
    vocab_size = logits.shape[1]
    banned = [one.row * vocab_size + token_id for one in ruled for token_id in one.rules.next_banned_ids(one.sequence)]
    if banned:
        logits.view(-1)[torch.tensor(banned, device=logits.device)] = -math.inf


def _on(logits: Tensor, array: IntArray | FloatArray) -> Tensor:
    """Turn an array (n,) into a tensor on the device of the logits."""
    return torch.from_numpy(array).to(logits.device)
