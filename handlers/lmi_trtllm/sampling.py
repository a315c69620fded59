"""A Request as TensorRT-LLM's SamplingParams, each value of its exact type, and the refusal of what
these cannot say.
"""

import math
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

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
from handlers.guides.json_schemas.keywords import ANY_OBJECT
from handlers.guides.lark_grammars import is_lark
from handlers.lmi_trtllm.processors import BadWords, PostProcessor
from handlers.lmi_trtllm.profile import CPP_SAMPLER, Profile
from lmi.errors import InvalidParameter, Unsupported
from lmi.executor.request import (
    GuidedDecodingParams,
    GuideType,
    KvCacheRetentionConfig,
    Request,
    SamplingConfig,
)

# The end token of a sequence that has none. No vocabulary has it.
NO_END = -1
# Torch's seeds are signed: two seeds that differ by 2^63 become one.
MAX_SIGNED = 2**63 - 1
# It is nearly greedy, and logits stay far from the limit of float32.
MIN_TEMPERATURE = 1e-3
ONE_WIDTH = "(option.max_beam_width): TensorRT-LLM runs all requests at one beam width"
# Each penalty with the value that leaves logits alone.
PENALTIES = {
    "repetition_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
}


@dataclass(frozen=True, slots=True)
class TrtllmSampler:
    """Which sampler the engine has."""

    profile: Profile
    vocab_size: int
    # Whether it is the C++ sampler, which reports log-probs of chosen tokens only.
    is_cpp: bool = False

    @property
    def has_rules(self) -> bool:
        """Whether it reads every rule of a request: only a Torch sampler beside a C++ one does
        not.
        """
        return self.is_cpp or not self.profile.has_cpp_sampler


def sampling_params(
    sequence: Sequence,
    sampler: TrtllmSampler,
    functions: list[PostProcessor | BadWords] | None = None,
) -> SamplingParams:
    """Translate the request of a sequence. `functions` change its logits.

    The parameters belong to this sequence alone, since a submit changes them. TensorRT-LLM stops
    where the sequence's own rules do. It knows one end token, and stop words of one token, so that
    further end tokens are stop words there. Its own `ignore_eos` would drop the stop words too, so
    a sequence without an end gets the end token NO_END.
    """
    request = sequence.request
    end_id = end_token(sequence)
    min_tokens = None
    # Without an end token older versions would hold back another token.
    if end_id is not None:
        min_tokens = min(int(sequence.min_tokens), int(sequence.max_tokens)) or None

    choice = _choice(request.sampling_config, sequence.seed, sampler)
    reported = row_parameters(request) | _log_probs(sequence, sampler)
    return SamplingParams(
        end_id=NO_END if end_id is None else end_id,
        # It stands behind the end of a sequence in a tensor, and never in an answer.
        pad_id=0,
        max_tokens=int(sequence.max_tokens),
        min_tokens=min_tokens,
        stop_token_ids=stop_token_ids(sequence) or None,
        # Else a stop word is cut off from the tokens too.
        include_stop_str_in_output=True,
        embedding_bias=embedding_bias(request, sampler.vocab_size),
        logits_processor=functions,
        guided_decoding=guided(request.guided_decoding_params),
        detokenize=False,
        add_special_tokens=False,
        **choice,
        **reported,
    )


def end_token(sequence: Sequence) -> int | None:
    """Return the end token, or None if there is none or it is ignored."""
    if sequence.request.ignore_eos or not sequence.end_ids:
        return None

    end_id = sequence.request.end_id
    if end_id is None:
        end_id = min(sequence.end_ids)

    return int(end_id)


def stop_token_ids(sequence: Sequence) -> list[int]:
    """Return every other single token at which TensorRT-LLM ends the sequence.

    There are none beside `min_tokens`, which there holds back only the end token.
    """
    if sequence.min_tokens:
        return []

    end_id = end_token(sequence)
    return [token_id for token_id in ending_tokens(sequence) if token_id != end_id]


def embedding_bias(request: Request, vocab_size: int) -> Tensor | None:
    """Return the bias of each token, float32 (vocab_size,) on the CPU, or None if there is none.

    Bad words of one token are banned by it. `vocab_size` is the width of the logits: the engine's
    whole batch fails if it differs.
    """
    banned_ids = [word[0] for word in request.bad_words if len(word) == 1]
    if not request.embedding_bias and not banned_ids:
        return None

    biases = torch.zeros(vocab_size, dtype=torch.float32)
    for token_id, bias in request.embedding_bias:
        # The biases of one token add up, as in the other engines.
        biases[token_id] += bias

    biases[banned_ids] = -math.inf
    return biases


