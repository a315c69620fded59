"""The LMI schema with a rolling batch: `{"inputs": "...", "parameters": {...}, "stream": false}`.

Reading has two steps, because a refused parameter is answered in the format that the client asked for. `read` checks
the body as a whole and chooses the format of the answer. `parse` checks the parameters. A known name is checked even if
it has no effect. As in the reference, unknown names and names without effect in this request are ignored; they are
returned for the log. null and the documented defaults mean "left out". The documentation gives temperature and
penalties no bounds, so their bounds are those of the contract with the engines. Sources of the names: the LMI handlers'
inference API schema (v0.28.0 page), and the parameters of TGI and vLLM that the reference passes on (`top_n_tokens`,
`min_tokens`, `stop` as a list, `cache_salt`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from lmi.apis.base.beams import MAX_BEAMS, OF_A_SEARCH, read_width, without_search
from lmi.apis.base.guides import GUIDED, asked_guide
from lmi.apis.base.parameters import (
    MAX_IGNORED,
    MAX_SEQUENCES,
    MAX_TOP_N_TOKENS,
    Given,
    Parameter,
    check_best_of,
    check_least_tokens,
    check_one_sequence,
    check_stop,
    drop,
    in_parameters,
    needs_ranking,
    read_parameters,
    shared_request,
    unknown,
)
from lmi.apis.base.readers import (
    JSON_SCHEMAS,
    MAX_STOP_SEQUENCES,
    MAX_WORDS,
    Message,
    Parsed,
    adapter,
    boolean,
    cache_salt,
    check_values,
    choice,
    integer,
    is_text,
    number,
    read_object,
    read_text,
    strings,
    takes,
    text,
    token_ids,
)
from lmi.apis.lmi.sampling_defaults import fill_in
from lmi.errors import MalformedRequest, shorten
from lmi.executor import (
    MAX_PENALTY,
    MAX_SEED,
    MAX_TEMPERATURE,
    REPETITION_PENALTIES,
)
from lmi.settings.config import ModelConfig
from lmi.types import AnswerFormat, GenerationRequest, OutputFormat

DEFAULT_MAX_NEW_TOKENS = 30
KNOWN_FIELDS = ("inputs", "parameters", "stream", "adapters")
SAMPLING = ("seed", "temperature", "top_k", "top_p", "min_p", "typical_p")
FORMATS = tuple(format.value for format in OutputFormat)


@dataclass(frozen=True, slots=True, kw_only=True)
class LmiFormat(AnswerFormat):
    """The format of an answer. With `tgi_compat` keys have TGI's names, and a whole answer is a list of one."""

    tgi_compat: bool = False


STOP_SEQUENCES = strings(MAX_STOP_SEQUENCES)


@takes({"anyOf": [{"type": "boolean"}, JSON_SCHEMAS[STOP_SEQUENCES]]})
def _stop(name: str, value: object) -> tuple[str, ...] | bool:
    """Read a list of strings, which clients send, or a boolean, which is documented without a meaning."""
    return value if isinstance(value, bool) else STOP_SEQUENCES(name, value)


