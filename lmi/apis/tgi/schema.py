"""TGI's schema: `{"inputs": "...", "parameters": {...}, "stream": false}` at `/`, `/generate` and `/generate_stream`.

Names, rules and defaults are those of Text Generation Inference 3.3 (its router's request types and validation). Names
that TGI ignores are ignored here too and returned for the log. null always means "left out". As in TGI, each of
temperature, top_k, top_p and typical_p turns sampling on, and stop strings stay in the text. A temperature of 0 means
greedy decoding here, while TGI refuses it. Requests without `parameters` are greedy too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from lmi.apis.base.guides import tgi_grammar
from lmi.apis.base.parameters import (
    MAX_IGNORED,
    MAX_SEQUENCES,
    MAX_TOP_N_TOKENS,
    ONE_SEQUENCE_STREAMED,
    Given,
    Parameter,
    drop,
    in_parameters,
    needs_ranking,
    read_parameters,
    shared_request,
    unknown,
)
from lmi.apis.base.readers import (
    MAX_STOP_SEQUENCES,
    Message,
    Parsed,
    boolean,
    check_values,
    integer,
    number,
    read_object,
    strings,
    text,
)
from lmi.errors import InvalidParameter, MalformedRequest, Unsupported, shorten
from lmi.executor import (
    MAX_PENALTY,
    MAX_SEED,
    MAX_TEMPERATURE,
    REPETITION_PENALTIES,
)
from lmi.settings.config import ModelConfig
from lmi.types import AnswerFormat, GenerationRequest, OutputFormat

DEFAULT_MAX_NEW_TOKENS = 1024  # as in TGI's API description; the context may have room for fewer
KNOWN_FIELDS = ("inputs", "parameters", "stream")
SAMPLING = ("temperature", "top_k", "top_p", "typical_p")  # each of them asks for sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class TgiFormat(AnswerFormat):
    """The format of an answer. With `is_list` a whole answer is a list of one, as at `/`."""

    is_list: bool = False


PARAMETERS: dict[str, Parameter] = {
    "do_sample": Parameter(boolean, (False,)),
    "max_new_tokens": Parameter(integer(1)),
    "temperature": Parameter(number(0, MAX_TEMPERATURE), (1,)),
    "top_k": Parameter(integer(1)),
    "top_p": Parameter(number(0, 1, low_open=True), (1,)),
    "typical_p": Parameter(number(0, 1, low_open=True), (1,)),
    "seed": Parameter(integer(0, MAX_SEED)),
    "repetition_penalty": Parameter(number(*REPETITION_PENALTIES), (1,)),
    "frequency_penalty": Parameter(number(-MAX_PENALTY, MAX_PENALTY), (0,)),
    "stop": Parameter(strings(MAX_STOP_SEQUENCES), ((),)),
    "truncate": Parameter(integer(1)),
    "return_full_text": Parameter(boolean, (False,)),
    "details": Parameter(boolean, (False,)),
    "decoder_input_details": Parameter(boolean, (False,)),
    "top_n_tokens": Parameter(integer(0, MAX_TOP_N_TOKENS), (0,)),
    "best_of": Parameter(integer(1, MAX_SEQUENCES), (1,)),
    "grammar": Parameter(tgi_grammar),
    "watermark": Parameter(boolean, (False,)),
    "adapter_id": Parameter(text, ("",)),
}
NOT_HERE = {"watermark": "no engine here marks its text"}
NOT_STREAMED = {
    "best_of": ONE_SEQUENCE_STREAMED,
    "decoder_input_details": "the prompt's tokens come only in an answer that is not streamed",
}

WIRE_NAMES = {
    "input_token_ids": "inputs",
    "max_tokens": "parameters.max_new_tokens",
    "num_top_log_probs": "parameters.top_n_tokens",
    "num_prompt_log_probs": "parameters.decoder_input_details",
    "return_log_probs": "parameters.details",
    "num_return_sequences": "parameters.best_of",
    "guided_decoding_params": "parameters.grammar",
    "lora_config": "parameters.adapter_id",
} | {name: f"parameters.{name}" for name in ("typical_p", "seed", "temperature")}
"""This API's names for fields of the engines' contract. An engine's refusal is reported under them."""


def default_format(model: ModelConfig) -> TgiFormat:
    """Return the format of the answer to a body that cannot be read."""
    return TgiFormat()


