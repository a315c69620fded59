"""Checks a request against the capabilities of an engine, by one table for every API and every
engine.

The front end uses it before it submits a request. Each Executor uses it again in `enqueue_request`,
so that a user of the library gets the same answer as a client.
"""

import math
from collections.abc import Collection, Iterator
from operator import attrgetter

from msgspec.structs import replace

from lmi.errors import (
    InvalidParameter,
    InvalidRequest,
    PromptTooLong,
    UnknownAdapter,
    Unsupported,
    shorten,
)
from lmi.executor import Capabilities, EngineInfo, Request, SamplingConfig

# A field of Request that a plain request leaves out, the flag of an engine that has it, what other
# engines have.
NEEDS = (
    ("sampling_config.num_return_sequences", "num_return_sequences", "one answer a request"),
    ("sampling_config.typical_p", "typical_p", "no typical sampling"),
    ("sampling_config.min_p", "min_p", "no min_p sampling"),
    ("sampling_config.seed", "seed", "no seeds"),
    ("sampling_config.no_repeat_ngram_size", "no_repeat_ngram_size", "no rule for n-grams"),
    ("bad_words", "bad_words", "no bad words"),
    ("stop_words", "stop_words", "no stop words"),
    ("embedding_bias", "embedding_bias", "no biases"),
    ("priority", "priority", "no priorities"),
    ("lora_config", "lora", "no adapters"),
    ("output_config.return_log_probs", "log_probs", "no log-probs"),
    ("output_config.num_prompt_log_probs", "prompt_log_probs", "none of the prompt"),
    ("output_config.return_context_logits", "context_logits", "no logits to give"),
    ("output_config.return_generation_logits", "generation_logits", "no logits to give"),
    ("output_config.return_perf_metrics", "perf_metrics", "no clock for a request"),
    ("output_config.return_encoder_output", "", "no encoder"),
    ("kv_cache_retention_config", "kv_cache_retention", "no priorities of its cache"),
    ("prompt_tuning_config", "", "no prompt tuning"),
    ("external_draft_tokens_config", "", "no drafts but its own"),
    ("images", "max_images", "no vision"),
)
# The flag by the field of SamplingConfig that needs it.
OF_SAMPLING = {
    path.partition(".")[2]: flag for path, flag, _ in NEEDS if path.startswith("sampling_config.")
}
OF_SAMPLING |= dict.fromkeys(
    ("repetition_penalty", "presence_penalty", "frequency_penalty"), "penalties"
)
ASKED = attrgetter(*(path for path, _, _ in NEEDS))
PLAIN = ASKED(Request((0,), 1))


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

    for name, instead in _lacking(request, info):
        raise Unsupported(name, f"{info.name} has {instead}")

    if request.lora_config is not None and request.lora_config.name not in info.adapters:
        raise unknown_adapter(request.lora_config.name)


def fitted(
    sampling: SamplingConfig, defaulted: Collection[str], can: Capabilities
) -> SamplingConfig:
    """Return the sampling without those of its `defaulted` fields that an engine lacks, and within
    its bounds.

    Nobody asked for them, so no request is refused for them.
    """
    changed: dict[str, float | None] = {
        name: None
        for name in defaulted
        if name in OF_SAMPLING and not getattr(can, OF_SAMPLING[name])
    }
    temperature = sampling.temperature
    if "temperature" in defaulted and temperature is not None and temperature > can.max_temperature:
        changed["temperature"] = can.max_temperature

    return replace(sampling, **changed) if changed else sampling


def unknown_adapter(name: str) -> UnknownAdapter:
    return UnknownAdapter(f"Adapter {shorten(name, 258)[1:-1]} is not registered")


