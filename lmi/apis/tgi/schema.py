"""The request of TGI's API: names, rules and defaults of Text Generation Inference 3.3.

Each of temperature, top_k, top_p and typical_p turns sampling on, and stop strings stay in the
text. A temperature of 0 means greedy decoding here, while TGI refuses it.
"""

import secrets
from typing import Any

from msgspec.structs import replace

from lmi.apis.base import parameters, readers
from lmi.apis.base.body import Message, Parsed, check_types, check_values, read_object
from lmi.apis.base.parameters import (
    ROWS,
    Parameter,
    ParameterTable,
    ParameterValues,
    in_parameters,
    rows,
)
from lmi.apis.base.readers import boolean, integer, number
from lmi.apis.guides.fields import CONTRACT_NAME, HELP, tgi_grammar
from lmi.errors import InvalidParameter, MalformedRequest, Unsupported, shorten
from lmi.settings.config import ModelConfig
from lmi.types import AnswerFormat, OutputFormat

# A client in JavaScript can send such a number again.
DRAWN_SEED_BITS = 53
# The default of TGI's API description. The context may have room for fewer.
DEFAULT_MAX_NEW_TOKENS = 1024
KNOWN_FIELDS = ("inputs", "parameters", "stream", "adapters")
# Each of these asks for sampling.
SAMPLING = ("temperature", "top_k", "top_p", "typical_p")


class TgiFormat(AnswerFormat, frozen=True, kw_only=True):
    """The format of an answer. With `is_list` a whole answer is a list of one, as at `/`."""

    is_list: bool = False


PARAMETERS = ParameterTable(
    rows(
        "do_sample",
        "max_new_tokens",
        "temperature",
        "typical_p",
        "seed",
        "repetition_penalty",
        "frequency_penalty",
        "truncate",
        "truncation_side",
        "return_full_text",
        "details",
        "decoder_input_details",
        "best_of",
        stop="stop_sequences",
        adapter_id="adapter",
    )
    | {
        "top_k": replace(ROWS["top_k"], read=integer(1)),
        "top_p": replace(ROWS["top_p"], read=number(0, 1, low_open=True)),
        "top_n_tokens": replace(
            ROWS["num_top_log_probs"], read=integer(0, parameters.MAX_TOP_N_TOKENS)
        ),
        "grammar": Parameter("guided_decoding", tgi_grammar, HELP, fields=(CONTRACT_NAME,)),
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
    """With `stream` None the body says whether the answer is streamed, and a whole answer is a
    list.
    """
    check_values(body)
    fields = read_object(body)
    inputs = fields.get("inputs")
    if not isinstance(inputs, str) or not inputs:
        fault = f", given {shorten(inputs)}" if "inputs" in fields else ""
        raise MalformedRequest(f"inputs must be a non-empty string{fault}")

    check_types(fields, has_stream=stream is None)
    is_streaming = fields.get("stream") if stream is None else stream
    output_format = OutputFormat.SSE if is_streaming else OutputFormat.JSON
    return Message(fields, TgiFormat(output_format=output_format, is_list=stream is None))


def parse(message: Message[TgiFormat]) -> Parsed[TgiFormat]:
    """Check the parameters, and return the request with its format."""
    fields = message.fields
    format = message.format
    parameter_fields = fields.get("parameters") or {}
    ignored = parameters.unknown(fields, KNOWN_FIELDS)
    values: dict[str, Any] = {"max_new_tokens": DEFAULT_MAX_NEW_TOKENS}
    values |= PARAMETERS.read(parameter_fields, ignored)

    # LMI's own field counts before `adapter_id`.
    adapter = readers.adapter("adapters", fields.get("adapters"))
    if adapter is not None:
        values["adapter"] = adapter

    is_greedy = _is_greedy(parameter_fields, values)
    has_prefill = "decoder_input_details" in values
    format = replace(format, details=values.get("details", False) or has_prefill)
    _check_together(values, is_streamed=format.is_streamed, is_greedy=is_greedy)

    reasons = PARAMETERS.without_effect(values, is_greedy=is_greedy)
    if not format.is_streamed and not format.details:
        reasons["num_top_log_probs"] = "without details or a stream"

    PARAMETERS.drop(values, reasons, ignored)

    # The details of an answer have its seed, so it is drawn here.
    if format.details and not is_greedy:
        values.setdefault("seed", secrets.randbits(DRAWN_SEED_BITS))

    needs_ranking = parameters.needs_ranking(values)
    request = parameters.request_of(
        values,
        is_greedy=is_greedy,
        is_streaming=format.is_streamed,
        prompt=fields["inputs"],
        needs_full_room=parameter_fields.get("max_new_tokens") is not None,
        include_stop_str_in_output=True,
        num_prompt_log_probs=0 if has_prefill else None,
        needs_log_probs=format.details or format.is_streamed or needs_ranking,
    )
    return Parsed((request,), format, ignored)


def _is_greedy(fields: dict[str, Any], values: dict[str, Any]) -> bool:
    """Whether decoding is greedy. As in TGI, a parameter of sampling whose value has no effect, as
    temperature 1, makes it sample only beside best_of.
    """
    if values.get("temperature") == 0:
        return True

    if values.keys() & {"do_sample", *SAMPLING}:
        return False

    is_any_given = any(fields.get(name) is not None for name in SAMPLING)
    return not ("best_of" in values and is_any_given)


def _check_together(values: ParameterValues, *, is_streamed: bool, is_greedy: bool) -> None:
    refusals = NOT_HERE | NOT_STREAMED if is_streamed else NOT_HERE
    for name, reason in refusals.items():
        if name in values:
            raise Unsupported(in_parameters(name), reason)

    if "best_of" not in values:
        return

    if is_greedy:
        rule = "1 without sampling"
        raise InvalidParameter(in_parameters("best_of"), rule, values["best_of"])

    if "seed" in values:
        rule = "left out with best_of"
        raise InvalidParameter(in_parameters("seed"), rule, values["seed"])
