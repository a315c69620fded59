"""Checks a request against the capabilities of an engine, by one table for every API and every
engine.

The front end uses it before it submits a request. Each Executor uses it again in `enqueue_request`,
so that a user of the library gets the same answer as a client.
"""

import math
from collections.abc import Collection, Iterator
from operator import attrgetter
from typing import NamedTuple

from msgspec.structs import replace

from lmi.errors import (
    InvalidParameter,
    InvalidRequest,
    PromptTooLong,
    UnknownAdapter,
    Unsupported,
    shorten,
)
from lmi.executor import Capabilities, Embeddings, EngineInfo, Request, SamplingConfig


class Need(NamedTuple):
    """A field of Request that a plain request leaves out, the flag of an engine that has it, and
    what other engines have instead.
    """

    path: str
    flag: str
    instead: str


NEEDS = (
    Need("sampling_config.num_return_sequences", "num_return_sequences", "one answer a request"),
    Need("sampling_config.typical_p", "typical_p", "no typical sampling"),
    Need("sampling_config.min_p", "min_p", "no min_p sampling"),
    Need("sampling_config.seed", "seed", "no seeds"),
    Need("sampling_config.no_repeat_ngram_size", "no_repeat_ngram_size", "no rule for n-grams"),
    Need("bad_words", "bad_words", "no bad words"),
    Need("stop_words", "stop_words", "no stop words"),
    Need("embedding_bias", "embedding_bias", "no biases"),
    Need("priority", "priority", "no priorities"),
    Need("lora_config", "lora", "no adapters"),
    Need("output_config.return_log_probs", "log_probs", "no log-probs"),
    Need("output_config.num_prompt_log_probs", "prompt_log_probs", "none of the prompt"),
    Need("output_config.return_context_logits", "context_logits", "no logits to give"),
    Need("output_config.return_generation_logits", "generation_logits", "no logits to give"),
    Need("output_config.return_perf_metrics", "perf_metrics", "no clock for a request"),
    Need("output_config.return_encoder_output", "", "no encoder"),
    Need("kv_cache_retention_config", "kv_cache_retention", "no priorities of its cache"),
    Need("prompt_tuning_config", "", "no prompt tuning"),
    Need("external_draft_tokens_config", "", "no drafts but its own"),
    Need("images", "max_images", "no vision"),
)


def _flags_of_sampling() -> dict[str, str]:
    """Return the flag by the field of SamplingConfig that needs it."""
    flags = {
        "repetition_penalty": "penalties",
        "presence_penalty": "penalties",
        "frequency_penalty": "penalties",
    }
    for need in NEEDS:
        config, _, field = need.path.partition(".")
        if config == "sampling_config":
            flags[field] = need.flag

    return flags


OF_SAMPLING = _flags_of_sampling()
VALUES_OF_NEEDS = attrgetter(*(need.path for need in NEEDS))
PLAIN_VALUES = VALUES_OF_NEEDS(Request((0,), 1))


def check_request(request: Request, info: EngineInfo) -> None:
    """Raise InvalidParameter for a value out of this engine's range, Unsupported for an ability
    that it lacks.

    Raises InvalidRequest for generation that an embedding model is asked for.
    """
    _check_purpose(request, info)
    _check_bounds(request, info)
    _check_token_ids(request, info)
    if request.guided_decoding_params is not None and info.capabilities.why_no_guides:
        raise Unsupported("guided_decoding_params", info.capabilities.why_no_guides)

    for lack in _lacking(request, info):
        raise Unsupported(lack.name, f"{info.name} has {lack.instead}")

    if request.lora_config is not None and request.lora_config.name not in info.adapters:
        raise unknown_adapter(request.lora_config.name)


def fitted(
    sampling: SamplingConfig, defaulted: Collection[str], can: Capabilities
) -> SamplingConfig:
    """Return the sampling without those of its `defaulted` fields that an engine lacks, and within
    its bounds.

    Nobody asked for them, so no request is refused for them.
    """
    changes: dict[str, float | None] = {}
    for name in defaulted:
        if name in OF_SAMPLING and not getattr(can, OF_SAMPLING[name]):
            changes[name] = None

    temperature = sampling.temperature
    if "temperature" in defaulted and temperature is not None and temperature > can.max_temperature:
        changes["temperature"] = can.max_temperature

    return replace(sampling, **changes) if changes else sampling


def unknown_adapter(name: str) -> UnknownAdapter:
    return UnknownAdapter(f"Adapter {shorten(name, 258)[1:-1]} is not registered")


