"""Draws a token from each row of the logits, by the rules of the row's request.

First log-probs are computed from the model's logits (`log_probs`). Then functions of the user change the logits
(`post_processors`), then rules (`logits_rules`), and a guide leaves the tokens that may come next (`guide`). Then
temperature, top_k, top_p, min_p and typical_p apply, each to the result of the one before, as in transformers. Last,
one uniform number per (seed, position) picks the token by inverse CDF.

The bits of a row's result depend only on that row. Every operation is one that torch computes row by row (softmax,
cumsum, topk, max) or that is exactly rounded element by element (divide, compare). The sampler does not use an
element-wise exp or log over the whole batch: torch cuts it between threads, where vector and scalar code round
differently.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from handlers.base.randomness import uniform
from handlers.base.sequence import Sequence
from handlers.lmi_dist.guide import apply_masks, fill_masks
from handlers.lmi_dist.log_probs import chosen_log_probs, top_log_probs
from handlers.lmi_dist.logits_rows import take_rows
from handlers.lmi_dist.logits_rules import LogitsRules, RuledRow, apply_rules, new_rules
from handlers.lmi_dist.post_processors import PostProcessors
from lmi.executor import SamplingConfig, TokenLogProb

WIDTHS = (64, 256, 1024)  # how many of the best tokens top_k and top_p look at; a row that needs more sorts all tokens
MAX_SORTED_VOCAB = 2048
MIN_TEMPERATURE = 1e-5

GREEDY, UNRANKED = -1, 0  # groups of rows; any other group is the width at which its top_k and top_p start


class Draw(NamedTuple):
    token_id: int
    log_prob: float | None
    top: list[TokenLogProb] | None


@dataclass(frozen=True, slots=True)
class SamplerState:
    """The sampler's state of one sequence. Rows of one `group` are drawn together."""

    group: int
    num_top: int
    wants_log_probs: bool
    rules: LogitsRules | None


