"""The request of the LMI API: `{"inputs": "...", "parameters": {...}, "stream": false}`.

As in the reference, names that are unknown or without effect are ignored, and null and the
documented defaults mean "left out". Sources: the LMI handlers' inference API schema (v0.28.0), and
what the reference passes on to TGI and vLLM.
"""

from typing import Any

from msgspec.structs import replace

from lmi.apis.base import parameters, readers
from lmi.apis.base.body import Message, Parsed, check_types, read_inputs
from lmi.apis.base.parameters import (
    ROWS,
    Parameter,
    ParameterTable,
    ParameterValues,
    in_parameters,
    named,
    rows,
)
from lmi.apis.base.readers import takes
from lmi.apis.guides.fields import GUIDED, asked_guide
from lmi.apis.lmi.sampling_defaults import fill_in
from lmi.errors import MalformedRequest, shorten
from lmi.settings.config import ModelConfig
from lmi.types import AnswerFormat, OutputFormat

DEFAULT_MAX_NEW_TOKENS = 30
KNOWN_FIELDS = ("inputs", "parameters", "stream", "adapters")
FORMATS = tuple(OutputFormat)
read_stop_sequences = ROWS["stop_sequences"].read


class LmiFormat(AnswerFormat, frozen=True, kw_only=True):
    """The format of an answer.

    With `tgi_compat` keys have TGI's names, the special flag is never left out, and a whole answer
    is a list of one.
    """

    tgi_compat: bool = False


@takes({"anyOf": [{"type": "boolean"}, readers.json_schema_of(read_stop_sequences)]})
def read_stop(name: str, value: object) -> tuple[str, ...] | bool:
    """Read a list of strings, which clients send, or a boolean, which is documented without a
    meaning.
    """
    return value if isinstance(value, bool) else read_stop_sequences(name, value)


PARAMETERS = ParameterTable(
    rows(
        "do_sample",
        "max_new_tokens",
        "seed",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "typical_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "min_tokens",
        "truncate",
        "truncation_side",
        "stop_sequences",
        "stop_token_ids",
        "bad_sequences",
        "include_stop_str_in_output",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "return_full_text",
        "details",
        "n",
        "best_of",
        "length_penalty",
        "early_stopping",
        "no_repeat_ngram_size",
        "logits_post_processor_name",
        "cache_salt",
    )
    | GUIDED
    # The order counts: an engine's refusal names the first parameter that fills the field.
    | rows(
        num_beams="beam_width",
        ignore_eos_token="ignore_eos",
        prompt_logprobs="num_prompt_log_probs",
    )
    | rows("decoder_input_details", logprobs="num_top_log_probs")
    | rows("top_n_tokens")
    | named(
        Parameter("min_length", readers.integer(0), ROWS["min_tokens"].help, (0, 1)),
        Parameter("stop", read_stop, "Texts that end the answer.", ((), False)),
        Parameter("output_formatter", readers.choice(FORMATS), "The form of the answer."),
    ),
    in_parameters,
)
WIRE_NAMES = PARAMETERS.wire_names(input_token_ids="inputs", lora_config="adapters")


def read(
    body: bytes, content_type: str | None, model: ModelConfig, *, accepts_events: bool = False
) -> Message[LmiFormat]:
    """Choose the format of the answer first, since a refused parameter is answered in it.

    With `accepts_events` the answer is server-sent events unless body or settings choose another
    format. A body of type `text/plain` is a prompt. Any other type, or none, is read as JSON: `curl
    -d` sends a form's type, boto3 sends none.
    """
    fields = read_inputs(body, content_type)
    if "inputs" not in fields:
        raise MalformedRequest("inputs is missing")

    inputs = fields["inputs"]
    if isinstance(inputs, list):
        raise MalformedRequest(
            "inputs must be one string; a list of them needs option.rolling_batch=disable"
        )

    if not isinstance(inputs, str) or not inputs:
        raise MalformedRequest(f"inputs must be a non-empty string, given {shorten(inputs)}")

    check_types(fields)
    return Message(fields, _format(fields, model, accepts_events), model.sampling_defaults)


def _format(fields: dict[str, Any], model: ModelConfig, accepts_events: bool) -> LmiFormat:
    """Return the format of the answer, which a field of `parameters` may ask to hold details."""
    parameter_fields = fields.get("parameters") or {}
    details = parameter_fields.get("details")
    if details is None:
        has_details = model.tgi_compat
    else:
        has_details = details is True

    return LmiFormat(
        output_format=_output_format(fields, model, accepts_events),
        details=has_details,
        tgi_compat=model.tgi_compat,
    )


