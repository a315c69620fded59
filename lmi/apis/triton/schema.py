"""The request of Triton's generate extension: `{"id": "42", "text_input": "...", "parameters":
{...}}`.

A name means the same at the top level, in `parameters`, and in the JSON text of
`sampling_parameters`, and comes once. Source: Triton's extension_generate.md.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from msgspec import field
from msgspec.structs import replace

from lmi.apis.base.body import Message, Parsed, check_values, read_object
from lmi.apis.base.parameters import ParameterValues, request_of
from lmi.apis.beams import read_search
from lmi.apis.guides.fields import json_schema
from lmi.apis.triton.inputs import (
    DEFAULT_MAX_NEW_TOKENS,
    GUIDE_TYPES,
    INPUTS,
    LOG_PROB_OUTPUTS,
    PACKED,
    REFUSED,
    RETURNS,
    WITHOUT_EFFECT,
    input_name,
    scalar,
)
from lmi.errors import InvalidParameter, MalformedRequest, shorten
from lmi.executor import GuidedDecodingParams
from lmi.settings.config import ModelConfig
from lmi.types import AnswerFormat, OutputFormat

# Every event repeats the id.
MAX_ID_BYTES = 1024


class TritonFormat(AnswerFormat, frozen=True, kw_only=True):
    """The format of an answer. Each object has the keys of `head`: the id if there is one,
    model_name, model_version.

    `outputs` are the further keys that the request asks for. `num_answers` is the number of
    sequences in the answer.
    """

    head: Mapping[str, str] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    num_answers: int = 1


class _Member(NamedTuple):
    """A field of the body, or one that a field holds."""

    name: str
    value: object
    # It begins an error about a field that another one holds.
    error_prefix: str


def read(
    body: bytes, content_type: str | None, model: ModelConfig, *, output_format: OutputFormat
) -> Message[TritonFormat]:
    """Read a body, whose path says the form of the answer. Raises MalformedRequest."""
    check_values(body)
    try:
        fields = read_object(body)
    except MalformedRequest as error:
        raise MalformedRequest(f"failed to parse the request JSON buffer: {error}") from None

    head = {}
    if fields.get("id", "") != "":
        head["id"] = _id(fields)

    head["model_name"] = model.name
    head["model_version"] = model.version
    return Message(fields, TritonFormat(output_format=output_format, head=head))


def _id(fields: dict[str, Any]) -> str:
    """Return the id of a request, which its answer repeats."""
    request_id = fields["id"]
    if not isinstance(request_id, str):
        raise MalformedRequest(
            f"Unable to parse 'id': it must be a string, given {shorten(request_id)}"
        )

    if len(request_id.encode()) > MAX_ID_BYTES:
        raise MalformedRequest(f"Unable to parse 'id': it must have at most {MAX_ID_BYTES} bytes")

    return request_id


def parse(message: Message[TritonFormat]) -> Parsed[TritonFormat]:
    """Check the inputs, and return the request with its format."""
    ignored: list[str] = []
    values = {"max_new_tokens": DEFAULT_MAX_NEW_TOKENS} | _read(message.fields, ignored)
    if "prompt" not in values:
        raise MalformedRequest(
            "missing required input(s) ['text_input']. Please provide all required input(s)."
        )

    is_streaming = message.format.is_streamed and values.get("stream", True)
    INPUTS.check_together(values, is_streamed=is_streaming)
    read_search(INPUTS, values, is_streamed=is_streaming)

    is_greedy = _is_greedy(values)
    reasons = _without_effect(values, is_greedy=is_greedy, is_streaming=is_streaming)
    INPUTS.drop(values, reasons, ignored)

    outputs = _outputs(values)
    has_log_probs = not LOG_PROB_OUTPUTS.isdisjoint(outputs)
    request = request_of(
        values,
        is_greedy=is_greedy,
        is_streaming=is_streaming,
        needs_log_probs=has_log_probs or "best_of" in values,
        guided_decoding=_guide(values.get("guide_type"), values.get("guide")),
    )
    format = replace(
        message.format,
        outputs=outputs,
        num_answers=values.get("n", request.sampling.beam_width),
        field_names=_field_names(values),
    )
    return Parsed((request,), format, ignored)


def _is_greedy(values: ParameterValues) -> bool:
    is_sampling = values.get("temperature") and values.get("top_p") != 0
    return "beam_width" not in values and not is_sampling


def _without_effect(
    values: ParameterValues, *, is_greedy: bool, is_streaming: bool
) -> dict[str, str]:
    """Return the rows that this answer cannot use, with the reasons."""
    reasons = INPUTS.without_effect(values, is_greedy=is_greedy)
    if is_streaming:
        reasons["return_full_text"] = "in a stream"

    if "return_logprobs" not in values:
        reasons["num_top_log_probs"] = "without return_logprobs"

    return reasons


def _outputs(values: ParameterValues) -> tuple[str, ...]:
    """Return the keys of the answer that flags ask for."""
    outputs: tuple[str, ...] = ()
    for flag, keys in RETURNS.items():
        if flag in values:
            outputs += keys

    return outputs


def _field_names(values: ParameterValues) -> dict[str, str]:
    """Return the name that an engine's refusal has for beams that another input asked for."""
    if "use_beam_search" in values:
        return {"beam_width": input_name("use_beam_search")}

    return {}


