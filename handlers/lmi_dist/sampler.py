"""Logits to tokens, each row by its own request's rules.

Order: log-probs are read off the model's own logits, log_softmax in float32 before anything else (vLLM's default); then
bias, penalties and bans change them; then temperature, top_k, top_p, min_p, typical_p, each on what the one before it
left, as transformers does; one uniform number per (seed, position) picks by inverse CDF. Penalties: repetition counts
prompt and output (as transformers), presence and frequency the output only (as vLLM). Bad words are matched on the
output. Until `min_tokens` are there, end ids and stop words of one token are banned; `ignore_eos` bans nothing, an end
token may come and generation runs on (as vLLM).

A row's result depends on that row alone, to the bit: every operation over a row is one that torch computes row by row
(softmax, cumsum, topk, max) or that is exactly rounded element by element (divide, compare). An element-wise exp or log
over the whole batch is not used: where it is cut between threads, vector and scalar code round differently.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from handlers.lmi_dist.randomness import uniform
from handlers.lmi_dist.sequence import Sequence
from lmi.executor import PromptLogProb, SamplingConfig, TokenLogProb

MAX_TOP_LOG_PROBS = 20
WIDTHS = (64, 256, 1024)  # how many of the best tokens a filtered row looks at; one that needs more sorts all
MIN_TEMPERATURE = 1e-5

IntArray: TypeAlias = npt.NDArray[np.int64]
FloatArray: TypeAlias = npt.NDArray[np.float32]

GREEDY, PLAIN = -1, 0  # groups of rows; any other group is a width


class Draw(NamedTuple):
    token_id: int
    log_prob: float | None
    top: list[TokenLogProb] | None


@dataclass(slots=True)
class Recipe:
    """What the sampler knows of a sequence. `group` decides which rows are computed together."""

    group: int
    num_top: int
    wants_log_probs: bool
    is_edited: bool = False  # bias, penalties or bans may apply
    bias: tuple[IntArray, FloatArray] | None = None  # token ids, values
    history: History | None = None
    banned: list[int] = field(default_factory=list)  # bad words of one token
    banned_early: list[int] = field(default_factory=list)  # until min_tokens are there
    bad_words: list[list[int]] = field(default_factory=list)  # of several tokens


class Sampler:
    """What belongs to a sequence hangs on the sequence (its `recipe`); the sampler itself keeps nothing."""

    def __init__(self, vocab_size: int, device: str | torch.device = "cpu") -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)

    def sample(self, logits: Tensor, sequences: list[Sequence]) -> list[Draw | None]:
        """The next token of each sequence; `logits` (num_sequences, vocab) float32 is spoiled.

        None where a row cannot be sampled: its logits are not numbers, or every token is banned.
        """
        recipes = [sequence.recipe or self._new_recipe(sequence) for sequence in sequences]
        wanted = [row for row, recipe in enumerate(recipes) if recipe.wants_log_probs]
        log_probs = logits[wanted].log_softmax(dim=-1) if wanted else None  # before anything is edited
        self._edit(logits, sequences, recipes)

        best, token_ids = logits.max(dim=-1)  # (num_sequences,); NaN wins over every number
        is_usable = torch.isfinite(best).tolist()
        for group, rows in _groups(recipes, is_usable).items():
            token_ids[rows] = self._draw(logits[rows], best[rows], [sequences[row] for row in rows], group)

        draws: list[Draw | None] = [
            Draw(token_id, None, None) if usable else None
            for token_id, usable in zip(token_ids.tolist(), is_usable, strict=True)
        ]
        if log_probs is not None:
            chosen = log_probs.gather(1, token_ids[wanted, None]).squeeze(1).tolist()
            tops = _best(log_probs, [recipes[row].num_top for row in wanted])
            for row, log_prob, top in zip(wanted, chosen, tops, strict=True):
                draw = draws[row]
                if draw is not None:
                    draws[row] = Draw(draw.token_id, log_prob, top) if math.isfinite(log_prob) else None
        return draws

    def prompt_log_probs(self, logits: Tensor, token_ids: list[int], num_top: int) -> list[PromptLogProb] | None:
        """Log-probs of prompt tokens, each under the row of `logits` before it; None where they are not numbers."""
        if not token_ids:
            return []
        log_probs = logits.log_softmax(dim=-1)  # (num_tokens, vocab)
        chosen = log_probs.gather(1, torch.tensor(token_ids, device=self.device)[:, None]).squeeze(1).tolist()
        if any(math.isnan(log_prob) for log_prob in chosen):
            return None
        tops = _best(log_probs, [num_top] * len(token_ids))
        return [PromptLogProb(log_prob, top or []) for log_prob, top in zip(chosen, tops, strict=True)]

    def _new_recipe(self, sequence: Sequence) -> Recipe:
        request, config = sequence.request, sequence.request.sampling_config
        recipe = Recipe(
            group=_group(config, self.vocab_size),
            num_top=request.output_config.num_top_log_probs,
            wants_log_probs=request.output_config.return_log_probs or request.output_config.num_top_log_probs > 0,
            banned=[word[0] for word in request.bad_words if len(word) == 1],
            bad_words=[list(word) for word in request.bad_words if len(word) > 1],
        )
        if config.min_tokens:
            stops = {word[0] for words in sequence.stop_words.values() for word in words if len(word) == 1}
            recipe.banned_early = [one for one in sequence.end_ids | stops if 0 <= one < self.vocab_size]
        if request.embedding_bias:
            token_ids, values = zip(*request.embedding_bias, strict=True)
            recipe.bias = np.array(token_ids, np.int64), np.array(values, np.float32)
        if config.repetition_penalty is not None or config.presence_penalty or config.frequency_penalty:
            recipe.history = History(sequence, counts_prompt=config.repetition_penalty is not None)
        recipe.is_edited = bool(
            recipe.banned or recipe.banned_early or recipe.bad_words or recipe.bias or recipe.history
        )
        sequence.recipe = recipe
        return recipe

    # What changes logits: gathers and scatters over a flat view, for all rows of a kind in one call.

    def _edit(self, logits: Tensor, sequences: list[Sequence], recipes: list[Recipe]) -> None:
        edited = [row for row, recipe in enumerate(recipes) if recipe.is_edited]
        if not edited:
            return
        flat = logits.view(-1)
        self._add_bias(flat, [(row, bias) for row in edited if (bias := recipes[row].bias) is not None])
        self._penalise(
            flat, [(row, sequences[row], history) for row in edited if (history := recipes[row].history) is not None]
        )
        banned = [
            row * self.vocab_size + token_id for row in edited for token_id in _banned(sequences[row], recipes[row])
        ]
        if banned:
            flat[torch.tensor(banned, device=self.device)] = -math.inf

    def _add_bias(self, flat: Tensor, biased: list[tuple[int, tuple[IntArray, FloatArray]]]) -> None:
        if not biased:
            return
        index = np.concatenate([token_ids + row * self.vocab_size for row, (token_ids, _) in biased])
        values = np.concatenate([values for _, (_, values) in biased])
        flat.index_put_((self._tensor(index),), self._tensor(values), accumulate=True)

    def _penalise(self, flat: Tensor, penalised: list[tuple[int, Sequence, History]]) -> None:
        if not penalised:
            return
        for _, sequence, history in penalised:
            history.catch_up(sequence)
        sizes = [history.size for _, _, history in penalised]
        configs = [sequence.request.sampling_config for _, sequence, _ in penalised]

        def spread(values: list[float]) -> FloatArray:  # one value per row -> one per token of its history
            return np.repeat(np.array(values, np.float32), sizes)

        index = np.concatenate([history.token_ids[: history.size] for _, _, history in penalised])
        index += np.repeat(np.array([row * self.vocab_size for row, _, _ in penalised], np.int64), sizes)
        counts = np.concatenate([history.counts[: history.size] for _, _, history in penalised])
        repetition = self._tensor(spread([config.repetition_penalty or 1.0 for config in configs]))
        less = spread([config.frequency_penalty or 0.0 for config in configs]) * counts
        less += spread([config.presence_penalty or 0.0 for config in configs]) * (counts > 0)
        where = self._tensor(index)
        scores = flat[where]
        scores = torch.where(scores > 0, scores / repetition, scores * repetition)
        flat[where] = scores - self._tensor(less)

    def _tensor(self, array: IntArray | FloatArray) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    # What draws: one call for each group of rows.

    def _draw(self, logits: Tensor, best: Tensor, sequences: list[Sequence], group: int) -> Tensor:
        """Token ids (num_rows,) for rows that are sampled, all of one group."""
        configs = [sequence.request.sampling_config for sequence in sequences]
        temperatures = [
            1.0 if config.temperature is None else max(config.temperature, MIN_TEMPERATURE) for config in configs
        ]
        scaled = (logits - best[:, None]) / self._column(temperatures)  # <= 0, so no temperature can overflow
        probs = scaled.softmax(dim=-1)  # (num_rows, vocab)
        uniforms = self._column([uniform(sequence.seed, sequence.num_generated) for sequence in sequences])
        if group == PLAIN:
            return _inverse_cdf(probs, uniforms)
        return self._draw_filtered(probs, uniforms, configs, group)

    def _draw_filtered(self, probs: Tensor, uniforms: Tensor, configs: list[SamplingConfig], width: int) -> Tensor:
        """Look at the `width` best tokens of each row; rows that keep all of them and may keep more look further."""
        if width < self.vocab_size:
            ranked, token_ids = probs.topk(width, dim=-1)  # (num_rows, width), best first
        else:
            ranked, token_ids = probs.sort(dim=-1, descending=True, stable=True)
        kept, is_cut = self._keep(ranked, configs)
        drawn = token_ids.gather(1, _inverse_cdf(kept, uniforms)[:, None]).squeeze(1)
        if width < self.vocab_size:
            rows = [row for row, cut in enumerate(is_cut) if not cut]
            if rows:
                wider = next((one for one in WIDTHS if width < one < self.vocab_size), self.vocab_size)
                drawn[rows] = self._draw_filtered(probs[rows], uniforms[rows], [configs[row] for row in rows], wider)
        return drawn

    def _keep(self, ranked: Tensor, configs: list[SamplingConfig]) -> tuple[Tensor, list[bool]]:
        """`ranked` probabilities (num_rows, width) with those out of the filters at 0, and which rows had one out."""
        width = ranked.shape[1]
        top_k = torch.tensor([[min(config.top_k or width, width)] for config in configs], device=self.device)
        has_top_k = [0 < (config.top_k or 0) <= width for config in configs]
        cumulated = ranked.cumsum(dim=-1)
        # top_p is a share of what top_k left: of everything, whose sum is 1, where there is no top_k.
        total = torch.where(
            torch.tensor(has_top_k, device=self.device)[:, None], cumulated.gather(1, top_k - 1), cumulated.new_ones(())
        )
        keep = torch.arange(width, device=self.device) < top_k
        keep &= cumulated - ranked < self._column([_off_at_one(config.top_p) for config in configs]) * total
        keep &= ranked >= self._column([config.min_p or 0.0 for config in configs]) * ranked[:, :1]
        keep[:, 0] = True
        is_cut = (torch.tensor(has_top_k, device=self.device) | ~keep[:, -1]).tolist()
        kept = ranked * keep
        for row, config in enumerate(configs):
            if config.typical_p is not None and config.typical_p < 1 and (is_cut[row] or width == self.vocab_size):
                kept[row] = _typical(kept[row], config.typical_p)
        return kept, is_cut

    def _column(self, values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self.device)[:, None]


class History:
    """The distinct tokens of one sequence and how often each was generated, in arrays that grow with it."""

    def __init__(self, sequence: Sequence, *, counts_prompt: bool) -> None:
        self.size = 0
        self.token_ids = np.empty(64, np.int64)
        self.counts = np.zeros(64, np.float32)  # in the output: 0 for a token of the prompt alone
        self._slots: dict[int, int] = {}
        self._num_seen = sequence.num_prompt_tokens
        if counts_prompt:
            for token_id in sequence.token_ids[: self._num_seen]:
                self._slot(token_id)

    def catch_up(self, sequence: Sequence) -> None:
        for token_id in sequence.token_ids[self._num_seen :]:
            self.counts[self._slot(token_id)] += 1
        self._num_seen = sequence.num_tokens

    def _slot(self, token_id: int) -> int:
        slot = self._slots.get(token_id)
        if slot is None:
            slot = self._slots[token_id] = self.size
            if slot == len(self.token_ids):
                self.token_ids = np.concatenate([self.token_ids, np.empty_like(self.token_ids)])
                self.counts = np.concatenate([self.counts, np.zeros_like(self.counts)])
            self.token_ids[slot] = token_id
            self.size += 1
        return slot


def _group(config: SamplingConfig, vocab_size: int) -> int:
    if config.is_greedy:
        return GREEDY
    if config.top_k and config.top_k < vocab_size:
        return next((width for width in WIDTHS if config.top_k <= width < vocab_size), vocab_size)
    if _off_at_one(config.top_p) < math.inf or config.min_p:
        return min(WIDTHS[1], vocab_size)
    return PLAIN if _off_at_one(config.typical_p) == math.inf else vocab_size


def _off_at_one(share: float | None) -> float:
    """A share of 1 keeps all; compared with a rounded sum it would not."""
    return math.inf if share is None or share >= 1 else share


def _groups(recipes: list[Recipe], is_usable: list[bool]) -> dict[int, list[int]]:
    """The rows of each group that draws."""
    groups: dict[int, list[int]] = {}
    for row, (recipe, usable) in enumerate(zip(recipes, is_usable, strict=True)):
        if usable and recipe.group != GREEDY:
            groups.setdefault(recipe.group, []).append(row)
    return groups


def _banned(sequence: Sequence, recipe: Recipe) -> list[int]:
    """Token ids that must not come next."""
    banned = recipe.banned
    num_generated = sequence.num_generated
    if recipe.banned_early and num_generated < (sequence.request.sampling_config.min_tokens or 0):
        banned = banned + recipe.banned_early
    for word in recipe.bad_words:
        start = len(word) - 1
        if start <= num_generated and sequence.token_ids[-start:] == word[:-1]:
            banned = [*banned, word[-1]]
    return banned


def _inverse_cdf(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Indices (num_rows,) drawn from `probs` (num_rows, n), of any sum; one of probability 0 never comes."""
    cdf = probs.cumsum(dim=-1)
    drawn = torch.searchsorted(cdf, uniforms * cdf[:, -1:], right=True)
    if probs.is_cpu:
        return drawn.squeeze(1)  # sums run left to right: the first one over the target lies on a step, so inside
    drawn.clamp_(max=probs.shape[1] - 1)  # a parallel sum need not be monotone
    return torch.where(probs.gather(1, drawn) > 0, drawn, probs.argmax(dim=-1, keepdim=True)).squeeze(1)


