"""Reads one CompletionOutput of TensorRT-LLM, a sequence or a beam: its tokens, its log-probs and its end.

It does not rely on how the engine reports. The token that ended a sequence may have been cut off, and is put back. The
reason of the end may be missing.
Checked against the published sources of main of October 2025 and of August 2026.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import TypeAlias

import torch
from tensorrt_llm.executor.result import Logprob
from tensorrt_llm.llmapi import CompletionOutput
from torch import Tensor

from handlers.base.outputs import LogProbs
from handlers.base.sequence import Sequence
from handlers.lmi_trtllm.ends import end_token, stop_token_ids
from lmi.executor import FinishReason

MAX_ROWS = 128  # of logits in float32 at a time: each is as long as the vocabulary

# One position: the chosen token and the best ones by their ids, or only the chosen token's log-prob.
Entry: TypeAlias = Mapping[int, Logprob] | float


class OutputFault(RuntimeError):
    """TensorRT-LLM did not report what it was asked for."""


@dataclass(frozen=True, slots=True)
class Ends:
    """The tokens at which TensorRT-LLM ends a sequence. `end_id` is the one that it may cut off without a word."""

    end_id: int | None
    token_ids: frozenset[int]

    @classmethod
    def of(cls, sequence: Sequence) -> Ends:
        end_id = end_token(sequence)
        return cls(end_id, frozenset(stop_token_ids(sequence)) | ({end_id} if end_id is not None else set()))


def cut_off(completion: CompletionOutput, ends: Ends) -> list[int]:
    """The token that ended a sequence if it is not among its tokens, else nothing."""
    token_ids, cause = completion.token_ids or (), completion.stop_reason
    if completion.finish_reason != "stop" or (token_ids and token_ids[-1] in ends.token_ids):
        return []
    token_id = cause if isinstance(cause, int) else ends.end_id
    return [] if token_id is None else [token_id]


def end_of(completion: CompletionOutput, sequence: Sequence) -> FinishReason | Exception:
    """Why a sequence ended, for one that our own rules have not ended at the same token."""
    reason = completion.finish_reason
    if reason == "length":
        return FinishReason.LENGTH
    if reason not in ("stop", None):
        return OutputFault(f"the engine ended it: {reason}")
    if len(completion.token_ids or ()) < sequence.min_tokens:
        return OutputFault(f"the engine ended it before min_tokens ({sequence.min_tokens})")
    is_word = completion.stop_reason is not None and completion.stop_reason not in sequence.end_ids
    return FinishReason.STOP_WORDS if is_word else FinishReason.END_ID


def of_entries(token_ids: SequenceOf[int], entries: SequenceOf[Entry], num_top: int) -> LogProbs:
    """The log-probs of tokens, and of the best at their positions. Raises OutputFault if one is missing."""
    known = LogProbs([], [])
    for token_id, entry in zip(token_ids, entries, strict=False):
        if isinstance(entry, Mapping):
            if token_id not in entry:
                raise OutputFault(f"the engine reported no log-prob of token {token_id}")
            best = sorted(entry.items(), key=lambda item: -item[1].logprob)
            known.token_ids.append([token_id, *(one for one, _ in best)])
            known.values.append([entry[token_id].logprob, *(value.logprob for _, value in best)])
        else:
            if num_top:
                raise OutputFault("the engine reported log-probs of the chosen tokens only")
            known.token_ids.append([token_id])
            known.values.append([entry])
    return known


def of_logits(token_ids: SequenceOf[int], logits: Tensor, num_top: int) -> LogProbs:
    """The log-probs of a prompt from its second token on, from the logits (num_tokens, vocab) at its tokens."""
    known, rest = LogProbs([], []), torch.tensor(token_ids[1:], dtype=torch.int64)
    for chosen, rows in zip(rest.split(MAX_ROWS), logits[: len(rest)].split(MAX_ROWS), strict=True):
        log_probs = torch.log_softmax(rows.float().cpu(), dim=-1)
        best = log_probs.topk(num_top, dim=-1)
        known.token_ids += torch.cat([chosen.unsqueeze(1), best.indices], dim=1).tolist()
        known.values += torch.cat([log_probs.gather(1, chosen.unsqueeze(1)), best.values], dim=1).tolist()
    return known
