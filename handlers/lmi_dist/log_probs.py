"""The log-probs that a request asked for.

They are a log_softmax of the model's logits in float32, before any rule changes them (as vLLM does by default).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from handlers.base.sequence import Sequence
from handlers.lmi_dist.logits_rows import take_rows
from handlers.lmi_dist.plan import Chunk
from lmi.executor import PromptLogProb, TokenLogProb

MAX_TOP_LOG_PROBS = 20


def chosen_log_probs(log_probs: Tensor, token_ids: Tensor) -> list[float]:
    """The log-prob of one token of each row: `log_probs` (num_rows, vocab), `token_ids` (num_rows,)."""
    chosen: list[float] = log_probs.gather(1, token_ids[:, None]).squeeze(1).tolist()
    return chosen


def top_log_probs(log_probs: Tensor, num_tops: list[int]) -> list[list[TokenLogProb] | None]:
    """The `num_tops[row]` best tokens of each row of `log_probs` (num_rows, vocab), or None where that is 0.

    The search always looks for the same number of tokens, so that a neighbour cannot change the order of two equal
    tokens.
    """
    tops: list[list[TokenLogProb] | None] = [None] * len(num_tops)
    rows = [row for row, num_top in enumerate(num_tops) if num_top]
    if rows:
        values, token_ids = take_rows(log_probs, rows).topk(min(MAX_TOP_LOG_PROBS, log_probs.shape[1]), dim=-1)
        for row, row_values, row_ids in zip(rows, values.tolist(), token_ids.tolist(), strict=True):
            num_top = num_tops[row]
            pairs = zip(row_ids[:num_top], row_values[:num_top], strict=True)
            tops[row] = [TokenLogProb(token_id, log_prob) for token_id, log_prob in pairs]
    return tops


def prompt_log_probs(logits: Tensor, token_ids: list[int], num_top: int) -> list[PromptLogProb] | None:
    """Log-probs of prompt tokens, each from the row of `logits` (num_tokens, vocab) of the position before it.

    Returns None if one of them is not a number.
    """
    if not token_ids:
        return []
    log_probs = logits.log_softmax(dim=-1)  # (num_tokens, vocab)
    chosen = chosen_log_probs(log_probs, torch.tensor(token_ids, device=logits.device))
    if any(math.isnan(log_prob) for log_prob in chosen):
        return None
    tops = top_log_probs(log_probs, [num_top] * len(token_ids))
    return [PromptLogProb(log_prob, top or []) for log_prob, top in zip(chosen, tops, strict=True)]


def note_prompt(sequence: Sequence, chunk: Chunk, logits: Tensor) -> bool:
    """Keep the log-probs of the prompt tokens that follow each position of the chunk.

    `logits` is (chunk length, vocab). Returns False if they are not numbers.
    """
    next_ids = sequence.token_ids[chunk.start + 1 : min(chunk.end + 1, sequence.num_prompt_tokens)]
    num_top = sequence.request.output_config.num_prompt_log_probs or 0
    log_probs = prompt_log_probs(logits[: len(next_ids)], next_ids, num_top)
    if log_probs is None:
        return False
    known = sequence.prompt_log_probs or [PromptLogProb(None)]  # nothing comes before the first token
    sequence.prompt_log_probs = known[: chunk.start + 1] + log_probs
    return True
