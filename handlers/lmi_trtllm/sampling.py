"""Translates a Request to TensorRT-LLM's SamplingParams. Every value gets its exact type.

`handlers/base/sequence.py` decides when a sequence ends. TensorRT-LLM gets the same rules as far as it has them
(`ends.py`), so that it stops at the same token. Its own `ignore_eos` would drop the stop words too, so a sequence
without an end gets an end token that no vocabulary has.

Checked against the published sources of main of October 2025 and of August 2026.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tensorrt_llm import SamplingParams

from handlers.base.sequence import Sequence
from handlers.lmi_trtllm import beams, biases, captured, guides
from handlers.lmi_trtllm.ends import end_token, stop_token_ids
from handlers.lmi_trtllm.processors import BadWords, PostProcessor
from handlers.lmi_trtllm.profile import CPP_SAMPLER, Profile
from lmi.errors import Unsupported
from lmi.executor import Request, SamplingConfig

NO_END = -1  # the end token of a sequence that has none
PAD = 0  # behind the end of a sequence in a tensor; never in an answer
MAX_SIGNED = 2**63 - 1  # torch's seeds are signed: two seeds that differ by 2^63 become one
MIN_TEMPERATURE = 1e-3  # nearly greedy, and logits stay far from the limit of float32


@dataclass(frozen=True, slots=True)
class Sampler:
    """What the engine's sampler is asked with. The C++ sampler reads every rule and reports only chosen tokens."""

    profile: Profile
    vocab_size: int
    is_cpp: bool = False

    @property
    def has_rules(self) -> bool:
        return self.profile.has_rules or self.is_cpp


def sampling_params(
    sequence: Sequence, sampler: Sampler, functions: list[PostProcessor | BadWords] | None = None
) -> SamplingParams:
    """Translate the request of a sequence into parameters that only this sequence uses.

    `functions` change its logits.
    """
    request, output = sequence.request, sequence.request.output_config
    end_id = end_token(sequence)
    return SamplingParams(
        end_id=NO_END if end_id is None else end_id,
        pad_id=PAD,
        max_tokens=int(sequence.max_tokens),
        min_tokens=_min_tokens(sequence, end_id),
        stop_token_ids=stop_token_ids(sequence) or None,
        include_stop_str_in_output=True,  # else a stop word is cut off from the tokens too
        embedding_bias=biases.embedding_bias(request, sampler.vocab_size),
        logits_processor=functions,
        guided_decoding=guides.guided(request.guided_decoding_params),
        detokenize=False,
        add_special_tokens=False,
        **_choice(request.sampling_config, sequence.seed, sampler),
        **(captured.ask(output) | _log_probs(sequence, sampler)),
    )


def _min_tokens(sequence: Sequence, end_id: int | None) -> int | None:
    """None too where no token ends the sequence: older versions would hold back the last token of the vocabulary."""
    return None if end_id is None else min(int(sequence.min_tokens), int(sequence.max_tokens)) or None


def refuse_rules(request: Request, sampler: Sampler) -> None:
    """Raise Unsupported for a penalty that the sampler would ignore. Other rules have a capability."""
    if sampler.has_rules:
        return
    config = request.sampling_config
    for name, neutral in (("repetition_penalty", 1), ("presence_penalty", 0), ("frequency_penalty", 0)):
        if getattr(config, name) not in (None, neutral):
            raise Unsupported(name, no_rule(sampler))


def no_rule(sampler: Sampler) -> str:
    instead = f"; option.sampler_type={CPP_SAMPLER} reads it" if sampler.profile.has_cpp_sampler else ""
    return f"the Torch sampler of TensorRT-LLM {sampler.profile.name} ignores it{instead}"


def _choice(config: SamplingConfig, seed: int, sampler: Sampler) -> dict[str, Any]:
    """The parameters that choose a token.

    A sampling request always has a temperature: TensorRT-LLM is greedy where temperature, top_p and top_k are unset.
    """
    if config.beam_width > 1:
        chosen = beams.choice(config)
    elif config.is_greedy:
        chosen = {"top_k": 1}  # greedy whatever else is given, and no sampler divides by a temperature of 0
    else:
        chosen = _sampled(config, sampler) | ({"seed": int(seed) & MAX_SIGNED} if sampler.has_rules else {})
    return chosen | _rules(config)


def _sampled(config: SamplingConfig, sampler: Sampler) -> dict[str, Any]:
    temperature = 1.0 if config.temperature is None else max(float(config.temperature), MIN_TEMPERATURE)
    given = {"top_p": config.top_p, "min_p": config.min_p}
    chosen: dict[str, Any] = {name: float(value) for name, value in given.items() if value is not None}
    if config.top_k is not None:
        chosen["top_k"] = min(int(config.top_k), sampler.vocab_size)
    return {"temperature": temperature, **chosen}


def _rules(config: SamplingConfig) -> dict[str, Any]:
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    given: dict[str, Any] = {name: float(value) for name in names if (value := getattr(config, name)) is not None}
    if config.no_repeat_ngram_size:
        given["no_repeat_ngram_size"] = int(config.no_repeat_ngram_size)
    return given


def _log_probs(sequence: Sequence, sampler: Sampler) -> dict[str, Any]:
    """How many log-probs are asked for. The contract's 0 means those of the chosen tokens."""
    output, profile = sequence.request.output_config, sampler.profile
    wanted: dict[str, Any] = {}
    if output.return_log_probs or output.num_top_log_probs:
        wanted["logprobs"] = max(int(output.num_top_log_probs), profile.min_log_probs, int(sampler.is_cpp))
    if sequence.lacks_prompt_log_probs:
        if profile.names_prompt_tokens:
            wanted["prompt_logprobs"] = max(1, int(output.num_prompt_log_probs or 0))  # 0 may ask for nothing
        else:
            wanted["return_context_logits"] = True  # from which `outputs` computes them
    return wanted