def _members(fields: dict[str, Any]) -> Iterator[_Member]:
    """Yield each field of the body, and those that a field holds."""
    for name, value in fields.items():
        if name == "id":
            continue

        if name != "parameters":
            yield from _with_packed(_Member(name, value, error_prefix=""))
            continue

        if not isinstance(value, dict):
            raise MalformedRequest(
                f"Expected JSON object for keyword: 'parameters', given {shorten(value)}"
            )

        for inner_name, inner in value.items():
            prefix = "Converting keyword: 'parameters': "
            yield from _with_packed(_Member(inner_name, inner, prefix))


def _with_packed(member: _Member) -> Iterator[_Member]:
    """Yield a field, and if it is PACKED those that it holds."""
    yield member
    if member.name == PACKED:
        for name, value in _unpack(member.value).items():
            yield from _with_packed(_Member(name, value, f"Converting keyword: '{PACKED}': "))


def _unpack(value: object) -> dict[str, Any]:
    """Return the fields that PACKED holds, without the null that some clients' libraries write."""
    value = scalar(input_name(PACKED), value, is_text=True)
    if not isinstance(value, str):
        raise InvalidParameter(input_name(PACKED), "a string that holds a JSON object", value)

    if not value:
        return {}

    try:
        fields = read_object(value.encode())
    except MalformedRequest as error:
        raise MalformedRequest(f"Unable to parse '{PACKED}': {error}") from None

    return {name: inner for name, inner in fields.items() if inner is not None}


def _read(fields: dict[str, Any], ignored: list[str]) -> dict[str, Any]:
    """Return the checked values that have an effect. Unlike other APIs' null, Triton's
    is a value.
    """
    values: dict[str, Any] = {}
    names: set[str] = set()
    for member in _members(fields):
        name = member.name
        is_input = name in INPUTS or name in REFUSED or name == PACKED
        if is_input and name in names:
            raise MalformedRequest(f"{input_name(name)} already exists in request")

        names.add(name)
        if name in INPUTS:
            _read_input(member, values)
        elif name in REFUSED:
            REFUSED[name](input_name(name), member.value)
        elif name != PACKED:
            _ignore(member, ignored)

    return values


def _read_input(member: _Member, values: dict[str, Any]) -> None:
    """Add the value of an input to `values`, if it has an effect."""
    row = INPUTS[member.name]
    checked = row.read(input_name(member.name), member.value)
    if checked is None or checked in row.off:
        return

    if row.name in values:
        raise MalformedRequest(
            f"{INPUTS.named(row.name)} already exists in request, and '{member.name}' means the "
            f"same"
        )

    values[row.name] = checked


def _ignore(member: _Member, ignored: list[str]) -> None:
    """Add a line to `ignored` for a field that is no input. Raises MalformedRequest if Triton takes
    no parameter of this type.
    """
    name = member.name
    if name in WITHOUT_EFFECT:
        ignored.append(f"{input_name(name)}: no effect, {WITHOUT_EFFECT[name]}")
    elif isinstance(member.value, str | int | float):
        ignored.append(f"{shorten(name)}: unknown")
    else:
        raise MalformedRequest(
            f"{member.error_prefix}parameter {shorten(name)} has invalid type. "
            "It is none of the model's inputs and should be a number, a boolean or a string."
        )


def _guide(kind: str | None, guide: str | None) -> GuidedDecodingParams | None:
    """Return the guide of the two inputs that together ask for one. The kind `json` has no text."""
    if kind is None and guide is None:
        return None

    if kind is None:
        raise InvalidParameter(
            input_name("guided_decoding_guide_type"), "given beside guided_decoding_guide", kind
        )

    if (guide is None) != (kind == "json"):
        rule = "left out for json" if kind == "json" else f"given for {kind}"
        raise InvalidParameter(input_name("guided_decoding_guide"), rule, guide)

    if kind == "json_schema":
        return json_schema(input_name("guided_decoding_guide"), guide)

    return GuidedDecodingParams(GUIDE_TYPES[kind], guide)
