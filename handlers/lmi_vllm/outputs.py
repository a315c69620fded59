"""What vLLM says after a step, given to our sequences.

The core's own outputs and AsyncLLM's become the same `Output`. What stands at a position of log-probs is the chosen
token first, then the best ones in order, the chosen perhaps again; a row may be longer than its request asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm.logprobs import FlatLogprobs
from vllm.outputs import RequestOutput
from vllm.v1.engine import EngineCoreOutput

from handlers.base.sequence import Sequence
from handlers.lmi_vllm import guides
from lmi.executor import ErrorKind, FinishReason, PromptLogProb, TokenLogProb

# Ends that our own rules have not seen by then, though vLLM says them.
REASONS = {"stop": FinishReason.END_ID, "length": FinishReason.LENGTH, "repetition": FinishReason.STOP_WORDS}


@dataclass(slots=True)
class Rows:
    """Log-probs at some positions, one list for each."""

    token_ids: list[list[int]]
    log_probs: list[list[float]]


@dataclass(slots=True)
class Output:
    """What is new of one sequence. `rows` are parallel to `token_ids`; `prompt` is of its second token and later."""

    id: str
    token_ids: list[int]
    rows: Rows | None
    prompt: Rows | None
    finish_reason: str | None
    num_reused_tokens: int = 0  # of the prompt, told with its first token

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None


def of_core(name: str, output: EngineCoreOutput) -> Output:
    """Of the engine in this process, whose log-probs are arrays (positions, most of any request + 1)."""
    chosen, prompt, reason = output.new_logprobs, output.new_prompt_logprobs_tensors, output.finish_reason
    return Output(
        name,
        output.new_token_ids,
        None if chosen is None else Rows(chosen.logprob_token_ids.tolist(), chosen.logprobs.tolist()),
        None if prompt is None else Rows(prompt.logprob_token_ids.tolist(), prompt.logprobs.tolist()),
        None if reason is None else str(reason),
        0 if output.prefill_stats is None else output.prefill_stats.num_cached_tokens,
    )


def of_request(output: RequestOutput) -> Output:
    """Of AsyncLLM, asked for DELTA and flat log-probs. Nothing stands before the prompt's first token."""
    completion, prompt = output.outputs[0], output.prompt_logprobs
    return Output(
        output.request_id,
        list(completion.token_ids),
        None if completion.logprobs is None else rows_of(completion.logprobs, 0),
        rows_of(prompt, 1) if prompt else None,
        completion.finish_reason,
        output.num_cached_tokens or 0,
    )


def rows_of(flat: FlatLogprobs, first: int) -> Rows:
    spans = list(zip(flat.start_indices, flat.end_indices, strict=True))[first:]
    return Rows([flat.token_ids[start:end] for start, end in spans], [flat.logprobs[start:end] for start, end in spans])


def feed(sequence: Sequence, output: Output) -> None:
    """Append the new tokens; sets the sequence's end where it is reached, and drops what a step made behind it."""
    sequence.num_computed = sequence.num_tokens
    if sequence.perf_metrics is not None and not sequence.num_generated:
        sequence.perf_metrics.num_reused_tokens = output.num_reused_tokens
    if output.prompt is not None and sequence.lacks_prompt_log_probs:
        _note_prompt(sequence, output.prompt)
    known, num_top = output.rows, sequence.request.output_config.num_top_log_probs
    for position, token_id in enumerate(output.token_ids):
        if sequence.is_finished:
            return
        if known is None:
            sequence.append(token_id)
        else:
            top = best(known, position, num_top) if num_top else None
            sequence.append(token_id, known.log_probs[position][0], top)
    if output.finish_reason is not None and not sequence.is_finished:
        _end(sequence, output.id, output.finish_reason)


def best(rows: Rows, position: int, num_top: int) -> list[TokenLogProb]:
    pairs = list(zip(rows.token_ids[position], rows.log_probs[position], strict=True))
    others = pairs[1:]
    if len(others) < num_top:  # AsyncLLM put steps together: then the chosen one, though among the best, comes once
        others = sorted(pairs, key=lambda pair: -pair[1])
    return [TokenLogProb(token_id, log_prob) for token_id, log_prob in others[:num_top]]


def _note_prompt(sequence: Sequence, rows: Rows) -> None:
    num_top = sequence.request.output_config.num_prompt_log_probs or 0
    known = sequence.prompt_log_probs or [PromptLogProb(None)]
    sequence.prompt_log_probs = known + [
        PromptLogProb(row[0], best(rows, position, num_top)) for position, row in enumerate(rows.log_probs)
    ]


def _end(sequence: Sequence, name: str, reason: str) -> None:
    """vLLM ended what our rules would have gone on with."""
    if reason in REASONS:
        sequence.finish_reason = REASONS[reason]
    elif sequence.request.guided_decoding_params is not None and (cause := guides.cause_of(name)):
        sequence.fail(guides.refusal(cause), ErrorKind.INVALID, guides.FIELD)
    else:
        sequence.fail(f"vLLM gave the request up: {reason}")
