"""A Request as TensorRT-LLM's SamplingParams, each value of its exact type, and what they cannot
say.
"""

import math
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from tensorrt_llm import SamplingParams
from tensorrt_llm.llmapi import (
    GuidedDecodingParams as TheirGuide,
    KvCacheRetentionConfig as TheirRetention,
)
from torch import Tensor

from handlers.base.captured import LOGITS
from handlers.base.sequence import Sequence
from handlers.driven.outputs import ending_tokens
from handlers.guides.json_schemas import ANY_OBJECT
from handlers.guides.lark_grammars import is_lark
from handlers.lmi_trtllm.about import CPP_SAMPLER, Profile
from handlers.lmi_trtllm.processors import BadWords, PostProcessor
from lmi.errors import InvalidParameter, Unsupported
from lmi.executor.request import (
    GuidedDecodingParams,
    GuideType,
    KvCacheRetentionConfig,
    Request,
    SamplingConfig,
)

NO_END = -1  # the end token of a sequence that has none
MAX_SIGNED = 2**63 - 1  # torch's seeds are signed: two seeds that differ by 2^63 become one
MIN_TEMPERATURE = 1e-3  # nearly greedy, and logits stay far from the limit of float32
ONE_WIDTH = "(option.max_beam_width): TensorRT-LLM runs all requests at one beam width"
PENALTIES = {
    "repetition_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
}  # with what leaves logits alone


@dataclass(frozen=True, slots=True)
class TrtllmSampler:
    """What the engine's sampler is asked with. The C++ sampler reads every rule and reports only
    chosen tokens.
    """

    profile: Profile
    vocab_size: int
    is_cpp: bool = False

    @property
    def has_rules(self) -> bool:
        return self.is_cpp or not self.profile.has_cpp_sampler


def sampling_params(
    sequence: Sequence,
    sampler: TrtllmSampler,
    functions: list[PostProcessor | BadWords] | None = None,
) -> SamplingParams:
    """Translate the request of a sequence into parameters that only this sequence uses. `functions`
    change its logits.

    They stop where the sequence's own rules do. TensorRT-LLM knows one end token, and stop words of
    one token: further end tokens are stop words there. Its own `ignore_eos` would drop the stop
    words too, so a sequence without an end gets an end token that no vocabulary has.
    """
    request = sequence.request
    end_id = end_token(sequence)
    min_tokens = min(int(sequence.min_tokens), int(sequence.max_tokens)) or None
    return SamplingParams(
        end_id=NO_END if end_id is None else end_id,
        pad_id=0,  # behind the end of a sequence in a tensor; never in an answer
        max_tokens=int(sequence.max_tokens),
        min_tokens=min_tokens
        if end_id is not None
        else None,  # else older versions hold back another token
        stop_token_ids=stop_token_ids(sequence) or None,
        include_stop_str_in_output=True,  # else a stop word is cut off from the tokens too
        embedding_bias=embedding_bias(request, sampler.vocab_size),
        logits_processor=functions,
        guided_decoding=guided(request.guided_decoding_params),
        detokenize=False,
        add_special_tokens=False,
        **_choice(request.sampling_config, sequence.seed, sampler),
        **(wanted_rows(request) | _log_probs(sequence, sampler)),
    )


def end_token(sequence: Sequence) -> int | None:
    """The end token, or None if there is none or it is ignored."""
    if sequence.request.ignore_eos or not sequence.end_ids:
        return None

    first = sequence.request.end_id
    return int(min(sequence.end_ids) if first is None else first)


def stop_token_ids(sequence: Sequence) -> list[int]:
    """Every other single token that ends the sequence there; none beside `min_tokens`, which holds
    back only ends.
    """
    return (
        []
        if sequence.min_tokens
        else [one for one in ending_tokens(sequence) if one != end_token(sequence)]
    )


def embedding_bias(request: Request, vocab_size: int) -> Tensor | None:
    """The bias of each token, float32 (vocab_size,) on the CPU, or None if the request changes no
    logit.

    `vocab_size` is the width of the logits: the engine's whole batch fails if it differs.
    """
    banned = [word[0] for word in request.bad_words if len(word) == 1]
    if not request.embedding_bias and not banned:
        return None

    biases = torch.zeros(vocab_size, dtype=torch.float32)
    for token_id, bias in request.embedding_bias:
        biases[token_id] += bias  # those of one token add up, as in the other engines

    biases[banned] = -math.inf
    return biases


def guided(params: GuidedDecodingParams | None) -> TheirGuide | None:
    """TensorRT-LLM's form. JSON is one object, as in the other engines; the engine's own JSON may
    be any value.
    """
    if params is None:
        return None

    field = {GuideType.REGEX: "regex", GuideType.EBNF_GRAMMAR: "grammar"}.get(
        params.guide_type, "json"
    )
    return TheirGuide(**{field: params.guide or ANY_OBJECT})


def refuse_rules(request: Request, sampler: TrtllmSampler) -> None:
    """Raise Unsupported for what goes on behind the end of a structure, and for a penalty that the
    sampler ignores.

    Behind its end the engine allows only end tokens. Other rules have a capability.
    """
    if (params := request.guided_decoding_params) is not None:
        if params.guide_type is GuideType.EBNF_GRAMMAR and is_lark(params.guide or ""):
            raise Unsupported(
                "guided_decoding_params", "grammars are read in EBNF here (root ::= …), not in Lark"
            )

        if request.ignore_eos:
            raise Unsupported("ignore_eos", "TensorRT-LLM follows a structure only up to its end")

        if request.sampling_config.min_tokens:
            raise Unsupported("min_tokens", "TensorRT-LLM ends an answer where its structure ends")

    if sampler.has_rules:
        return

    reason = (
        f"the Torch sampler of TensorRT-LLM {sampler.profile.name} ignores it; "
        f"option.sampler_type={CPP_SAMPLER}"
    )
    for name, neutral in PENALTIES.items():
        if getattr(request.sampling_config, name) not in (None, neutral):
            raise Unsupported(name, f"{reason} reads it")


