"""The LMI schema with a rolling batch: `{"inputs": "...", "parameters": {...}, "stream": false}`.

Two steps, because a refused parameter is answered in the framing that the client asked for: `read` checks the body as
a whole and settles the form of the answer, `parse` checks the parameters. A known name is checked even where it has
no effect; unknown names and names without effect in this request are tolerated and come back for the log, as the
reference ignores them; null is as if left out. Its documented defaults mean "as if left out". The pages give
temperature and penalties no bounds; ours are those of the contract with the engines. Names: the LMI handlers' inference
API schema (v0.28.0 page), and of TGI and vLLM what the reference hands on (`top_n_tokens`, `min_tokens`, `stop` as a
list).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lmi.errors import InvalidParameter, MalformedRequest, Unsupported, shorten
from lmi.executor import (
    MAX_PENALTY,
    MAX_SEED,
    MAX_TEMPERATURE,
    REPETITION_PENALTIES,
    GuidedDecodingParams,
    SamplingConfig,
)
from lmi.schemas.common import (
    JSON_SCHEMAS,
    MAX_STOP_SEQUENCES,
    MAX_WORDS,
    Message,
    Parsed,
    Reader,
    adapter,
    boolean,
    check_values,
    choice,
    integer,
    number,
    read_object,
    read_text,
    strings,
    takes,
    token_ids,
)
from lmi.schemas.guides import GUIDED, asked_guide
from lmi.settings.config import ModelConfig
from lmi.types import Frame, GenerationRequest, OutputFormat

DEFAULT_MAX_NEW_TOKENS = 30
MAX_TOLERATED = 32  # lines for the log of one request
MAX_SEQUENCES = 16  # of one request
MAX_TOP_N_TOKENS = 20  # what engines offer; more, where one does, goes by the name of logprobs
KNOWN_FIELDS = ("inputs", "parameters", "stream", "adapters")
SAMPLING = ("seed", "temperature", "top_k", "top_p", "min_p", "typical_p")
FORMATS = tuple(format.value for format in OutputFormat)


@dataclass(frozen=True, slots=True)
class Parameter:
    """How a parameter is read, and which of its values mean the same as leaving it out."""

    read: Reader
    off: tuple[object, ...] = ()


STOP_SEQUENCES = strings(MAX_STOP_SEQUENCES)


@takes({"anyOf": [{"type": "boolean"}, JSON_SCHEMAS[STOP_SEQUENCES]]})
def _stop(name: str, value: object) -> tuple[str, ...]:
    """The seed's table calls `stop` a boolean of no stated meaning, its clients send a list of strings."""
    return () if isinstance(value, bool) else STOP_SEQUENCES(name, value)


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
    "stop": Parameter(_stop, ((),)),
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
    "num_beams": Parameter(integer(1, MAX_SEQUENCES), (1,)),
    "length_penalty": Parameter(number(), (1,)),
    "early_stopping": Parameter(boolean, (False,)),
    **{name: Parameter(read, (None,)) for name, read in GUIDED.items()},
}

WIRE_NAMES = {
    "input_token_ids": "inputs",
    "max_tokens": "parameters.max_new_tokens",
    "num_top_log_probs": "parameters.logprobs",
    "num_prompt_log_probs": "parameters.prompt_logprobs",
    "return_log_probs": "parameters.details",
    "stop_words": "parameters.stop_token_ids",
    "bad_words": "parameters.bad_sequences",
    "beam_width": "parameters.num_beams",
    "num_return_sequences": "parameters.n",
    "lora_config": "adapters",
} | {name: f"parameters.{name}" for name in ("typical_p", "min_p", "seed", "temperature")}
"""The contract's words for what a client of this door calls otherwise; used where an engine's refusal is told."""


def default_frame(model: ModelConfig) -> Frame:
    """The form of an answer to a body that cannot be read."""
    return Frame(tgi_compat=model.tgi_compat)


def read(body: bytes, content_type: str | None, model: ModelConfig, *, accepts_events: bool = False) -> Message:
    """The body as a whole. Raises MalformedRequest.

    `accepts_events`: the client asks for server-sent events, if nothing else says in which form it is answered.
    `text/plain` is a prompt. Every other content type, or none, is read as JSON: a bare `curl -d` says form-encoded,
    boto3 says nothing.
    """
    is_text = content_type is not None and content_type.strip().lower().startswith("text/plain")
    if not is_text:
        check_values(body)
    fields: dict[str, Any] = {"inputs": read_text(body)} if is_text else read_object(body)
    _check_fields(fields)
    return Message(fields, _frame(fields, model, accepts_events))


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


def _frame(fields: dict[str, Any], model: ModelConfig, accepts_events: bool) -> Frame:
    """The request's own `output_formatter` beats the configured one, which beats `stream`, which beats Accept."""
    wanted = (fields.get("parameters") or {}).get("output_formatter")
    name = wanted if wanted in FORMATS else model.output_formatter
    if name is not None:
        output_format = OutputFormat(name)
    elif not (accepts_events if fields.get("stream") is None else fields["stream"]):
        output_format = OutputFormat.JSON
    else:
        output_format = OutputFormat.SSE if model.tgi_compat or accepts_events else OutputFormat.JSONLINES
    return Frame(output_format=output_format, tgi_compat=model.tgi_compat)