def _output_format(
    fields: dict[str, Any], model: ModelConfig, accepts_events: bool
) -> OutputFormat:
    """Choose the format: the request's `output_formatter`, else the configured one, else `stream`,
    else Accept.
    """
    parameter_fields = fields.get("parameters") or {}
    name = parameter_fields.get("output_formatter")
    if name not in FORMATS:
        name = model.output_formatter

    if name is not None:
        return OutputFormat(name)

    is_streaming = fields.get("stream")
    if is_streaming is None:
        is_streaming = accepts_events

    if not is_streaming:
        return OutputFormat.JSON

    if model.tgi_compat or accepts_events:
        return OutputFormat.SSE

    return OutputFormat.JSONLINES


def parse(message: Message[LmiFormat]) -> Parsed[LmiFormat]:
    """Check the parameters, and return the request with its format."""
    fields = message.fields
    format = message.format
    parameter_fields = fields.get("parameters") or {}
    ignored = parameters.unknown(fields, KNOWN_FIELDS)
    values = _read_values(message, parameter_fields, ignored)

    has_no_choice = values.get("temperature") == 0 or values.get("top_p") == 0
    is_sampling = "do_sample" in values and not has_no_choice
    is_greedy = "beam_width" not in values and not is_sampling
    reasons = PARAMETERS.without_effect(values, is_greedy=is_greedy)
    reasons |= _without_details(values, format)
    PARAMETERS.drop(values, reasons, ignored)

    num_prompt_log_probs = values.get("num_prompt_log_probs")
    if num_prompt_log_probs is None and "decoder_input_details" in values:
        num_prompt_log_probs = 0

    guide = asked_guide(values, "parameters.")
    needs_ranking = parameters.needs_ranking(values)
    request = parameters.request_of(
        {"num_top_log_probs": values.get("top_n_tokens")} | values,
        is_greedy=is_greedy,
        is_streaming=format.is_streamed,
        prompt=fields["inputs"],
        num_prompt_log_probs=num_prompt_log_probs,
        needs_log_probs=values["details"] or format.is_streamed or needs_ranking,
        guided_decoding=guide.params,
        adapter=readers.adapter("adapters", fields.get("adapters")),
    )

    format = replace(format, details=values["details"], field_names=guide.field_names)
    return Parsed((request,), format, ignored)


def _read_values(
    message: Message[LmiFormat], parameter_fields: dict[str, Any], ignored: list[str]
) -> dict[str, Any]:
    """Return the values of the parameters, with the defaults of the API and of the engine. Raises
    InvalidParameter or Unsupported.
    """
    values: dict[str, Any] = {
        "max_new_tokens": DEFAULT_MAX_NEW_TOKENS,
        "details": message.format.tgi_compat,
    }
    values |= PARAMETERS.read(parameter_fields, ignored)
    if values.get("stop") is True:
        PARAMETERS.drop(values, {"stop": "as true, which names no stop string"}, ignored)

    PARAMETERS.check_together(values, is_streamed=message.format.is_streamed)
    PARAMETERS.read_search(values)
    if message.sampling_defaults is not None and "beam_width" not in values:
        fill_in(values, parameter_fields, message.sampling_defaults)

    return values


def name_of_several(fields: ParameterValues) -> str:
    """Return the name that an error uses for the parameter that asks for several sequences."""
    names = ("num_beams", "n", "best_of")
    return in_parameters(next(name for name in names if fields.get(name) not in (None, 1)))


def _without_details(values: ParameterValues, format: LmiFormat) -> dict[str, str]:
    """Return the parameters that this form of the answer has no place for, with the reasons."""
    reasons = dict[str, str]()
    if not values["details"]:
        names_in_details = ("decoder_input_details", "num_prompt_log_probs")
        reasons |= dict.fromkeys(names_in_details, "without details")

    if not values["details"] and not format.is_streamed:
        names_of_tops = ("num_top_log_probs", "top_n_tokens")
        reasons |= dict.fromkeys(names_of_tops, "without details or a stream")
    elif "num_top_log_probs" in values:
        reasons["top_n_tokens"] = "beside logprobs"

    return reasons
