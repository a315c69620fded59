"""How the double chooses a token, and what it reports of the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

OUT = float("-inf")

# The package's SamplingParams, whose class is made when a test writes the package
Params = Any


def is_greedy(params: Params) -> bool:
    unset = params.temperature is None and params.top_p is None and params.top_k is None
    return (
        unset
        or params.temperature == 0
        or params.top_p == 0
        or params.top_k == 1
        or params.min_p == 1
    )


def allowed(
    logits: Tensor, params: Params, prompt: Sequence[int], generated: Sequence[int]
) -> Tensor:
    """The logits (vocab,) after the rules of a request, in new memory. `generated` are the tokens
    since `prompt`.
    """
    row = logits.clone()
    if params.embedding_bias is not None:
        row += params.embedding_bias

    _penalize(row, params, prompt, generated)
    row[params.bad_token_ids or []] = OUT
    if params.no_repeat_ngram_size:
        row[_repeating([*prompt, *generated], params.no_repeat_ngram_size)] = OUT

    if len(generated) < (params.min_tokens or 0) and 0 <= params.end_id < len(row):
        row[params.end_id] = OUT

    return row


def _penalize(row: Tensor, params: Params, prompt: Sequence[int], generated: Sequence[int]) -> None:
    if params.repetition_penalty not in (None, 1):
        token_ids = torch.tensor(sorted({*prompt, *generated}))
        row[token_ids] = torch.where(
            row[token_ids] > 0,
            row[token_ids] / params.repetition_penalty,
            row[token_ids] * params.repetition_penalty,
        )

    if generated and (params.presence_penalty or params.frequency_penalty):
        counts = Counter(generated)
        token_counts = torch.tensor(list(counts.values()), dtype=row.dtype)
        lost = token_counts * (params.frequency_penalty or 0) + (params.presence_penalty or 0)
        row[torch.tensor(list(counts))] -= lost


def _repeating(tokens: Sequence[int], size: int) -> list[int]:
    """The tokens that would end an n-gram which is there already."""
    if size == 1:
        return sorted(set(tokens))

    tail = tuple(tokens[len(tokens) - size + 1 :])
    ngrams = zip(*(tokens[start:] for start in range(size)), strict=False)
    return [ngram[-1] for ngram in ngrams if ngram[:-1] == tail]


def choose(row: Tensor, params: Params, generator: torch.Generator) -> int:
    """A token by its allowed logits (vocab,)."""
    if is_greedy(params):
        return int(row.argmax())

    row = row / (params.temperature or 1.0)
    if params.top_k:
        row = row.masked_fill(row < row.topk(min(params.top_k, len(row))).values[-1], OUT)

    shares = row.softmax(-1)
    if params.min_p:
        shares = shares.masked_fill(shares < params.min_p * shares.max(), 0)

    if params.top_p is not None and params.top_p < 1:
        shares = _nucleus(shares, params.top_p)

    return int(shares.multinomial(1, generator=generator))


def _nucleus(shares: Tensor, top_p: float) -> Tensor:
    best, order = shares.sort(descending=True)
    best[best.cumsum(0) - best >= top_p] = 0
    return torch.zeros_like(shares).scatter(0, order, best)


def report(
    logits: Tensor,
    num_best: int,
    token: int | None,
    make: Callable[..., Any],
    *,
    is_first: bool = False,
) -> dict[int, Any]:
    """The log-probs of the best tokens at a position, and of `token`, before (`is_first`) or behind
    the others.
    """
    log_probs = logits.log_softmax(-1)
    values, ids = log_probs.topk(min(num_best, len(log_probs)))
    best = {
        int(token_id): make(logprob=float(value), rank=rank + 1)
        for rank, (token_id, value) in enumerate(zip(ids, values, strict=True))
    }
    if token is None:
        return best

    rank = int((log_probs > log_probs[token]).sum()) + 1
    chosen_entry = {token: best.get(token) or make(logprob=float(log_probs[token]), rank=rank)}
    return chosen_entry | best if is_first else best | chosen_entry


def faults(params: Params) -> str:
    """Why the worker refuses the parameters, or "": the ranges that it checks itself."""
    checks: Mapping[str, Callable[[Any], bool]] = {
        "max_tokens": lambda value: value > 0,
        "seed": lambda value: 0 <= value < 2**64,
        "min_p": lambda value: 0 <= value <= 1,
        "min_tokens": lambda value: value >= 0,
        "repetition_penalty": lambda value: value > 0,
        "length_penalty": lambda value: value >= 0,
        "early_stopping": lambda value: value >= 0,
        "no_repeat_ngram_size": lambda value: value >= 0,
        "top_p_min": lambda value: 0 < value <= 1,
        "top_p_decay": lambda value: 0 < value <= 1,
    }
    checked_values = {name: getattr(params, name) for name in checks}
    wrong = [
        f"{name} ({value})"
        for name, value in checked_values.items()
        if value is not None and not checks[name](value)
    ]
    return f"requirement failed: {', '.join(wrong)}" if wrong else ""
