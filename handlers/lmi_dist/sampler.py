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
from typing import NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from handlers.base.randomness import uniform
from handlers.base.sequence import Sequence
from lmi.executor import PromptLogProb, SamplingConfig, TokenLogProb

MAX_TOP_LOG_PROBS = 20
WIDTHS = (64, 256, 1024)  # how many of the best tokens top_k and top_p look at; a row that needs more sorts all
MAX_SORTED_VOCAB = 2048
MIN_TEMPERATURE = 1e-5

IntArray: TypeAlias = npt.NDArray[np.int64]
FloatArray: TypeAlias = npt.NDArray[np.float32]

GREEDY, UNRANKED = -1, 0  # groups of rows; any other group is the width that its top_k and top_p look at first


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
        recipes = [cast("Recipe | None", sequence.recipe) or self._new_recipe(sequence) for sequence in sequences]
        wanted = [row for row, recipe in enumerate(recipes) if recipe.wants_log_probs]
        log_probs = _rows(logits, wanted).log_softmax(dim=-1) if wanted else None  # before anything is edited
        self._edit(logits, sequences, recipes)

        token_ids = _argmax(logits)  # (num_sequences,)
        best = logits.gather(1, token_ids[:, None]).squeeze(1)
        is_usable = torch.isfinite(best).tolist()
        for group, rows in _groups(recipes, is_usable).items():
            token_ids[rows] = self._draw(_rows(logits, rows), best[rows], [sequences[row] for row in rows], group)

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
            group=group_of(config, self.vocab_size),
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
        self.filter(probs, configs, group)
        return _inverse_cdf(probs, self._column([uniform(one.seed, one.num_generated) for one in sequences]))

    def filter(self, probs: Tensor, configs: list[SamplingConfig], group: int) -> None:
        """Set to 0 in `probs` (num_rows, vocab) what top_k, top_p, min_p and typical_p leave out."""
        if group != UNRANKED:
            probs *= probs >= self._cuts(probs, configs, group)
        if any(config.min_p for config in configs):
            probs *= probs >= self._column([config.min_p or 0.0 for config in configs]) * probs.amax(-1, keepdim=True)
        for row, config in enumerate(configs):
            if _off_at_one(config.typical_p) != math.inf:
                probs[row] = _typical(probs[row], config.typical_p or 1.0)

    def _cuts(self, probs: Tensor, configs: list[SamplingConfig], width: int) -> Tensor:
        """The smallest probability (num_rows, 1) that top_k and top_p keep; equal ones stay together.

        It looks at the `width` best of each row; a row whose top_p does not end among them looks further.
        """
        ranked = _ranked(probs, width)  # (num_rows, width), best first
        sums = ranked.cumsum(dim=-1)
        top_ks = torch.tensor([[min(config.top_k or width, width)] for config in configs], device=self.device)
        has_top_k = torch.tensor([[_has_top_k(config, probs.shape[1])] for config in configs], device=self.device)
        top_ps = self._column([_off_at_one(config.top_p) for config in configs])
        # top_p is a share of what top_k left; of everything, whose sum is 1, where there is no top_k.
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
            slot = self._slot(token_id)  # first: it may replace the arrays
            self.counts[slot] += 1
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


def group_of(config: SamplingConfig, vocab_size: int) -> int:
    if config.is_greedy:
        return GREEDY
    if _has_top_k(config, vocab_size):
        return _wider((config.top_k or 0) - 1, vocab_size)
    return UNRANKED if _off_at_one(config.top_p) == math.inf else _wider(WIDTHS[0], vocab_size)


def _has_top_k(config: SamplingConfig, vocab_size: int) -> bool:
    return 0 < (config.top_k or 0) < vocab_size


def _wider(width: int, vocab_size: int) -> int:
    """The next width over `width`: of a small vocabulary always all of it, which is quicker."""
    if vocab_size <= MAX_SORTED_VOCAB:
        return vocab_size
    return next((one for one in WIDTHS if one > width), vocab_size)


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


def _rows(logits: Tensor, rows: list[int]) -> Tensor:
    """These rows, not copied when they are all."""
    return logits if len(rows) == len(logits) else logits[rows]


def _argmax(logits: Tensor) -> Tensor:
    """Indices (num_rows,) of the best, or of the first NaN. On a CPU numpy is 10 to 30 times as fast."""
    if logits.is_cpu:
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)


def _ranked(probs: Tensor, width: int) -> Tensor:
    """The `width` best (num_rows, width), best first. A full sort by numpy is 5 to 10 times as fast on a CPU."""
    if width < probs.shape[1]:
        return probs.topk(width, dim=-1).values
    if probs.is_cpu:
        return torch.from_numpy(np.sort(probs.numpy(), axis=-1)).flip(-1)
    return probs.sort(dim=-1, descending=True).values


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
