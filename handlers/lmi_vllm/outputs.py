"""What vLLM says after a step, given to our sequences. Knows the shapes of RequestOutput and FlatLogprobs, no more."""

from __future__ import annotations

from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput

from handlers.sequence import Sequence
from lmi.executor import FinishReason, PromptLogProb, TokenLogProb

# Ends that our own rules have not seen by then, though vLLM says them.
REASONS = {"stop": FinishReason.END_ID, "length": FinishReason.LENGTH, "repetition": FinishReason.STOP_WORDS}


def feed(sequence: Sequence, output: RequestOutput) -> None:
    """Append the new tokens of a DELTA output; sets the sequence's end where it is reached."""
    sequence.num_computed = sequence.num_tokens
    if sequence.lacks_prompt_log_probs and output.prompt_logprobs:
        sequence.prompt_log_probs = _prompt_log_probs(output.prompt_logprobs)
    completion = output.outputs[0]
    if completion.logprobs is None:
        for token_id in completion.token_ids:
            if not sequence.is_finished:
                sequence.append(token_id)
    else:
        _append_with_log_probs(sequence, completion.token_ids, completion.logprobs)
    if completion.finish_reason is not None and not sequence.is_finished:
        _end(sequence, completion)


def _append_with_log_probs(sequence: Sequence, token_ids: list[int], flat: FlatLogprobs) -> None:
    """At each position stand the chosen token, then the best ones in order, the chosen perhaps again."""
    num_top = sequence.request.output_config.num_top_log_probs
    for token_id, start in zip(token_ids, flat.start_indices, strict=True):
        if sequence.is_finished:
            return  # a stop word of ours lies before what a step of several tokens made
        top = _alternatives(flat, start + 1, start + 1 + num_top) if num_top else None
        sequence.append(token_id, flat.logprobs[start], top)


def _alternatives(flat: FlatLogprobs, start: int, end: int) -> list[TokenLogProb]:
    return [TokenLogProb(*pair) for pair in zip(flat.token_ids[start:end], flat.logprobs[start:end], strict=True)]


def _prompt_log_probs(flat: FlatLogprobs) -> list[PromptLogProb]:
    """Nothing stands before the first token, so its position is empty."""
    return [
        PromptLogProb(flat.logprobs[start], _alternatives(flat, start + 1, end)) if end > start else PromptLogProb(None)
        for start, end in zip(flat.start_indices, flat.end_indices, strict=True)
    ]


def _end(sequence: Sequence, completion: CompletionOutput) -> None:
    """vLLM ended what our rules would have gone on with."""
    reason = REASONS.get(str(completion.finish_reason))
    if reason is None:
        sequence.fail(f"vLLM gave the request up: {completion.finish_reason}")
    else:
        sequence.finish_reason = reason