class Sampler:
    """A sampler draws tokens. It keeps the state of a sequence in `Sequence.sampler_state` and has none itself."""

    def __init__(
        self,
        vocab_size: int,
        device: str | torch.device = "cpu",
        post_processors: PostProcessors | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self._post_processors = post_processors

    def sample(self, logits: Tensor, sequences: list[Sequence]) -> list[Draw | None]:
        """Draw the next token of each sequence. Overwrites `logits`, float32 (num_sequences, vocab).

        A draw is None if the row's logits are not numbers, or every token is banned, and then its request has failed.
        """
        states = [cast("SamplerState | None", one.sampler_state) or self._new_state(one) for one in sequences]
        rows = [row for row, state in enumerate(states) if state.wants_log_probs]
        log_probs = take_rows(logits, rows).log_softmax(dim=-1) if rows else None  # before any rule changes the logits
        if self._post_processors is not None:
            self._post_processors.apply(logits, sequences)
        guided = [row for row, sequence in enumerate(sequences) if sequence.guide is not None]
        masks = fill_masks(sequences, guided, self.vocab_size) if guided else None
        apply_rules(logits, _ruled(sequences, states))
        if masks is not None:
            apply_masks(logits, masks)
        token_ids, best = self._choose(logits, sequences, states)
        draws: list[Draw | None] = [
            Draw(token_id, None, None) if math.isfinite(logit) else None
            for token_id, logit in zip(token_ids.tolist(), best, strict=True)
        ]
        for row, logit in enumerate(best):
            if logit == -math.inf and sequences[row].error is None:
                sequences[row].fail_for_bans()
        if log_probs is not None:
            chosen = chosen_log_probs(log_probs, token_ids[rows])
            tops = top_log_probs(log_probs, [states[row].num_top for row in rows])
            _add_log_probs(draws, rows, chosen, tops)
        return draws

    def _new_state(self, sequence: Sequence) -> SamplerState:
        output = sequence.request.output_config
        sequence.sampler_state = state = SamplerState(
            group=group_of(sequence.request.sampling_config, self.vocab_size),
            num_top=output.num_top_log_probs,
            wants_log_probs=output.return_log_probs or output.num_top_log_probs > 0,
            rules=new_rules(sequence, self.vocab_size),
        )
        return state

    def _choose(
        self, logits: Tensor, sequences: list[Sequence], states: list[SamplerState]
    ) -> tuple[Tensor, list[float]]:
        """Choose token ids (num_rows,) from `logits` (num_rows, vocab). The list has the largest logit of each row.

        One that is not finite shows that the row's token cannot be used.
        """
        token_ids = _argmax(logits)  # (num_rows,)
        best = logits.gather(1, token_ids[:, None]).squeeze(1)  # (num_rows,)
        largest: list[float] = best.tolist()
        for group, rows in _groups(states, largest).items():
            token_ids[rows] = self._draw(take_rows(logits, rows), best[rows], [sequences[row] for row in rows], group)
        return token_ids, largest

    def _draw(self, logits: Tensor, best: Tensor, sequences: list[Sequence], group: int) -> Tensor:
        """Draw token ids (num_rows,) for the rows of one group from `logits` (num_rows, vocab).

        `best` (num_rows,) is the largest logit of each row.
        """
        configs = [sequence.request.sampling_config for sequence in sequences]
        temperatures = [
            1.0 if config.temperature is None else max(config.temperature, MIN_TEMPERATURE) for config in configs
        ]
        scaled = (logits - best[:, None]) / self._column(temperatures)  # <= 0, so no temperature can overflow
        probs = scaled.softmax(dim=-1)  # (num_rows, vocab)
        self.filter(probs, configs, group)
        return _inverse_cdf(probs, self._column([uniform(one.seed, one.num_generated) for one in sequences]))

    def filter(self, probs: Tensor, configs: list[SamplingConfig], group: int) -> None:
        """Set the tokens of `probs` (num_rows, vocab) that top_k, top_p, min_p and typical_p leave out to 0."""
        if group != UNRANKED:
            probs *= probs >= self._cuts(probs, configs, group)
        if any(config.min_p for config in configs):
            probs *= probs >= self._column([config.min_p or 0.0 for config in configs]) * probs.amax(-1, keepdim=True)
        for row, config in enumerate(configs):
            if _off_at_one(config.typical_p) != math.inf:
                probs[row] = _typical(probs[row], config.typical_p or 1.0)

    def _cuts(self, probs: Tensor, configs: list[SamplingConfig], width: int) -> Tensor:
        """The smallest probability (num_rows, 1) that top_k and top_p keep. Equal probabilities stay together.

        The search looks at the `width` best tokens of each row, and further if a row's top_p does not end among them.
        """
        ranked = _ranked(probs, width)  # (num_rows, width), best first
        sums = ranked.cumsum(dim=-1)
        top_ks = torch.tensor([[min(config.top_k or width, width)] for config in configs], device=self.device)
        has_top_k = torch.tensor([[_has_top_k(config, probs.shape[1])] for config in configs], device=self.device)
        top_ps = self._column([_off_at_one(config.top_p) for config in configs])
        # top_p is a share of the mass that top_k left. Without top_k that mass is 1.
        mass = top_ps * torch.where(has_top_k, sums.gather(1, top_ks - 1), 1.0)
        num_kept = (sums - ranked < mass).sum(dim=-1, keepdim=True).clamp(min=1)
        cuts = ranked.gather(1, torch.minimum(num_kept, top_ks) - 1)  # (num_rows, 1)
        if width < probs.shape[1]:
            open_ended = (~has_top_k & (num_kept == width)).squeeze(1).tolist()
            rows = [row for row, is_open in enumerate(open_ended) if is_open]
            if rows:
                cuts[rows] = self._cuts(probs[rows], [configs[row] for row in rows], _wider(width, probs.shape[1]))
        return cuts

    def _column(self, values: list[float]) -> Tensor:
        """The values as a tensor (num_rows, 1)."""
        return torch.tensor(values, dtype=torch.float32, device=self.device)[:, None]


def append_draws(sequences: list[Sequence], draws: list[Draw | None]) -> None:
    """Append to each sequence its token, or end its request with an error if it has none."""
    for sequence, draw in zip(sequences, draws, strict=True):
        if sequence.error is not None:
            continue  # a row, its guide or a function of the user has failed
        if draw is None:
            sequence.fail("no token can be chosen: the model's logits are not numbers")
        else:
            sequence.append(*draw)


def group_of(config: SamplingConfig, vocab_size: int) -> int:
    if config.is_greedy:
        return GREEDY
    if _has_top_k(config, vocab_size):
        return _wider((config.top_k or 0) - 1, vocab_size)
    return UNRANKED if _off_at_one(config.top_p) == math.inf else _wider(WIDTHS[0], vocab_size)


def _has_top_k(config: SamplingConfig, vocab_size: int) -> bool:
    return 0 < (config.top_k or 0) < vocab_size


def _wider(width: int, vocab_size: int) -> int:
    """The next width over `width`. For a small vocabulary it is always the whole vocabulary, which is quicker."""
    if vocab_size <= MAX_SORTED_VOCAB:
        return vocab_size
    return next((one for one in WIDTHS if one > width), vocab_size)


def _off_at_one(share: float | None) -> float:
    """Turn a share of 1, which keeps all tokens, into inf. A rounded sum can exceed 1 and drop some."""
    return math.inf if share is None or share >= 1 else share


def _add_log_probs(
    draws: list[Draw | None], rows: list[int], chosen: list[float], tops: list[list[TokenLogProb] | None]
) -> None:
    """Add log-probs to the draws of these rows. A draw whose log-prob is not finite becomes None."""
    for row, log_prob, top in zip(rows, chosen, tops, strict=True):
        draw = draws[row]
        if draw is not None:
            draws[row] = Draw(draw.token_id, log_prob, top) if math.isfinite(log_prob) else None


def _ruled(sequences: list[Sequence], states: list[SamplerState]) -> list[RuledRow]:
    """The rows that have rules."""
    rows = enumerate(zip(sequences, states, strict=True))
    return [RuledRow(row, sequence, state.rules) for row, (sequence, state) in rows if state.rules is not None]


def _groups(states: list[SamplerState], best: list[float]) -> dict[int, list[int]]:
    """The rows of each group that draws."""
    groups: dict[int, list[int]] = {}
    for row, (state, logit) in enumerate(zip(states, best, strict=True)):
        if math.isfinite(logit) and state.group != GREEDY:
            groups.setdefault(state.group, []).append(row)
    return groups


def _argmax(logits: Tensor) -> Tensor:
    """The index of the best token of each row, or of the first NaN. On a CPU numpy is 10 to 30 times as fast."""
    if logits.is_cpu:
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)