PARAMETERS: dict[str, Parameter] = {
    "do_sample": Parameter(boolean, (False,)),
    "max_new_tokens": Parameter(integer(1), (DEFAULT_MAX_NEW_TOKENS,)),
    "seed": Parameter(integer(0, MAX_SEED)),
    "temperature": Parameter(number(0, MAX_TEMPERATURE), (1,)),
    "top_k": Parameter(integer(-1), (-1, 0)),
    "top_p": Parameter(number(0, 1), (1,)),
    "min_p": Parameter(number(0, 1), (0,)),
    "typical_p": Parameter(number(0, 1, low_open=True), (1,)),
    "repetition_penalty": Parameter(number(*REPETITION_PENALTIES), (1,)),
    "presence_penalty": Parameter(number(-MAX_PENALTY, MAX_PENALTY), (0,)),
    "frequency_penalty": Parameter(number(-MAX_PENALTY, MAX_PENALTY), (0,)),
    "min_length": Parameter(integer(0), (0, 1)),
    "min_tokens": Parameter(integer(0), (0,)),
    "ignore_eos_token": Parameter(boolean, (False,)),
    "truncate": Parameter(integer(1)),
    "stop_sequences": Parameter(STOP_SEQUENCES, ((),)),
    "stop": Parameter(_stop, ((), False)),
    "stop_token_ids": Parameter(token_ids(MAX_WORDS), ((),)),
    "bad_sequences": Parameter(strings(MAX_WORDS), ((),)),
    "include_stop_str_in_output": Parameter(boolean, (False,)),
    "skip_special_tokens": Parameter(boolean, (True,)),
    "spaces_between_special_tokens": Parameter(boolean, (True,)),
    "return_full_text": Parameter(boolean, (False,)),
    "details": Parameter(boolean),
    "decoder_input_details": Parameter(boolean, (False,)),
    "logprobs": Parameter(integer(0), (0,)),
    "top_n_tokens": Parameter(integer(0, MAX_TOP_N_TOKENS), (0,)),
    "prompt_logprobs": Parameter(integer(0)),
    "output_formatter": Parameter(choice(FORMATS)),
    "n": Parameter(integer(1, MAX_SEQUENCES), (1,)),
    "best_of": Parameter(integer(1, MAX_SEQUENCES), (1,)),
    "num_beams": Parameter(integer(1, MAX_BEAMS), (1,)),
    **OF_A_SEARCH,
    "no_repeat_ngram_size": Parameter(integer(0), (0,)),
    "logits_post_processor_name": Parameter(text),
    "cache_salt": Parameter(cache_salt),
    **{name: Parameter(read, (None,)) for name, read in GUIDED.items()},
}