def _check_purpose(request: Request, info: EngineInfo) -> None:
    gives = info.capabilities.embeddings
    asked = request.pooling_params
    if gives is None and asked is not None:
        what = (
            "a model that generates text and gives no embeddings (docs/apis.md#embeddings: how "
            "it may)"
        )
        raise Unsupported("pooling_params", f"{info.name} has {what}")

    if gives is not None and asked is None:
        raise InvalidRequest(
            "this is an embedding model, which answers at /v1/embeddings and generates no text"
        )

    if gives is None or asked is None or asked.dimensions in (None, gives.size):
        return

    if gives.shorter is None:
        raise Unsupported(
            "dimensions", f"the model's embeddings have {gives.size} numbers and no shorter form"
        )

    if asked.dimensions > gives.size or (gives.shorter and asked.dimensions not in gives.shorter):
        rule = (
            "one of " + ", ".join(map(str, gives.shorter))
            if gives.shorter
            else f"at most {gives.size}"
        )
        raise InvalidParameter("dimensions", rule, asked.dimensions)


def _check_bounds(request: Request, info: EngineInfo) -> None:
    num_prompt_tokens = len(request.input_token_ids)
    limit = info.max_sequence_length
    has_answer = request.pooling_params is None  # which needs room for a token
    if num_prompt_tokens > limit - has_answer:
        rule = "shorter than" if has_answer else "no longer than"
        raise PromptTooLong(
            f"{rule} the model's context of {limit} tokens", f"{num_prompt_tokens} tokens"
        )

    sampling = request.sampling_config
    output = request.output_config
    can = info.capabilities
    max_beam_width = (
        can.max_beam_width if can.max_beam_width > 1 else math.inf
    )  # without a search it is lacking
    for name, value, most, option in (
        ("temperature", sampling.temperature, can.max_temperature, ""),
        ("beam_width", sampling.beam_width, max_beam_width, " (option.max_beam_width)"),
        ("num_top_log_probs", output.num_top_log_probs, can.max_top_log_probs, ""),
        ("num_prompt_log_probs", output.num_prompt_log_probs, can.max_top_log_probs, ""),
    ):
        if value is not None and value > most:
            raise InvalidParameter(name, f"at most {most:g}{option}", value)

    num_images = len(request.images)
    max_images = can.max_images
    if num_images > max_images > 0:
        said = (
            f"must have at most {max_images} images (option.limit_mm_per_prompt), given "
            f"{num_images}"
        )
        raise InvalidRequest(said, "images")


def _check_token_ids(request: Request, info: EngineInfo) -> None:
    end_id = () if request.end_id is None else (request.end_id,)
    groups = [
        ("input_token_ids", request.input_token_ids),
        ("end_ids", request.end_ids),
        ("end_id", end_id),
    ]
    groups += [("stop_words", word) for word in request.stop_words]
    groups += [("bad_words", word) for word in request.bad_words]
    groups += [("embedding_bias", tuple(token_id for token_id, _ in request.embedding_bias))]
    for name, ids in groups:
        if ids and not (0 <= min(ids) and max(ids) < info.vocab_size):
            worst = min(ids) if min(ids) < 0 else max(ids)
            raise InvalidParameter(name, f"token ids from 0 to {info.vocab_size - 1}", worst)


def _lacking(request: Request, info: EngineInfo) -> Iterator[tuple[str, str]]:
    """Yield each ability that the request needs and the engine lacks, as (name, what the engine has
    instead).
    """
    can = info.capabilities
    guide = request.guided_decoding_params
    processor = request.logits_post_processor_name
    if request.sampling_config.beam_width > 1 and can.max_beam_width == 1:
        yield "beam_width", "no beam search"

    if guide is not None and guide.guide_type not in can.guided_decoding:
        yield "guided_decoding_params", "no such guide"

    if processor is not None and processor not in can.logits_post_processors:
        yield (
            "logits_post_processor_name",
            f"{list(can.logits_post_processors) or 'no logits post-processors'}",
        )

    declared = {one.name: one for one in can.additional_outputs}
    for asked in request.output_config.additional_model_outputs:
        if asked.name not in declared:
            yield "additional_model_outputs", f"{list(declared) or 'no additional outputs'}"
        elif asked.gather_context and not declared[asked.name].gather_context:
            yield "additional_model_outputs", f"{asked.name} without gather_context"

    for (path, flag, instead), value, plain in zip(NEEDS, ASKED(request), PLAIN, strict=True):
        if value not in (plain, []) and not getattr(can, flag, False):
            yield path.rpartition(".")[2], instead