def _ranked(probs: Tensor, width: int) -> Tensor:
    """The `width` best probabilities of each row, best first. On a CPU numpy sorts all 5 to 10 times as fast."""
    if width < probs.shape[1]:
        return probs.topk(width, dim=-1).values
    if probs.is_cpu:
        return torch.from_numpy(np.sort(probs.numpy(), axis=-1)).flip(-1)
    return probs.sort(dim=-1, descending=True).values


def _inverse_cdf(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Draw indices (num_rows,) from `probs` (num_rows, n) of any sum. An index of probability 0 is never drawn."""
    cdf = probs.cumsum(dim=-1)
    drawn = torch.searchsorted(cdf, uniforms * cdf[:, -1:], right=True)
    if probs.is_cpu:
        return drawn.squeeze(1)  # sums run left to right: the first one over the target has a probability over 0
    drawn.clamp_(max=probs.shape[1] - 1)  # a parallel sum need not be monotone
    return torch.where(probs.gather(1, drawn) > 0, drawn, probs.argmax(dim=-1, keepdim=True)).squeeze(1)


def _typical(probs: Tensor, mass: float) -> Tensor:
    """Keep the tokens of one row (vocab,) whose surprise is nearest to the entropy, up to `mass`.

    Source: locally typical sampling (Meister et al. 2022).
    """
    normal = probs / probs.sum()
    surprise = -normal.log()  # inf where the probability is 0 already
    entropy = torch.where(normal > 0, normal * surprise, 0).sum()
    order = (surprise - entropy).abs().argsort(stable=True)
    num_kept = int((normal[order].cumsum(0) < mass).sum()) + 1
    out = order[num_kept:]
    return probs.index_fill(0, out, 0.0)