def guided(params: GuidedDecodingParams | None) -> TheirGuide | None:
    """Return a guide in TensorRT-LLM's form.

    JSON is one object, as in the other engines; the engine's own JSON may be any value.
    """
    if params is None:
        return None

    guide = params.guide or ANY_OBJECT
    match params.guide_type:
        case GuideType.REGEX:
            return TheirGuide(regex=guide)
        case GuideType.EBNF_GRAMMAR:
            return TheirGuide(grammar=guide)
        case _:
            return TheirGuide(json=guide)


def refuse_rules(request: Request, sampler: TrtllmSampler) -> None:
    """Raise Unsupported for rules that no capability says: those beside a structure that
    TensorRT-LLM does not follow, and a penalty that the sampler ignores.
    """
    if request.guided_decoding_params is not None:
        _check_guide(request, request.guided_decoding_params)

    if not sampler.has_rules:
        _refuse_penalties(request, sampler)


def _check_guide(request: Request, params: GuidedDecodingParams) -> None:
    """Raise Unsupported for a grammar in Lark, and for what goes on behind the end of a structure,
    where the engine allows only end tokens.
    """
    if params.guide_type is GuideType.EBNF_GRAMMAR and is_lark(params.guide or ""):
        raise Unsupported(
            "guided_decoding_params", "grammars are read in EBNF here (root ::= …), not in Lark"
        )

    if request.ignore_eos:
        raise Unsupported("ignore_eos", "TensorRT-LLM follows a structure only up to its end")

    if request.sampling_config.min_tokens:
        raise Unsupported("min_tokens", "TensorRT-LLM ends an answer where its structure ends")


def _refuse_penalties(request: Request, sampler: TrtllmSampler) -> None:
    """Raise Unsupported for a penalty that changes logits."""
    reason = (
        f"the Torch sampler of TensorRT-LLM {sampler.profile.name} ignores it; "
        f"option.sampler_type={CPP_SAMPLER}"
    )
    for name, neutral in PENALTIES.items():
        if getattr(request.sampling_config, name) not in (None, neutral):
            raise Unsupported(name, f"{reason} reads it")


def check_beams(request: Request, max_beam_width: int) -> None:
    """Raise InvalidParameter for a width that the engine does not run, Unsupported for a rule that
    a beam search does not have.
    """
    if request.sampling_config.beam_width != max_beam_width:
        raise InvalidParameter(
            "beam_width", f"{max_beam_width} {ONE_WIDTH}", request.sampling_config.beam_width
        )

    if max_beam_width == 1:
        return

    for lack in _lacks_of_beams(request):
        if lack.is_needed:
            raise Unsupported(lack.field, f"TensorRT-LLM {lack.reason} in a beam search")


class _LackOfBeams(NamedTuple):
    """What a beam search does not have, and whether a request needs it."""

    field: str
    reason: str
    is_needed: bool


def _lacks_of_beams(request: Request) -> list[_LackOfBeams]:
    output = request.output_config
    has_long_stop_word = any(len(word) > 1 for word in request.stop_words)
    has_long_bad_word = any(len(word) > 1 for word in request.bad_words)
    has_function = request.logits_post_processor_name is not None

    end_ids = set(request.end_ids)
    if request.end_id is not None:
        end_ids.add(request.end_id)

    has_several_ends = bool(request.stop_words) or len(end_ids) > 1
    holds_back_several = bool(request.sampling_config.min_tokens) and has_several_ends

    no_rows = "has rows that do not follow the beams"
    no_top = "has only the log-probs of the chosen tokens"
    return [
        _LackOfBeams("return_generation_logits", no_rows, output.return_generation_logits),
        _LackOfBeams("additional_model_outputs", no_rows, bool(output.additional_model_outputs)),
        _LackOfBeams("num_top_log_probs", no_top, output.num_top_log_probs > 0),
        _LackOfBeams("stop_words", "ends at stop words of one token only", has_long_stop_word),
        _LackOfBeams("min_tokens", "holds back one end token only", holds_back_several),
        _LackOfBeams("bad_words", "bans single tokens only", has_long_bad_word),
        _LackOfBeams("logits_post_processor_name", "calls no function of ours", has_function),
    ]