def _typical(probs: Tensor, mass: float) -> Tensor:
    """Of one row, keep the tokens whose surprise is nearest to the entropy, up to `mass`.

    Source: locally typical sampling (Meister et al. 2022).
    """
    normal = probs / probs.sum()
    surprise = -normal.log()  # inf where out already
    entropy = torch.where(normal > 0, normal * surprise, 0).sum()
    order = (surprise - entropy).abs().argsort(stable=True)
    num_kept = int((normal[order].cumsum(0) < mass).sum()) + 1
    out = order[num_kept:]
    return probs.index_fill(0, out, 0.0)


def _best(log_probs: Tensor, num_tops: list[int]) -> list[list[TokenLogProb] | None]:
    """The best alternatives of each row. Always the same number is looked up, so that neighbours change no tie."""
    best: list[list[TokenLogProb] | None] = [None] * len(num_tops)
    rows = [row for row, num_top in enumerate(num_tops) if num_top]
    if rows:
        values, token_ids = log_probs[rows].topk(min(MAX_TOP_LOG_PROBS, log_probs.shape[1]), dim=-1)
        for row, row_values, row_ids in zip(rows, values.tolist(), token_ids.tolist(), strict=True):
            num_top = num_tops[row]
            pairs = zip(row_ids[:num_top], row_values[:num_top], strict=True)
            best[row] = [TokenLogProb(token_id, log_prob) for token_id, log_prob in pairs]
    return best
