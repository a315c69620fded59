"""TensorRT-LLM's own beam search: what it is asked for, what it lacks, and the beams that each of its steps restates.

Every request of an engine runs at the beam width with which the engine was built. A request of another width is
refused, one without beams too if that width is over 1.
"""

from __future__ import annotations

from typing import Any

from tensorrt_llm.llmapi import CompletionOutput, RequestOutput

from handlers.base.beams import Beam
from handlers.base.sequence import Sequence
from handlers.lmi_trtllm.completions import Ends, OutputFault, cut_off, end_of, of_entries
from lmi.errors import InvalidParameter, Unsupported
from lmi.executor import FinishReason, Request, SamplingConfig

ONE_WIDTH = "(option.max_beam_width): TensorRT-LLM runs all requests at one beam width"
DEFAULT_LENGTH_PENALTY = 1.0  # the contract's; TensorRT-LLM's is 0
DEFAULT_EARLY_STOPPING = 0  # the contract's; TensorRT-LLM's is 1


def choice(config: SamplingConfig) -> dict[str, Any]:
    """The keyword arguments of SamplingParams. Temperature and what else makes sampling random have no effect."""
    length_penalty, early_stopping = config.length_penalty, config.early_stopping
    return {
        "use_beam_search": True,
        "best_of": int(config.beam_width),
        "n": int(config.num_return_sequences),
        "length_penalty": DEFAULT_LENGTH_PENALTY if length_penalty is None else float(length_penalty),
        "early_stopping": DEFAULT_EARLY_STOPPING if early_stopping is None else int(early_stopping),
    }


def check(request: Request, max_beam_width: int) -> None:
    """Raise InvalidParameter for a width that the engine does not run, Unsupported for a rule that beams lack."""
    if request.sampling_config.beam_width != max_beam_width:
        raise InvalidParameter("beam_width", f"{max_beam_width} {ONE_WIDTH}", request.sampling_config.beam_width)
    if max_beam_width == 1:
        return
    for name, reason, is_asked in _lacking(request):
        if is_asked:
            raise Unsupported(name, f"TensorRT-LLM {reason} in a beam search")


def _lacking(request: Request) -> list[tuple[str, str, bool]]:
    has_words = bool(request.stop_words) or len({*request.end_ids, request.end_id} - {None}) > 1
    is_held_back = bool(request.sampling_config.min_tokens)
    return [
        (
            "num_top_log_probs",
            "has only the log-probs of the chosen tokens",
            request.output_config.num_top_log_probs > 0,
        ),
        ("stop_words", "ends at stop words of one token only", any(len(word) > 1 for word in request.stop_words)),
        ("min_tokens", "holds back one end token only", is_held_back and has_words),
        ("bad_words", "bans single tokens only", any(len(word) > 1 for word in request.bad_words)),
        ("logits_post_processor_name", "calls no function of ours", request.logits_post_processor_name is not None),
    ]


def of_output(output: RequestOutput, sequence: Sequence, ends: Ends) -> list[Beam] | None:
    """The beams at this step, the best first. Returns None while one of them waits for its log-probs.

    Raises OutputFault if some are missing at the end.
    """
    beams = [_beam(one, sequence, ends, is_over=output.finished) for one in output.outputs]
    if all(beam is not None for beam in beams):
        return [beam for beam in beams if beam is not None]
    if output.finished:
        raise OutputFault("the engine reported fewer log-probs than tokens of a beam")
    return None


def _beam(completion: CompletionOutput, sequence: Sequence, ends: Ends, *, is_over: bool) -> Beam | None:
    token_ids = list(completion.token_ids or ())
    log_probs: list[float] = []
    if sequence.request.output_config.return_log_probs:
        known = of_entries(token_ids, completion.logprobs or (), 0)
        if len(known.values) < len(token_ids):
            return None
        log_probs = [values[0] for values in known.values]
    else:
        token_ids += cut_off(completion, ends) if is_over else []
    return Beam(
        token_ids,
        log_probs,
        sum=completion.cumulative_logprob or 0.0,
        finish_reason=_reason(completion, token_ids, sequence) if is_over else FinishReason.NOT_FINISHED,
    )


def _reason(completion: CompletionOutput, token_ids: list[int], sequence: Sequence) -> FinishReason:
    if token_ids and (known := sequence.reason_after(token_ids, len(token_ids))) is not FinishReason.NOT_FINISHED:
        return known
    end = end_of(completion, sequence)
    if isinstance(end, Exception):
        raise end
    return end