def _choice(config: SamplingConfig, seed: int, sampler: TrtllmSampler) -> dict[str, Any]:
    """Return the parameters that choose a token.

    TensorRT-LLM is greedy where temperature, top_p and top_k are not set.
    """
    parameters: dict[str, Any]
    if config.beam_width > 1:
        parameters = beam_search(config)
    elif config.is_greedy:
        # It is greedy whatever else is set, and no sampler divides by a temperature of 0.
        parameters = {"top_k": 1}
    else:
        parameters = _sampling(config, seed, sampler)

    for name in PENALTIES:
        penalty = getattr(config, name)
        if penalty is not None:
            parameters[name] = float(penalty)

    if config.no_repeat_ngram_size:
        parameters["no_repeat_ngram_size"] = int(config.no_repeat_ngram_size)

    return parameters


def _sampling(config: SamplingConfig, seed: int, sampler: TrtllmSampler) -> dict[str, Any]:
    """Return the parameters that choose a random token."""
    temperature = 1.0
    if config.temperature is not None:
        temperature = max(float(config.temperature), MIN_TEMPERATURE)

    parameters: dict[str, Any] = {"temperature": temperature}
    if config.top_p is not None:
        parameters["top_p"] = float(config.top_p)

    if config.min_p is not None:
        parameters["min_p"] = float(config.min_p)

    if config.top_k is not None:
        parameters["top_k"] = min(int(config.top_k), sampler.vocab_size)

    if sampler.has_rules:
        parameters["seed"] = int(seed) & MAX_SIGNED

    return parameters


def beam_search(config: SamplingConfig) -> dict[str, Any]:
    """Return the keyword arguments of a search. Temperature and what else makes sampling random
    have no effect.
    """
    # TensorRT-LLM's own default is 0.
    length_penalty = 1.0 if config.length_penalty is None else float(config.length_penalty)
    return {
        "use_beam_search": True,
        "best_of": int(config.beam_width),
        "n": int(config.num_return_sequences),
        "length_penalty": length_penalty,
        # TensorRT-LLM's own default is 1.
        "early_stopping": int(config.early_stopping or 0),
    }


def _log_probs(sequence: Sequence, sampler: TrtllmSampler) -> dict[str, Any]:
    """Return the parameters that ask for log-probs. The contract's 0 means those of the chosen
    tokens.
    """
    output = sequence.request.output_config
    profile = sampler.profile
    parameters: dict[str, Any] = {}
    if output.return_log_probs or output.num_top_log_probs:
        # There a 0 asks for nothing.
        min_number = 1 if profile.has_cpp_beams or sampler.is_cpp else 0
        parameters["logprobs"] = max(int(output.num_top_log_probs), min_number)

    if sequence.lacks_prompt_log_probs:
        if profile.has_cpp_sampler:
            # The module `outputs` computes the log-probs from them.
            parameters["return_context_logits"] = True
        else:
            # A 0 may ask for nothing.
            parameters["prompt_logprobs"] = max(1, int(output.num_prompt_log_probs or 0))

    return parameters


def row_parameters(request: Request) -> dict[str, Any]:
    """Return the keyword arguments of SamplingParams for the rows that a request asks for.

    The contract's output `logits` is two flags there.
    """
    config = request.output_config
    wants_context = config.return_context_logits
    wants_generation = config.return_generation_logits
    names: list[str] = []
    for output in config.additional_model_outputs:
        if output.name == LOGITS:
            wants_generation = True
            wants_context = wants_context or output.gather_context
        else:
            names.append(output.name)

    return {
        "return_context_logits": wants_context,
        "return_generation_logits": wants_generation,
        "additional_model_outputs": names or None,
    }


def retention(config: KvCacheRetentionConfig) -> TheirRetention:
    """Return TensorRT-LLM's form, where a duration is a timedelta.

    The contract has refused ranges that overlap, and bad priorities.
    """

    def duration(duration_ms: int | None) -> timedelta | None:
        return None if duration_ms is None else timedelta(milliseconds=duration_ms)

    ranges = []
    for token_range in config.token_range_retention_configs:
        their_range = TheirRetention.TokenRangeRetentionConfig(
            token_start=token_range.token_start,
            token_end=token_range.token_end,
            priority=token_range.priority,
            duration_ms=duration(token_range.duration_ms),
        )
        ranges.append(their_range)

    return TheirRetention(
        token_range_retention_configs=ranges,
        decode_retention_priority=config.decode_retention_priority,
        decode_duration_ms=duration(config.decode_duration_ms),
    )
