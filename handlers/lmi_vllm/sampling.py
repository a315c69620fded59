"""Translates a Request to vLLM's SamplingParams. Every value gets its exact type: a wrong type ends vLLM silently.

`handlers/base/sequence.py` decides when a sequence ends. vLLM gets the same rules, so that it stops at the same token,
except for stop words of several tokens, which it does not know. Written against vLLM 0.30 to 0.33.
"""

from __future__ import annotations

from typing import Any

from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

from handlers.base.sequence import Sequence
from lmi.executor import (
    DEFAULT_PRIORITY,
    PRIORITY_STEPS,
    GuidedDecodingParams,
    GuideType,
    OutputConfig,
    Request,
    SamplingConfig,
)

MAX_TEMPERATURE = 2.0  # of SamplingParams
MAX_SIGNED = 2**63 - 1  # vLLM's seeds are signed, as torch's are: two seeds that differ by 2^63 become one


def sampling_params(sequence: Sequence) -> SamplingParams:
    """Translate the request of a sequence. Raises what vLLM's check raises, e.g. for a structure it cannot follow."""
    request, config, output = sequence.request, sequence.request.sampling_config, sequence.request.output_config
    params = SamplingParams(
        max_tokens=int(sequence.max_tokens),
        min_tokens=min(int(config.min_tokens or 0), int(sequence.max_tokens)),
        ignore_eos=True,  # stop_token_ids has the end tokens of the request
        stop_token_ids=stop_token_ids(sequence),
        structured_outputs=structure(request.guided_decoding_params),
        logit_bias={int(token_id): float(bias) for token_id, bias in request.embedding_bias} or None,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        skip_clone=True,
        **_choice(config, sequence.seed),
        **_log_probs(output, sequence),
    )
    if request.bad_words:  # vLLM's argument takes texts and turns them into token ids
        params._bad_words_token_ids = [[int(one) for one in word] for word in request.bad_words]
    return params


def row_params(sequence: Sequence, num_top: int) -> SamplingParams:
    """The parameters of a running beam: one token, and the best `num_top` with their log-probs."""
    return SamplingParams(
        max_tokens=1,
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        skip_clone=True,
        **_log_probs(sequence.request.output_config, sequence) | {"logprobs": num_top},
    )


def _choice(config: SamplingConfig, seed: int) -> dict[str, Any]:
    """The parameters that choose a token. Unset ones are omitted: vLLM accepts None only in some fields."""
    if config.is_greedy:
        given: dict[str, float | None] = {"temperature": 0.0}
    else:
        given = {"temperature": config.temperature, "top_p": config.top_p, "min_p": config.min_p}
    given["repetition_penalty"] = config.repetition_penalty
    given["presence_penalty"] = config.presence_penalty
    given["frequency_penalty"] = config.frequency_penalty
    chosen: dict[str, Any] = {name: float(value) for name, value in given.items() if value is not None}
    if not config.is_greedy and config.top_k is not None:
        chosen["top_k"] = int(config.top_k)
    if config.seed is not None:  # vLLM then makes a generator for the request, which costs time
        chosen["seed"] = int(seed) & MAX_SIGNED  # the highest bit could make -1, which means no seed
    return chosen


def _log_probs(output: OutputConfig, sequence: Sequence) -> dict[str, Any]:
    wanted: dict[str, Any] = {"flat_logprobs": True}
    if output.return_log_probs or output.num_top_log_probs:
        wanted["logprobs"] = int(output.num_top_log_probs)
    if sequence.lacks_prompt_log_probs:
        wanted["prompt_logprobs"] = int(output.num_prompt_log_probs or 0)
    return wanted


def stop_token_ids(sequence: Sequence) -> list[int]:
    """Every single token that ends the sequence."""
    words = [word[0] for word in sequence.request.stop_words if len(word) == 1]
    ends = [] if sequence.request.ignore_eos else sorted(sequence.end_ids)
    return [int(token_id) for token_id in dict.fromkeys([*ends, *words])]


def structure(guide: GuidedDecodingParams | None) -> StructuredOutputsParams | None:
    if guide is None:
        return None
    if guide.guide_type is GuideType.JSON:
        return StructuredOutputsParams(json_object=True)
    if guide.guide_type is GuideType.JSON_SCHEMA:
        return StructuredOutputsParams(json=guide.guide)
    if guide.guide_type is GuideType.REGEX:
        return StructuredOutputsParams(regex=guide.guide)
    return StructuredOutputsParams(grammar=guide.guide)


def priority(request: Request) -> int:
    """vLLM's priority of a request, where a lower number is more urgent."""
    return round((DEFAULT_PRIORITY - request.priority) * PRIORITY_STEPS)