def parse(message: Message) -> Parsed:
    """The request that the message asks for. Raises InvalidParameter or Unsupported."""
    fields, frame = message.fields, message.frame
    tolerated = unknown(fields, KNOWN_FIELDS)
    given = read_parameters(fields.get("parameters") or {}, PARAMETERS, tolerated)
    _check_together(given)
    for name in ("n", "best_of"):
        if name in given and frame.output_format is not OutputFormat.JSON:
            raise Unsupported(f"parameters.{name}", "several sequences come only in an answer that is not streamed")
    given.setdefault("details", frame.tgi_compat)
    is_greedy = "do_sample" not in given or given.get("temperature") == 0 or given.get("top_p") == 0
    for name, reason in _without_effect(given, frame, is_greedy):
        del given[name]
        tolerated.append(f"parameters.{name}: no effect {reason}")
    guide, field_names = asked_guide(given, "parameters.")
    request = _request(fields["inputs"], given, guide, frame, is_greedy)
    request = replace(request, adapter=adapter("adapters", fields.get("adapters")))
    return Parsed((request,), tuple(tolerated[:MAX_TOLERATED]), field_names=field_names)


def unknown(fields: dict[str, Any], known: Collection[str]) -> list[str]:
    """A line on each field that nobody knows."""
    return [f"{shorten(name)}: unknown" for name, value in fields.items() if name not in known and value is not None]


def read_parameters(parameters: dict[str, Any], table: Mapping[str, Parameter], tolerated: list[str]) -> dict[str, Any]:
    """The known parameters that mean something, checked."""
    given: dict[str, Any] = {}
    for name, value in parameters.items():
        parameter = table.get(name)
        if value is None:
            continue  # as if left out, which clients write for every name they know
        if parameter is None:
            tolerated.append(f"parameters.{shorten(name)}: unknown")
        elif (checked := parameter.read(f"parameters.{name}", value)) not in parameter.off:
            given[name] = checked
    return given


def _check_together(given: dict[str, Any]) -> None:
    if "num_beams" in given:
        raise Unsupported("parameters.num_beams", "no engine here searches with beams yet")
    if given.get("best_of", MAX_SEQUENCES) < given.get("n", 1):
        raise InvalidParameter("parameters.best_of", f"at least n ({given['n']})", given["best_of"])
    max_new_tokens = given.get("max_new_tokens", DEFAULT_MAX_NEW_TOKENS)
    for name in ("min_length", "min_tokens"):
        if given.get(name, 0) > max_new_tokens:
            raise InvalidParameter(f"parameters.{name}", f"at most max_new_tokens ({max_new_tokens})", given[name])
    if len(given.get("stop_sequences", ())) + len(given.get("stop", ())) > MAX_STOP_SEQUENCES:
        raise InvalidParameter("parameters.stop", f"at most {MAX_STOP_SEQUENCES} with stop_sequences", given["stop"])


def _without_effect(given: dict[str, Any], frame: Frame, is_greedy: bool) -> list[tuple[str, str]]:
    """The given names that this request cannot use, and why. They are forgotten, so that no engine refuses them."""
    reasons = dict.fromkeys(("length_penalty", "early_stopping"), "without beams")
    if is_greedy:
        reasons |= dict.fromkeys(SAMPLING, "in greedy decoding")
    if not given["details"]:
        reasons |= dict.fromkeys(("decoder_input_details", "prompt_logprobs"), "without details")
    if not given["details"] and frame.output_format is OutputFormat.JSON:
        reasons |= dict.fromkeys(("logprobs", "top_n_tokens"), "without details or a stream")
    elif "logprobs" in given:
        reasons["top_n_tokens"] = "beside logprobs"
    return [(name, reason) for name, reason in reasons.items() if name in given]


def _sampling(given: dict[str, Any], is_greedy: bool) -> SamplingConfig:
    return SamplingConfig(
        num_return_sequences=max(given.get("n", 1), given.get("best_of", 1)),
        temperature=0.0 if is_greedy else given.get("temperature"),
        top_k=given.get("top_k"),
        top_p=given.get("top_p"),
        min_p=given.get("min_p"),
        typical_p=given.get("typical_p"),
        seed=given.get("seed"),
        min_tokens=max(given.get("min_length", 0), given.get("min_tokens", 0)) or None,
        repetition_penalty=given.get("repetition_penalty"),
        presence_penalty=given.get("presence_penalty"),
        frequency_penalty=given.get("frequency_penalty"),
    )


def _request(
    prompt: str, given: dict[str, Any], guide: GuidedDecodingParams | None, frame: Frame, is_greedy: bool
) -> GenerationRequest:
    sampling, is_streaming = _sampling(given, is_greedy), frame.output_format is not OutputFormat.JSON
    num_prompt_log_probs = given.get("prompt_logprobs", 0 if "decoder_input_details" in given else None)
    return GenerationRequest(
        prompt=prompt,
        needs_log_probs=given["details"] or is_streaming or sampling.num_return_sequences > 1,
        max_new_tokens=given.get("max_new_tokens", DEFAULT_MAX_NEW_TOKENS),
        sampling=sampling,
        is_streaming=is_streaming,
        output_format=frame.output_format,
        stop_sequences=given.get("stop_sequences", ()) + given.get("stop", ()),
        bad_sequences=given.get("bad_sequences", ()),
        stop_token_ids=given.get("stop_token_ids", ()),
        ignore_eos=given.get("ignore_eos_token", False),
        truncate=given.get("truncate"),
        include_stop_str_in_output=given.get("include_stop_str_in_output", False),
        skip_special_tokens=given.get("skip_special_tokens", True),
        spaces_between_special_tokens=given.get("spaces_between_special_tokens", True),
        return_full_text=given.get("return_full_text", False),
        details=given["details"],
        prefill_details=num_prompt_log_probs is not None,
        num_top_log_probs=given.get("logprobs", given.get("top_n_tokens")),
        num_prompt_log_probs=num_prompt_log_probs,
        guided_decoding=guide,
        tgi_compat=frame.tgi_compat,
    )
