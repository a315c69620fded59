"""Reads what is new in a RequestOutput, which TensorRT-LLM changes in place at each step of a
request.

Tokens wait until their log-probs are there, and those of the prompt. TensorRT-LLM may have cut off
the token that ended a sequence, which is put back, and it may leave out why a sequence ended.
"""

from collections.abc import Mapping, Sequence as SequenceOf

import torch
from tensorrt_llm.executor.result import Logprob
from tensorrt_llm.llmapi import CompletionOutput, RequestOutput
from torch import Tensor

from handlers.base.beams import Beam
from handlers.base.sequence import Sequence
from handlers.driven.outputs import LogProbs, SequenceOutput
from handlers.lmi_trtllm.output_rows import rows_of
from handlers.lmi_trtllm.sampling import end_token, stop_token_ids
from lmi.executor import FinishReason

# So many rows of logits are float32 at a time. Each is as long as the vocabulary.
MAX_ROWS = 128

# What TensorRT-LLM reports at one position: the chosen token and the best ones by their ids, or
# only the chosen token's log-prob.
Entry = Mapping[int, Logprob] | float


class OutputFault(RuntimeError):
    """TensorRT-LLM did not report what it was asked for."""


class Cursor:
    """Reads the output of one request, on the thread that waits for it."""

    def __init__(self, name: str, sequence: Sequence) -> None:
        self._name = name
        self._sequence = sequence
        self._lacks_prompt = sequence.lacks_prompt_log_probs
        # The number of tokens that were read.
        self._num_read = 0

    def read(self, output: RequestOutput) -> SequenceOutput | None:
        """Return what is new, or None if nothing is. Raises OutputFault if something is missing at
        the end.
        """
        # Older versions have no such attribute.
        error = getattr(output, "error", None)
        if error:
            raise OutputFault(str(error))

        prompt = None
        if self._lacks_prompt:
            prompt = self._prompt(output)
            if prompt is None and output.finished:
                raise OutputFault("the engine reported no log-probs of the prompt")

            if prompt is None:
                return None

        if self._sequence.search is None:
            news = self._tokens(output)
        else:
            news = self._beams(output)

        if news is None:
            return None

        news.prompt_log_probs = prompt
        self._lacks_prompt = False
        news.num_cached_tokens = int(output.cached_tokens or 0)
        if self._sequence.captured is not None:
            news.rows = rows_of(output)

        return news

    def _tokens(self, output: RequestOutput) -> SequenceOutput | None:
        """Return the new tokens that have their log-probs, or None if there are none."""
        completion = output.outputs[0]
        config = self._sequence.request.output_config
        token_ids = list(completion.token_ids or ())
        num_reported = len(token_ids)
        if output.finished:
            token_ids += cut_off(completion, self._sequence)

        new_ids = token_ids[self._num_read :]
        log_probs = None
        if config.return_log_probs or config.num_top_log_probs:
            # At the end there is also an entry of a token that was cut off.
            entries = (completion.logprobs or [])[self._num_read :]
            new_ids = new_ids[: len(entries)]
            if output.finished and self._num_read + len(new_ids) < num_reported:
                raise OutputFault("the engine reported fewer log-probs than tokens")

            log_probs = of_entries(new_ids, entries, config.num_top_log_probs)

        self._num_read += len(new_ids)
        end = end_of(completion, self._sequence) if output.finished else None
        if not new_ids and end is None:
            return None

        return SequenceOutput(self._name, new_ids, log_probs, end=end)

    def _beams(self, output: RequestOutput) -> SequenceOutput:
        """Return all beams at this step, the best first."""
        beams = []
        for completion in output.outputs:
            beams.append(_beam(completion, self._sequence, is_over=output.finished))

        end = beams[0].finish_reason if output.finished else None
        return SequenceOutput(self._name, [], end=end, beams=beams)

    def _prompt(self, output: RequestOutput) -> LogProbs | None:
        """Return the log-probs of the prompt, or None if they are not there yet."""
        request = self._sequence.request
        token_ids = request.input_token_ids
        num_top = request.output_config.num_prompt_log_probs or 0
        entries = output.outputs[0].prompt_logprobs or ()
        logits = output.context_logits
        # The first token has none.
        num_needed = len(token_ids) - 1
        if entries or num_needed == 0:
            if len(entries) < num_needed:
                return None

            return of_entries(token_ids[1:], entries, num_top)

        if logits is None or len(logits) < num_needed:
            return None

        return of_logits(token_ids, logits, num_top)