def _check_purpose(request: Request, info: EngineInfo) -> None:
    """Refuse embeddings where the model generates text, and the other way around."""
    embeddings = info.capabilities.embeddings
    pooling = request.pooling_params
    if embeddings is None:
        if pooling is None:
            return

        raise Unsupported(
            "pooling_params",
            f"{info.name} has a model that generates text and gives no embeddings "
            "(docs/apis.md#embeddings: how it may)",
        )

    if pooling is None:
        raise InvalidRequest(
            "this is an embedding model, which answers at /v1/embeddings and generates no text"
        )

    if pooling.dimensions is not None and pooling.dimensions != embeddings.size:
        _check_dimensions(pooling.dimensions, embeddings)


def _check_dimensions(dimensions: int, embeddings: Embeddings) -> None:
    """Refuse a size that the embeddings do not have."""
    size = embeddings.size
    shorter = embeddings.shorter
    if shorter is None:
        raise Unsupported(
            "dimensions", f"the model's embeddings have {size} numbers and no shorter form"
        )

    rule = f"at most {size}"
    if shorter:
        rule = "one of " + ", ".join(map(str, shorter))

    if dimensions > size or (shorter and dimensions not in shorter):
        raise InvalidParameter("dimensions", rule, dimensions)


def _check_bounds(request: Request, info: EngineInfo) -> None:
    _check_length(request, info)

    sampling = request.sampling_config
    output = request.output_config
    can = info.capabilities

    # An engine without a search lacks it, which `_lacking` says.
    max_beam_width: float = math.inf
    if can.max_beam_width > 1:
        max_beam_width = can.max_beam_width

    for name, value, max_value, option in (
        ("temperature", sampling.temperature, can.max_temperature, ""),
        ("beam_width", sampling.beam_width, max_beam_width, " (option.max_beam_width)"),
        ("num_top_log_probs", output.num_top_log_probs, can.max_top_log_probs, ""),
        ("num_prompt_log_probs", output.num_prompt_log_probs, can.max_top_log_probs, ""),
    ):
        if value is not None and value > max_value:
            raise InvalidParameter(name, f"at most {max_value:g}{option}", value)

    num_images = len(request.images)
    if num_images > can.max_images > 0:
        rule = f"must have at most {can.max_images} images (option.limit_mm_per_prompt)"
        raise InvalidRequest(f"{rule}, given {num_images}", "images")


def _check_length(request: Request, info: EngineInfo) -> None:
    """Refuse a prompt that leaves no room for one token, if the request generates any."""
    num_prompt_tokens = len(request.input_token_ids)
    limit = info.max_sequence_length
    has_answer = request.pooling_params is None
    if num_prompt_tokens > limit - has_answer:
        num_tokens = f"{num_prompt_tokens} tokens"
        raise PromptTooLong.of_context(limit, num_tokens, has_answer=has_answer)


def _check_token_ids(request: Request, info: EngineInfo) -> None:
    end_id = () if request.end_id is None else (request.end_id,)
    biased_ids = tuple(token_id for token_id, _ in request.embedding_bias)
    groups = [
        ("input_token_ids", request.input_token_ids),
        ("end_ids", request.end_ids),
        ("end_id", end_id),
        *(("stop_words", word) for word in request.stop_words),
        *(("bad_words", word) for word in request.bad_words),
        ("embedding_bias", biased_ids),
    ]

    for name, ids in groups:
        if ids and not (0 <= min(ids) and max(ids) < info.vocab_size):
            worst = min(ids) if min(ids) < 0 else max(ids)
            raise InvalidParameter(name, f"token ids from 0 to {info.vocab_size - 1}", worst)


class _Lack(NamedTuple):
    """An ability that a request needs and an engine lacks, and what the engine has instead."""

    name: str
    instead: str


def _lacking(request: Request, info: EngineInfo) -> Iterator[_Lack]:
    """Yield each ability that the request needs and the engine lacks."""
    can = info.capabilities
    if request.sampling_config.beam_width > 1 and can.max_beam_width == 1:
        yield _Lack("beam_width", "no beam search")

    guide = request.guided_decoding_params
    if guide is not None and guide.guide_type not in can.guided_decoding:
        yield _Lack("guided_decoding_params", "no such guide")

    processor = request.logits_post_processor_name
    if processor is not None and processor not in can.logits_post_processors:
        processors = list(can.logits_post_processors) or "no logits post-processors"
        yield _Lack("logits_post_processor_name", f"{processors}")

    declared = {output.name: output for output in can.additional_outputs}
    for output in request.output_config.additional_model_outputs:
        if output.name not in declared:
            outputs = list(declared) or "no additional outputs"
            yield _Lack("additional_model_outputs", f"{outputs}")
        elif output.gather_context and not declared[output.name].gather_context:
            yield _Lack("additional_model_outputs", f"{output.name} without gather_context")

    values = VALUES_OF_NEEDS(request)
    for need, value, plain_value in zip(NEEDS, values, PLAIN_VALUES, strict=True):
        if value not in (plain_value, []) and not getattr(can, need.flag, False):
            yield _Lack(need.path.rpartition(".")[2], need.instead)
