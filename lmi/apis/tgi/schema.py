"""TGI's schema: `{"inputs": "...", "parameters": {...}, "stream": false}` at `/`, `/generate` and `/generate_stream`.

Names, rules and defaults are those of Text Generation Inference 3.3 (its router's request types and validation). Each
of temperature, top_k, top_p and typical_p turns sampling on, and stop strings stay in the text. A temperature of 0
means greedy decoding here, while TGI refuses it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from lmi.apis.base import parameters
from lmi.apis.base.guides import tgi_grammar
from lmi.apis.base.parameters import ROWS, Given, Parameter, ParameterTable, in_parameters, rows
from lmi.apis.base.readers import Message, Parsed, boolean, check_types, check_values, integer, number, read_object
from lmi.errors import InvalidParameter, MalformedRequest, Unsupported, shorten
from lmi.settings.config import ModelConfig
from lmi.types import AnswerFormat, OutputFormat

DEFAULT_MAX_NEW_TOKENS = 1024  # as in TGI's API description; the context may have room for fewer
KNOWN_FIELDS = ("inputs", "parameters", "stream")
SAMPLING = ("temperature", "top_k", "top_p", "typical_p")  # each of them asks for sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class TgiFormat(AnswerFormat):
    """The format of an answer. With `is_list` a whole answer is a list of one, as at `/`."""

    is_list: bool = False


PARAMETERS = ParameterTable(
    rows(
        "do_sample max_new_tokens temperature typical_p seed repetition_penalty frequency_penalty truncate "
        "return_full_text details decoder_input_details best_of",
        stop="stop_sequences",
        adapter_id="adapter",
    )
    | {
        "top_k": replace(ROWS["top_k"], read=integer(1)),
        "top_p": replace(ROWS["top_p"], read=number(0, 1, low_open=True)),
        "top_n_tokens": replace(ROWS["num_top_log_probs"], read=integer(0, parameters.MAX_TOP_N_TOKENS)),
        "grammar": Parameter(
            "guided_decoding",
            tgi_grammar,
            "The structure that the answer must have.",
            fields=("guided_decoding_params",),
        ),
        "watermark": Parameter("watermark", boolean, "No effect.", (False,)),
    },
    in_parameters,
)
NOT_HERE = {"watermark": "no engine here marks its text"}
NOT_STREAMED = {
    "best_of": parameters.ONE_SEQUENCE_STREAMED,
    "decoder_input_details": "the prompt's tokens come only in an answer that is not streamed",
}


def read(
    body: bytes, content_type: str | None, model: ModelConfig, *, stream: bool | None = None
) -> Message[TgiFormat]:
    """Decode a body of any content type and check it as a whole. Raises MalformedRequest.

    With `stream` None the body says whether the answer is streamed, and a whole answer is a list.
    """
    check_values(body)
    fields = read_object(body)
    inputs = fields.get("inputs")
    if not isinstance(inputs, str) or not inputs:
        given = f", given {shorten(inputs)}" if "inputs" in fields else ""
        raise MalformedRequest(f"inputs must be a non-empty string{given}")
    check_types(fields, has_stream=stream is None)
    is_streaming = fields.get("stream") if stream is None else stream
    output_format = OutputFormat.SSE if is_streaming else OutputFormat.JSON
    return Message(fields, TgiFormat(output_format=output_format, is_list=stream is None))


def parse(message: Message[TgiFormat]) -> Parsed[TgiFormat]:
    """Check the parameters and build the request. Raises InvalidParameter or Unsupported."""
    fields, format = message.fields, message.format
    written, ignored = fields.get("parameters") or {}, parameters.unknown(fields, KNOWN_FIELDS)
    given = {"max_new_tokens": DEFAULT_MAX_NEW_TOKENS} | PARAMETERS.read(written, ignored)
    is_greedy, has_prefill = _is_greedy(written, given), "decoder_input_details" in given
    format = replace(format, details=given.get("details", False) or has_prefill)
    _check_together(given, is_streamed=format.is_streamed, is_greedy=is_greedy)
    reasons = PARAMETERS.without_effect(given, is_greedy=is_greedy)
    if not format.is_streamed and not format.details:
        reasons["num_top_log_probs"] = "without details or a stream"
    PARAMETERS.drop(given, reasons, ignored)
    request = parameters.request_of(
        given,
        is_greedy=is_greedy,
        is_streaming=format.is_streamed,
        prompt=fields["inputs"],
        include_stop_str_in_output=True,
        num_prompt_log_probs=0 if has_prefill else None,
        needs_log_probs=format.details or format.is_streamed or parameters.needs_ranking(given),
    )
    return Parsed((request,), format, ignored)


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