def read(
    body: bytes, content_type: str | None, model: ModelConfig, *, stream: bool | None = None
) -> Message[TgiFormat]:
    """Decode a body of any content type and check it as a whole. Raises MalformedRequest.

    With `stream` None the body says whether the answer is streamed, and a whole answer is a list.
    """
    check_values(body)
    fields = read_object(body)
    _check_fields(fields, has_stream=stream is None)
    is_streaming = fields.get("stream") if stream is None else stream
    output_format = OutputFormat.SSE if is_streaming else OutputFormat.JSON
    return Message(fields, TgiFormat(output_format=output_format, is_list=stream is None))


def _check_fields(fields: dict[str, Any], *, has_stream: bool) -> None:
    inputs, parameters = fields.get("inputs"), fields.get("parameters")
    if not isinstance(inputs, str) or not inputs:
        given = f", given {shorten(inputs)}" if "inputs" in fields else ""
        raise MalformedRequest(f"inputs must be a non-empty string{given}")
    if not isinstance(parameters, dict | None):
        raise MalformedRequest(f"parameters must be an object, given {shorten(parameters)}")
    if has_stream and not isinstance(fields.get("stream"), bool | None):
        raise MalformedRequest(f"stream must be true or false, given {shorten(fields['stream'])}")


def parse(message: Message[TgiFormat]) -> Parsed[TgiFormat]:
    """Check the parameters and build the request. Raises InvalidParameter or Unsupported."""
    fields, format = message.fields, message.format
    ignored = unknown(fields, KNOWN_FIELDS)
    given = read_parameters(fields.get("parameters") or {}, PARAMETERS, ignored)
    is_greedy = _is_greedy(fields.get("parameters") or {}, given)
    format = replace(format, details="details" in given or "decoder_input_details" in given)
    _check_together(given, is_streamed=format.is_streamed, is_greedy=is_greedy)
    drop(given, _without_effect(format, is_greedy), ignored, in_parameters)
    request = replace(_request(given, format, is_greedy), prompt=fields["inputs"])
    return Parsed((request,), format, tuple(ignored[:MAX_IGNORED]))


def _is_greedy(fields: dict[str, Any], given: dict[str, Any]) -> bool:
    """Whether decoding is greedy. As in TGI, a value without effect (temperature 1) samples only beside best_of."""
    is_sampling = bool(given.keys() & {"do_sample", *SAMPLING})
    if "best_of" in given:
        is_sampling = is_sampling or any(fields.get(name) is not None for name in SAMPLING)
    return given.get("temperature") == 0 or not is_sampling


def _check_together(given: Given, *, is_streamed: bool, is_greedy: bool) -> None:
    for name, reason in (NOT_HERE | (NOT_STREAMED if is_streamed else {})).items():
        if name in given:
            raise Unsupported(in_parameters(name), reason)
    if "best_of" in given and is_greedy:
        raise InvalidParameter(in_parameters("best_of"), "1 without sampling", given["best_of"])
    if "best_of" in given and "seed" in given:
        raise InvalidParameter(in_parameters("seed"), "left out with best_of", given["seed"])


def _without_effect(format: TgiFormat, is_greedy: bool) -> dict[str, str]:
    """Return the parameters that this request cannot use, with the reasons."""
    reasons = dict.fromkeys(("seed", *SAMPLING), "in greedy decoding") if is_greedy else {}
    if not format.is_streamed and not format.details:
        reasons["top_n_tokens"] = "without details or a stream"
    return reasons


def _request(given: Given, format: TgiFormat, is_greedy: bool) -> GenerationRequest:
    max_new_tokens = given.get("max_new_tokens", DEFAULT_MAX_NEW_TOKENS)
    request = shared_request(given, max_new_tokens=max_new_tokens, is_greedy=is_greedy, is_streaming=format.is_streamed)
    has_prefill = "decoder_input_details" in given
    return replace(
        request,
        stop_sequences=given.get("stop", ()),
        include_stop_str_in_output=True,
        return_full_text="return_full_text" in given,
        prefill_details=has_prefill,
        num_prompt_log_probs=0 if has_prefill else None,
        num_top_log_probs=given.get("top_n_tokens"),
        needs_log_probs=format.details or format.is_streamed or needs_ranking(request),
        guided_decoding=given.get("grammar"),
        adapter=given.get("adapter_id"),
    )