def check_beams(request: Request, max_beam_width: int) -> None:
    """Raise InvalidParameter for a width that the engine does not run, Unsupported for a rule that
    beams lack.
    """
    if request.sampling_config.beam_width != max_beam_width:
        raise InvalidParameter(
            "beam_width", f"{max_beam_width} {ONE_WIDTH}", request.sampling_config.beam_width
        )

    if max_beam_width == 1:
        return

    output = request.output_config
    no_rows = "has rows that do not follow the beams"
    has_words = bool(request.stop_words) or len({*request.end_ids, request.end_id} - {None}) > 1
    is_held_back = bool(request.sampling_config.min_tokens)
    for name, reason, is_asked in (
        ("return_generation_logits", no_rows, output.return_generation_logits),
        ("additional_model_outputs", no_rows, bool(output.additional_model_outputs)),
        (
            "num_top_log_probs",
            "has only the log-probs of the chosen tokens",
            output.num_top_log_probs > 0,
        ),
        (
            "stop_words",
            "ends at stop words of one token only",
            any(len(word) > 1 for word in request.stop_words),
        ),
        ("min_tokens", "holds back one end token only", is_held_back and has_words),
        ("bad_words", "bans single tokens only", any(len(word) > 1 for word in request.bad_words)),
        (
            "logits_post_processor_name",
            "calls no function of ours",
            request.logits_post_processor_name is not None,
        ),
    ):
        if is_asked:
            raise Unsupported(name, f"TensorRT-LLM {reason} in a beam search")


def _choice(config: SamplingConfig, seed: int, sampler: TrtllmSampler) -> dict[str, Any]:
    """The parameters that choose a token. TensorRT-LLM is greedy where temperature, top_p and top_k
    are unset.
    """
    chosen: dict[str, Any]
    if config.beam_width > 1:
        chosen = beam_search(config)
    elif config.is_greedy:
        chosen = {
            "top_k": 1
        }  # greedy whatever else is given, and no sampler divides by a temperature of 0
    else:
        temperature = (
            1.0 if config.temperature is None else max(float(config.temperature), MIN_TEMPERATURE)
        )
        given = {"temperature": temperature, "top_p": config.top_p, "min_p": config.min_p}
        chosen = {name: float(value) for name, value in given.items() if value is not None}
        if config.top_k is not None:
            chosen["top_k"] = min(int(config.top_k), sampler.vocab_size)

        if sampler.has_rules:
            chosen["seed"] = int(seed) & MAX_SIGNED

    chosen |= {
        name: float(value) for name in PENALTIES if (value := getattr(config, name)) is not None
    }
    if config.no_repeat_ngram_size:
        chosen["no_repeat_ngram_size"] = int(config.no_repeat_ngram_size)

    return chosen


def beam_search(config: SamplingConfig) -> dict[str, Any]:
    """The keyword arguments of a search. Temperature and what else makes sampling random have no
    effect.
    """
    return {
        "use_beam_search": True,
        "best_of": int(config.beam_width),
        "n": int(config.num_return_sequences),
        "length_penalty": 1.0
        if config.length_penalty is None
        else float(config.length_penalty),  # TensorRT-LLM's is 0
        "early_stopping": int(config.early_stopping or 0),  # TensorRT-LLM's is 1
    }


def _log_probs(sequence: Sequence, sampler: TrtllmSampler) -> dict[str, Any]:
    """How many log-probs are asked for. The contract's 0 means those of the chosen tokens."""
    output = sequence.request.output_config
    profile = sampler.profile
    wanted: dict[str, Any] = {}
    if output.return_log_probs or output.num_top_log_probs:
        wanted["logprobs"] = max(
            int(output.num_top_log_probs), int(profile.has_cpp_beams or sampler.is_cpp)
        )

    if sequence.lacks_prompt_log_probs:
        if profile.has_cpp_sampler:
            wanted["return_context_logits"] = True  # from which `outputs` computes them
        else:
            wanted["prompt_logprobs"] = max(
                1, int(output.num_prompt_log_probs or 0)
            )  # 0 may ask for nothing

    return wanted


def wanted_rows(request: Request) -> dict[str, Any]:
    """The keyword arguments of SamplingParams for what a request wants. The contract's `logits` is
    two flags there.
    """
    output = request.output_config
    outputs = request.output_config.additional_model_outputs
    logits = [one for one in outputs if one.name == LOGITS]
    names = [one.name for one in outputs if one.name != LOGITS]
    return {
        "return_context_logits": output.return_context_logits
        or any(one.gather_context for one in logits),
        "return_generation_logits": output.return_generation_logits or bool(logits),
        "additional_model_outputs": names or None,
    }


def retention(config: KvCacheRetentionConfig) -> TheirRetention:
    """TensorRT-LLM's form, where a duration is a timedelta. Ours has refused ranges that overlap
    and bad priorities.
    """

    def duration(duration_ms: int | None) -> timedelta | None:
        return None if duration_ms is None else timedelta(milliseconds=duration_ms)

    ranges = [
        TheirRetention.TokenRangeRetentionConfig(
            token_start=one.token_start,
            token_end=one.token_end,
            priority=one.priority,
            duration_ms=duration(one.duration_ms),
        )
        for one in config.token_range_retention_configs
    ]
    return TheirRetention(
        token_range_retention_configs=ranges,
        decode_retention_priority=config.decode_retention_priority,
        decode_duration_ms=duration(config.decode_duration_ms),
    )