UNCHANGED = (
    *("typical_p", "min_p", "seed", "temperature", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("no_repeat_ngram_size", "logits_post_processor_name", "cache_salt"),
)
WIRE_NAMES = {
    "input_token_ids": "inputs",
    "max_tokens": "parameters.max_new_tokens",
    "num_top_log_probs": "parameters.logprobs",
    "num_prompt_log_probs": "parameters.prompt_logprobs",
    "return_log_probs": "parameters.details",
    "stop_words": "parameters.stop_token_ids",
    "end_ids": "parameters.stop_token_ids",
    "bad_words": "parameters.bad_sequences",
    "beam_width": "parameters.num_beams",
    "num_return_sequences": "parameters.n",
    "lora_config": "adapters",
} | {name: f"parameters.{name}" for name in UNCHANGED}
"""This API's names for fields of the engines' contract. An engine's refusal is reported under them."""


def default_format(model: ModelConfig) -> LmiFormat:
    """Return the format of the answer to a body that cannot be read."""
    return LmiFormat(tgi_compat=model.tgi_compat)


def read(
    body: bytes, content_type: str | None, model: ModelConfig, *, accepts_events: bool = False
) -> Message[LmiFormat]:
    """Decode the body, check it as a whole and choose the format of its answer. Raises MalformedRequest.

    With `accepts_events` the answer is server-sent events unless body or settings choose another format. A body of type
    `text/plain` is a prompt. Any other type, or none, is read as JSON: `curl -d` sends a form's type, boto3 sends none.
    """
    if not is_text(content_type):
        check_values(body)
    fields: dict[str, Any] = {"inputs": read_text(body)} if is_text(content_type) else read_object(body)
    _check_fields(fields)
    return Message(fields, _format(fields, model, accepts_events), model.sampling_defaults)


def _check_fields(fields: dict[str, Any]) -> None:
    if "inputs" not in fields:
        raise MalformedRequest("inputs is missing")
    inputs = fields["inputs"]
    if isinstance(inputs, list):
        raise MalformedRequest("inputs must be one string; a list of them needs option.rolling_batch=disable")
    if not isinstance(inputs, str) or not inputs:
        raise MalformedRequest(f"inputs must be a non-empty string, given {shorten(inputs)}")
    if not isinstance(fields.get("parameters"), dict | None):
        raise MalformedRequest(f"parameters must be an object, given {shorten(fields['parameters'])}")
    if not isinstance(fields.get("stream"), bool | None):
        raise MalformedRequest(f"stream must be true or false, given {shorten(fields['stream'])}")


def _format(fields: dict[str, Any], model: ModelConfig, accepts_events: bool) -> LmiFormat:
    """Choose the format: the request's `output_formatter`, else the configured one, else `stream`, else Accept."""
    parameters = fields.get("parameters") or {}
    wanted, details = parameters.get("output_formatter"), parameters.get("details")
    name = wanted if wanted in FORMATS else model.output_formatter
    if name is not None:
        output_format = OutputFormat(name)
    elif not (accepts_events if fields.get("stream") is None else fields["stream"]):
        output_format = OutputFormat.JSON
    else:
        output_format = OutputFormat.SSE if model.tgi_compat or accepts_events else OutputFormat.JSONLINES
    details = model.tgi_compat if details is None else details is True
    return LmiFormat(output_format=output_format, details=details, tgi_compat=model.tgi_compat)


def parse(message: Message[LmiFormat]) -> Parsed[LmiFormat]:
    """Check the parameters and build the request. Raises InvalidParameter or Unsupported."""
    fields, format = message.fields, message.format
    written, ignored = fields.get("parameters") or {}, unknown(fields, KNOWN_FIELDS)
    given = read_parameters(written, PARAMETERS, ignored)
    if given.get("stop") is True:
        drop(given, {"stop": "as true, which names no stop string"}, ignored, in_parameters)
    _check_together(given, is_streamed=format.is_streamed)
    read_width(given, "num_beams", in_parameters)
    given.setdefault("details", format.tgi_compat)
    if message.sampling_defaults is not None and "beam_width" not in given:
        fill_in(given, written, message.sampling_defaults)
    is_greedy = "beam_width" not in given and _is_greedy(given)
    drop(given, _without_effect(given, format, is_greedy), ignored, in_parameters)
    guide, field_names = asked_guide(given, "parameters.")
    request = replace(
        _request(given, format, is_greedy),
        prompt=fields["inputs"],
        guided_decoding=guide,
        adapter=adapter("adapters", fields.get("adapters")),
    )
    format = replace(format, details=given["details"], field_names=field_names)
    return Parsed((request,), format, tuple(ignored[:MAX_IGNORED]))


def _is_greedy(given: Given) -> bool:
    return "do_sample" not in given or given.get("temperature") == 0 or given.get("top_p") == 0


def _check_together(given: Given, *, is_streamed: bool) -> None:
    check_best_of(given, in_parameters)
    max_new_tokens = given.get("max_new_tokens", DEFAULT_MAX_NEW_TOKENS)
    check_least_tokens(given, ("min_length", "min_tokens"), "max_new_tokens", max_new_tokens, in_parameters)
    check_stop(given, "stop_sequences", in_parameters)
    if is_streamed:
        check_one_sequence(given, in_parameters, "num_beams")


def name_of_several(parameters: Given) -> str:
    """Return the name that an error uses for the parameter that asks for several sequences."""
    return in_parameters(next(name for name in ("num_beams", "n", "best_of") if parameters.get(name) not in (None, 1)))


def _without_effect(given: Given, format: LmiFormat, is_greedy: bool) -> dict[str, str]:
    """Return the parameters that this request cannot use, with the reasons."""
    reasons = without_search(given, ("do_sample", *SAMPLING))
    if is_greedy:
        reasons |= dict.fromkeys(SAMPLING, "in greedy decoding")
    if not given["details"]:
        reasons |= dict.fromkeys(("decoder_input_details", "prompt_logprobs"), "without details")
    if not given["details"] and not format.is_streamed:
        reasons |= dict.fromkeys(("logprobs", "top_n_tokens"), "without details or a stream")
    elif "logprobs" in given:
        reasons["top_n_tokens"] = "beside logprobs"
    return reasons


def _request(given: Given, format: LmiFormat, is_greedy: bool) -> GenerationRequest:
    max_new_tokens = given.get("max_new_tokens", DEFAULT_MAX_NEW_TOKENS)
    request = shared_request(given, max_new_tokens=max_new_tokens, is_greedy=is_greedy, is_streaming=format.is_streamed)
    num_prompt_log_probs = given.get("prompt_logprobs", 0 if "decoder_input_details" in given else None)
    return replace(
        request,
        needs_log_probs=given["details"] or format.is_streamed or needs_ranking(request),
        stop_sequences=given.get("stop_sequences", ()) + given.get("stop", ()),
        bad_sequences=given.get("bad_sequences", ()),
        ignore_eos=given.get("ignore_eos_token", False),
        return_full_text=given.get("return_full_text", False),
        prefill_details=num_prompt_log_probs is not None,
        num_top_log_probs=given.get("logprobs", given.get("top_n_tokens")),
        num_prompt_log_probs=num_prompt_log_probs,
    )