def cut_off(completion: CompletionOutput, sequence: Sequence) -> list[int]:
    """Return the token that ended a sequence if it is not among its tokens, else nothing."""
    if completion.finish_reason != "stop":
        return []

    token_ids = completion.token_ids or ()
    end_id = end_token(sequence)
    if token_ids and token_ids[-1] in (end_id, *stop_token_ids(sequence)):
        return []

    # The reason is the token, or a text, or it is missing.
    reason = completion.stop_reason
    if isinstance(reason, int):
        return [reason]

    return [] if end_id is None else [end_id]


def end_of(completion: CompletionOutput, sequence: Sequence) -> FinishReason | Exception:
    """Return why a sequence ended, for one that our own rules have not ended at the same token."""
    reason = completion.finish_reason
    if reason == "length":
        return FinishReason.LENGTH

    if reason not in ("stop", None):
        return OutputFault(f"the engine ended it: {reason}")

    if len(completion.token_ids or ()) < sequence.min_tokens:
        return OutputFault(f"the engine ended it before min_tokens ({sequence.min_tokens})")

    stop_reason = completion.stop_reason
    if stop_reason is None or stop_reason in sequence.end_ids:
        return FinishReason.END_ID

    return FinishReason.STOP_WORDS


def of_entries(token_ids: SequenceOf[int], entries: SequenceOf[Entry], num_top: int) -> LogProbs:
    """Return the log-probs of tokens, and of the best at their positions.

    Raises OutputFault if one is missing.
    """
    log_probs = LogProbs([], [])
    for token_id, entry in zip(token_ids, entries, strict=False):
        if not isinstance(entry, Mapping):
            if num_top:
                raise OutputFault("the engine reported log-probs of the chosen tokens only")

            log_probs.token_ids.append([token_id])
            log_probs.values.append([entry])
            continue

        if token_id not in entry:
            raise OutputFault(f"the engine reported no log-prob of token {token_id}")

        values = {candidate_id: log_prob.logprob for candidate_id, log_prob in entry.items()}
        best_ids = sorted(values, key=values.__getitem__, reverse=True)
        ids = [token_id, *best_ids]
        log_probs.token_ids.append(ids)
        log_probs.values.append([values[candidate_id] for candidate_id in ids])

    return log_probs


def of_logits(token_ids: SequenceOf[int], logits: Tensor, num_top: int) -> LogProbs:
    """Return the log-probs of a prompt from its second token on, from the logits (num_tokens,
    vocab) at its tokens.

    The logits at a token are those of the next one.
    """
    log_probs = LogProbs([], [])
    all_ids = torch.tensor(token_ids[1:], dtype=torch.int64)
    parts_of_ids = all_ids.split(MAX_ROWS)
    parts_of_logits = logits[: len(all_ids)].split(MAX_ROWS)

    for ids, rows in zip(parts_of_ids, parts_of_logits, strict=True):
        # (num_rows, vocab)
        values = torch.log_softmax(rows.float().cpu(), dim=-1)
        # (num_rows, num_top)
        best = values.topk(num_top, dim=-1)

        # (num_rows, 1)
        own_ids = ids.unsqueeze(1)
        own_values = values.gather(1, own_ids)

        all_columns = torch.cat([own_ids, best.indices], dim=1)
        log_probs.token_ids += all_columns.tolist()

        all_values = torch.cat([own_values, best.values], dim=1)
        log_probs.values += all_values.tolist()

    return log_probs


def _beam(completion: CompletionOutput, sequence: Sequence, *, is_over: bool) -> Beam:
    """Return a beam at this step. One with log-probs comes only when it is over, with all of
    them.
    """
    token_ids = list(completion.token_ids or ())
    log_probs: list[float] = []
    if sequence.request.output_config.return_log_probs:
        entries = completion.logprobs or ()
        of_chosen = of_entries(token_ids, entries, num_top=0)
        log_probs = [values[0] for values in of_chosen.values]
        if len(log_probs) < len(token_ids):
            raise OutputFault("the engine reported fewer log-probs than tokens of a beam")
    elif is_over:
        token_ids += cut_off(completion, sequence)

    finish_reason = FinishReason.NOT_FINISHED
    if is_over:
        finish_reason = _reason_of(completion, token_ids, sequence)

    score = completion.cumulative_logprob or 0.0
    return Beam(token_ids, log_probs, sum=score, finish_reason=finish_reason)


def _reason_of(
    completion: CompletionOutput, token_ids: list[int], sequence: Sequence
) -> FinishReason:
    """Return why a beam ended: by our own rules, else as reported. Raises OutputFault."""
    if token_ids:
        reason = sequence.reason_after(token_ids, len(token_ids))
        if reason is not FinishReason.NOT_FINISHED:
            return reason

    end = end_of(completion, sequence)
    if isinstance(end, Exception):
        raise end

    return end
