"""What a request asks for, held against what an engine can do.

One table for every door and every engine. The front end calls it before admission; each Executor calls it again in
`enqueue_request`, so that a library user gets the same answer as a client. Knows nothing of text or HTTP.
"""

from __future__ import annotations

from lmi.errors import InvalidParameter, Unsupported
from lmi.executor import EngineInfo, Request


def check_request(request: Request, info: EngineInfo) -> None:
    """Raise `InvalidParameter` for a value out of this engine's range, `Unsupported` for a lacking ability."""
    _check_lengths(request, info)
    _check_token_ids(request, info)
    for name, reason in _lacking(request, info):
        raise Unsupported(name, reason)


def _check_lengths(request: Request, info: EngineInfo) -> None:
    num_prompt_tokens, limit = len(request.input_token_ids), info.max_sequence_length
    if num_prompt_tokens >= limit:
        raise InvalidParameter(
            "inputs", f"shorter than the model's context of {limit} tokens", f"{num_prompt_tokens} tokens"
        )
    max_top = info.capabilities.max_top_log_probs
    for name in ("num_top_log_probs", "num_prompt_log_probs"):
        num = getattr(request.output_config, name)
        if num is not None and num > max_top:
            raise InvalidParameter(name, f"at most {max_top}", num)


def _check_token_ids(request: Request, info: EngineInfo) -> None:
    groups: list[tuple[str, tuple[int, ...]]] = [
        ("input_token_ids", request.input_token_ids),
        ("end_ids", request.end_ids),
    ]
    groups += [("stop_words", word) for word in request.stop_words]
    groups += [("bad_words", word) for word in request.bad_words]
    groups += [("embedding_bias", tuple(token_id for token_id, _ in request.embedding_bias))]
    for name, ids in groups:
        if ids and not (0 <= min(ids) and max(ids) < info.vocab_size):
            worst = min(ids) if min(ids) < 0 else max(ids)
            raise InvalidParameter(name, f"token ids from 0 to {info.vocab_size - 1}", worst)


def _lacking(request: Request, info: EngineInfo) -> list[tuple[str, str]]:
    """Each thing that the request needs and the engine lacks, as (name, reason)."""
    can, sampling, output = info.capabilities, request.sampling_config, request.output_config
    guide = request.guided_decoding_params
    needs: list[tuple[bool, str, str]] = [
        (sampling.beam_width > 1 and not can.beam_search, "beam_width", "no beam search"),
        (
            sampling.num_return_sequences > 1 and not can.num_return_sequences,
            "num_return_sequences",
            "one sequence for each request",
        ),
        (sampling.typical_p is not None and not can.typical_p, "typical_p", "no typical sampling"),
        (sampling.min_p is not None and not can.min_p, "min_p", "no min_p sampling"),
        (sampling.seed is not None and not can.seed, "seed", "no seeds"),
        (
            sampling.no_repeat_ngram_size is not None and not can.no_repeat_ngram_size,
            "no_repeat_ngram_size",
            "not built",
        ),
        (bool(request.bad_words) and not can.bad_words, "bad_words", "no bad words"),
        (bool(request.stop_words) and not can.stop_words, "stop_words", "no stop words"),
        (bool(request.embedding_bias) and not can.embedding_bias, "embedding_bias", "no biases"),
        (guide is not None and guide.guide_type not in can.guided_decoding, "guided_decoding_params", "no such guide"),
        (request.lora_config is not None and not can.lora, "lora_config", "adapters are off"),
        (
            request.logits_post_processor_name is not None
            and request.logits_post_processor_name not in can.logits_post_processors,
            "logits_post_processor_name",
            "no such processor",
        ),
        (output.return_log_probs and not can.log_probs, "return_log_probs", "no log-probs"),
        (
            output.num_prompt_log_probs is not None and not can.prompt_log_probs,
            "num_prompt_log_probs",
            "no prompt log-probs",
        ),
        (output.return_context_logits and not can.context_logits, "return_context_logits", "no logits"),
        (output.return_generation_logits and not can.generation_logits, "return_generation_logits", "no logits"),
        (
            not set(output.additional_model_outputs) <= set(can.additional_outputs),
            "additional_model_outputs",
            f"this engine has {list(can.additional_outputs)}",
        ),
    ]
    return [
        (name, f"{info.name} offers {reason}" if not reason.startswith("no") else f"{info.name} has {reason}")
        for is_lacking, name, reason in needs
        if is_lacking
    ]
