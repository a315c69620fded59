"""Checks a request against the capabilities of an engine.

One table serves every API and every engine. The front end uses it before it submits a request. Each Executor uses it
again in `enqueue_request`, so that a user of the library gets the same answer as a client. This module does not know
text or HTTP.
"""

from __future__ import annotations

from lmi.errors import InvalidParameter, PromptTooLong, UnknownAdapter, Unsupported, shorten
from lmi.executor import DEFAULT_PRIORITY, Capabilities, EngineInfo, Request


def check_request(request: Request, info: EngineInfo) -> None:
    """Raise InvalidParameter for a value out of this engine's range, Unsupported for an ability that it lacks."""
    _check_bounds(request, info)
    _check_token_ids(request, info)
    for name, reason in _lacking(request, info):
        raise Unsupported(name, reason)
    if request.lora_config is not None and request.lora_config.name not in info.adapters:
        raise unknown_adapter(request.lora_config.name)


def unknown_adapter(name: str) -> UnknownAdapter:
    return UnknownAdapter(f"Adapter {shorten(name, 258)[1:-1]} is not registered")


def _check_bounds(request: Request, info: EngineInfo) -> None:
    num_prompt_tokens, limit = len(request.input_token_ids), info.max_sequence_length
    if num_prompt_tokens >= limit:
        raise PromptTooLong(f"shorter than the model's context of {limit} tokens", f"{num_prompt_tokens} tokens")
    temperature, max_temperature = request.sampling_config.temperature, info.capabilities.max_temperature
    if temperature is not None and temperature > max_temperature:
        raise InvalidParameter("temperature", f"at most {max_temperature:g}", temperature)
    beam_width, max_beam_width = request.sampling_config.beam_width, info.capabilities.max_beam_width
    if max_beam_width > 1 and beam_width > max_beam_width:
        raise InvalidParameter("beam_width", f"at most {max_beam_width} (option.max_beam_width)", beam_width)
    max_top = info.capabilities.max_top_log_probs
    for name in ("num_top_log_probs", "num_prompt_log_probs"):
        num = getattr(request.output_config, name)
        if num is not None and num > max_top:
            raise InvalidParameter(name, f"at most {max_top}", num)


def _check_token_ids(request: Request, info: EngineInfo) -> None:
    groups: list[tuple[str, tuple[int, ...]]] = [
        ("input_token_ids", request.input_token_ids),
        ("end_ids", request.end_ids),
        ("end_id", () if request.end_id is None else (request.end_id,)),
    ]
    groups += [("stop_words", word) for word in request.stop_words]
    groups += [("bad_words", word) for word in request.bad_words]
    groups += [("embedding_bias", tuple(token_id for token_id, _ in request.embedding_bias))]
    for name, ids in groups:
        if ids and not (0 <= min(ids) and max(ids) < info.vocab_size):
            worst = min(ids) if min(ids) < 0 else max(ids)
            raise InvalidParameter(name, f"token ids from 0 to {info.vocab_size - 1}", worst)


def _lacking(request: Request, info: EngineInfo) -> list[tuple[str, str]]:
    """Return each ability that the request needs and the engine lacks, as (name, reason)."""
    can, sampling, output = info.capabilities, request.sampling_config, request.output_config
    retention = request.kv_cache_retention_config
    guide, processor = request.guided_decoding_params, request.logits_post_processor_name
    lacking_output = _lacking_output(request, can)
    # Name, whether the request needs it, whether the engine has it, the end of the reason if not.
    needs: list[tuple[str, bool, bool, str]] = [
        ("beam_width", sampling.beam_width > 1, can.max_beam_width > 1, "no beam search"),
        ("num_return_sequences", sampling.num_return_sequences > 1, can.num_return_sequences, "one answer a request"),
        ("typical_p", sampling.typical_p is not None, can.typical_p, "no typical sampling"),
        ("min_p", sampling.min_p is not None, can.min_p, "no min_p sampling"),
        ("seed", sampling.seed is not None, can.seed, "no seeds"),
        (
            "no_repeat_ngram_size",
            sampling.no_repeat_ngram_size is not None,
            can.no_repeat_ngram_size,
            "no rule for n-grams",
        ),
        ("bad_words", bool(request.bad_words), can.bad_words, "no bad words"),
        ("stop_words", bool(request.stop_words), can.stop_words, "no stop words"),
        ("embedding_bias", bool(request.embedding_bias), can.embedding_bias, "no biases"),
        (
            "guided_decoding_params",
            guide is not None,
            guide is not None and guide.guide_type in can.guided_decoding,
            "no such guide",
        ),
        ("priority", request.priority != DEFAULT_PRIORITY, can.priority, "no priorities"),
        ("lora_config", request.lora_config is not None, can.lora, "no adapters"),
        (
            "logits_post_processor_name",
            processor is not None,
            processor in can.logits_post_processors,
            f"{list(can.logits_post_processors)}" if can.logits_post_processors else "no logits post-processors",
        ),
        ("return_log_probs", output.return_log_probs, can.log_probs, "no log-probs"),
        ("num_prompt_log_probs", output.num_prompt_log_probs is not None, can.prompt_log_probs, "none of the prompt"),
        ("return_context_logits", output.return_context_logits, can.context_logits, "no logits to give"),
        ("return_generation_logits", output.return_generation_logits, can.generation_logits, "no logits to give"),
        ("return_perf_metrics", output.return_perf_metrics, can.perf_metrics, "no clock for a request"),
        ("additional_model_outputs", bool(lacking_output), False, lacking_output),
        ("return_encoder_output", output.return_encoder_output, False, "no encoder"),
        ("kv_cache_retention_config", retention is not None, can.kv_cache_retention, "no priorities of its cache"),
        ("prompt_tuning_config", request.prompt_tuning_config is not None, False, "no prompt tuning"),
        (
            "external_draft_tokens_config",
            request.external_draft_tokens_config is not None,
            False,
            "no drafts but its own",
        ),
    ]
    if guide is not None and can.why_no_guides:
        return [("guided_decoding_params", can.why_no_guides)]
    return [
        (name, f"{info.name} has {instead}")
        for name, is_needed, is_there, instead in needs
        if is_needed and not is_there
    ]


def _lacking_output(request: Request, can: Capabilities) -> str:
    """What an engine has instead of an additional output that a request asks for, or ""."""
    declared = {one.name: one for one in can.additional_outputs}
    for asked in request.output_config.additional_model_outputs:
        if asked.name not in declared:
            return f"{list(declared)}" if declared else "no additional outputs"
        if asked.gather_context and not declared[asked.name].gather_context:
            return f"{asked.name} without gather_context"
    return ""
