"""The request of Triton's generate extension: `{"id": "42", "text_input": "...", "parameters":
{...}}`.

The inputs are all those of Triton's vLLM backend and of TensorRT-LLM's models. A name means the
same at the top level, in `parameters`, and in the JSON text of `sampling_parameters`, and comes
once. A scalar may come as a list of one, a number or flag as text. Sources: Triton's
extension_generate.md; vllm_backend; TensorRT-LLM's models.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import orjson

from lmi.apis.base import readers
from lmi.apis.base.parameters import ROWS, Parameter, ParameterTable, request_of, rows
from lmi.apis.base.readers import Message, Parsed, Reader, takes
from lmi.apis.beams import USE_BEAM_SEARCH, read_search
from lmi.apis.guides import CONTRACT_NAME, json_schema
from lmi.errors import InvalidParameter, InvalidRequest, MalformedRequest, Unsupported, shorten
from lmi.executor import GuidedDecodingParams, GuideType
from lmi.executor.checks import MAX_INT
from lmi.settings.config import ModelConfig
from lmi.types import AnswerFormat, OutputFormat

DEFAULT_MAX_NEW_TOKENS = 30
# Every event repeats the id.
MAX_ID_BYTES = 1024
# A number that comes as text has at most so many characters.
MAX_NUMBER_CHARS = 32
GUIDE_TYPES = {kind.name.lower(): kind for kind in GuideType}
PROMPT = readers.checked(
    {}, lambda value: "" if isinstance(value, str) and value else "a non-empty string"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonFormat(AnswerFormat):
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


def _words(max_words: int) -> Reader:
    """Make a reader of a string or a list of strings, where "" counts as left out."""
    read_list = readers.strings(max_words)

    @takes({"type": ["string", "array"], "items": {"type": "string"}})
    def read(name: str, value: object) -> tuple[str, ...]:
        words = [value] if isinstance(value, str) else value
        if isinstance(words, list):
            words = [word for word in words if word != ""]

        return read_list(name, words)  # type: ignore[no-any-return]

    return read


def _stop(name: str, value: object) -> tuple[str, ...]:
    """Read stop words. In TensorRT-LLM's LLM-API model `stop` is a flag that ends the running
    request of that id.
    """
    if value is True or value == [True]:
        raise Unsupported(name, "a request is cancelled by closing its connection")

    return () if value is False else STOP_WORDS(name, value)


def _unless_empty(read_value: Reader) -> Reader:
    return lambda name, value: None if value == "" else read_value(name, value)


NEGATED = takes({"type": "boolean"})(lambda name, value: not readers.boolean(name, value))
GUIDE_TYPE = _unless_empty(readers.choice(tuple(GUIDE_TYPES)))
STOP_WORDS = _words(readers.MAX_STOP_SEQUENCES)
NOT_BUILT = {
    "an adapter is used by the name that it was loaded under, lora_name": (
        "lora_id",
        "lora_path",
        "lora_task_id",
        "lora_weights",
        "lora_config",
    ),
    "the model reads text alone": (
        "image",
        "image_url",
        "image_url_input",
    ),
    "no engine here takes embeddings": (
        "prompt_embedding_table",
        "embedding_request",
    ),
    "no API here can bias words": (
        "embedding_bias_words",
        "embedding_bias_weights",
        "logit_bias",
    ),
    "the model has no encoder": ("decoder_text_input",),
    "no API here carries it": (
        "return_context_logits",
        "return_generation_logits",
        "return_perf_metrics",
        "sampling_param_return_perf_metrics",
        "return_stop_reason",
    ),
}


def _refused() -> dict[str, Reader]:
    refused = {}
    for reason, names in NOT_BUILT.items():
        for name in names:
            refused[name] = readers.refused(reason, *NOTHING)

    return refused


NOTHING: tuple[object, ...] = ("", [], [""], [0], [False], False, 0)
REFUSED = _refused()
# The keys of the answer that each flag asks for.
RETURNS: dict[str, tuple[str, ...]] = {
    "return_finish_reason": ("finish_reason",),
    "return_num_input_tokens": ("num_input_tokens",),
    "return_num_output_tokens": ("num_output_tokens",),
    "return_cumulative_logprob": ("cumulative_logprob",),
    "return_logprobs": ("logprobs",),
    "return_log_probs": ("cum_log_probs", "output_log_probs"),
}
LOG_PROB_OUTPUTS = frozenset(
    (
        "cumulative_logprob",
        "logprobs",
        "cum_log_probs",
        "output_log_probs",
    )
)
WITHOUT_EFFECT = {
    "end_id": "the model's own end tokens count",
    "pad_id": "nothing is padded",
    "accumulate_tokens": "an event holds what is new",
    "lora_ckpt_source": "without an adapter",
}
PACKED = "sampling_parameters"


def said(name: str) -> str:
    """Return the name that an error uses for an input."""
    return f"input '{name}'"


def tensor(name: str, row: Parameter) -> dict[str, object]:
    return {"name": name, "datatype": _datatype(row), "shape": [-1 if () in row.off else 1]}


def _datatype(row: Parameter) -> str:
    schema = readers.json_schema_of(row.read)
    schema = schema.get("anyOf", [schema])[0]
    kind = schema.get("type")
    if kind == "array":
        kind = schema["items"]["type"]

    if kind == "integer":
        return "UINT64" if schema.get("maximum", 0) > MAX_INT else "INT32"

    if kind == "number":
        return "FP32"

    return "BOOL" if kind == "boolean" else "BYTES"


def _input(row: Parameter) -> Parameter:
    """Return a parameter that may come as a tensor: a scalar as a list of one, a number or flag as
    text.
    """
    is_list = () in row.off
    if is_list:
        return row

    is_text = _datatype(row) == "BYTES"

    def read(name: str, value: object) -> Any:
        return row.read(name, _scalar(name, value, is_text=is_text))

    schema = readers.json_schema_of(row.read)
    if schema:
        schemas = [schema, {"type": "array", "items": schema, "minItems": 1, "maxItems": 1}]
        if not is_text:
            schemas.append({"type": "string", "description": "the same as text"})

        read = takes({"anyOf": schemas})(read)

    return replace(row, read=read)


def _flags() -> dict[str, Parameter]:
    """Return the flags that ask for keys of the answer."""
    flags = {}
    for name, keys in RETURNS.items():
        meaning = f"Whether the answer has {' and '.join(keys)}."
        flags[name] = Parameter(name, readers.boolean, meaning, (False,))

    return flags


def _scalar(name: str, value: object, *, is_text: bool) -> object:
    if isinstance(value, list):
        if len(value) != 1:
            raise InvalidRequest(
                f"The schema can not convert {name} to tensor with proper shape: one element"
            )

        value = value[0]

    if isinstance(value, str) and not is_text and len(value) <= MAX_NUMBER_CHARS:
        with suppress(orjson.JSONDecodeError):
            return orjson.loads(value.lower())

    return value


MEANT = rows(
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "n",
    "best_of",
    "beam_width",
)
MEANT["use_beam_search"] = USE_BEAM_SEARCH
MEANT |= rows(
    "length_penalty",
    "early_stopping",
    "cache_salt",
    logprobs="num_top_log_probs",
    lora_name="adapter",
)
MEANT |= {
    "text_input": Parameter("prompt", PROMPT, "The prompt.", fields=("inputs", "input_token_ids")),
    "stream": Parameter("stream", readers.boolean, "Whether the answer comes token by token."),
    "max_tokens": replace(ROWS["max_new_tokens"], off=(DEFAULT_MAX_NEW_TOKENS,)),
    "temperature": replace(ROWS["temperature"], off=(0,)),
    "stop_words": replace(ROWS["stop_sequences"], read=STOP_WORDS),
    "stop": Parameter("stop", _stop, "Texts that end the answer.", ((),)),
    "bad_words": replace(ROWS["bad_sequences"], read=_words(readers.MAX_WORDS)),
    "logits_post_processor_name": replace(ROWS["logits_post_processor_name"], off=("",)),
    "guided_decoding_guide_type": Parameter(
        "guide_type",
        GUIDE_TYPE,
        "The kind of structure that the answer must have.",
        fields=(CONTRACT_NAME,),
    ),
    "guided_decoding_guide": Parameter("guide", _unless_empty(readers.text), "That structure."),
    "exclude_input_in_output": replace(ROWS["return_full_text"], read=NEGATED),
    **_flags(),
}
# Names that other models of Triton have for the same inputs.
TWINS = {
    "streaming": "stream",
    "random_seed": "seed",
    "min_length": "min_tokens",
    "num_return_sequences": "n",
    "len_penalty": "length_penalty",
    "sampling_param_stop": "stop_words",
    "sampling_param_exclude_input_from_output": "exclude_input_in_output",
    "sampling_param_max_tokens": "max_tokens",
    "sampling_param_temperature": "temperature",
    "sampling_param_top_k": "top_k",
    "sampling_param_top_p": "top_p",
    "sampling_param_seed": "seed",
    "sampling_param_presence_penalty": "presence_penalty",
    "sampling_param_frequency_penalty": "frequency_penalty",
    "sampling_param_best_of": "best_of",
}


def _inputs() -> dict[str, Parameter]:
    """Return the rows of all names, those of other models last."""
    inputs = {name: _input(row) for name, row in MEANT.items()}
    for twin, name in TWINS.items():
        inputs[twin] = _input(MEANT[name])

    return inputs


INPUTS = ParameterTable(_inputs(), said)


def read(
    body: bytes, content_type: str | None, model: ModelConfig, *, output_format: OutputFormat
) -> Message[TritonFormat]:
    readers.check_values(body)
    try:
        fields = readers.read_object(body)
    except MalformedRequest as error:
        raise MalformedRequest(f"failed to parse the request JSON buffer: {error}") from None

    head = {}
    if fields.get("id", "") != "":
        head["id"] = _id(fields)

    head["model_name"] = model.name
    head["model_version"] = model.version
    return Message(fields, TritonFormat(output_format=output_format, head=head))


def _id(fields: dict[str, Any]) -> str:
    request_id = fields["id"]
    if not isinstance(request_id, str):
        raise MalformedRequest(
            f"Unable to parse 'id': it must be a string, given {shorten(request_id)}"
        )

    if len(request_id.encode()) > MAX_ID_BYTES:
        raise MalformedRequest(f"Unable to parse 'id': it must have at most {MAX_ID_BYTES} bytes")

    return request_id


def parse(message: Message[TritonFormat]) -> Parsed[TritonFormat]:
    ignored: list[str] = []
    values = {"max_new_tokens": DEFAULT_MAX_NEW_TOKENS} | _read(message.fields, ignored)
    if "prompt" not in values:
        raise MalformedRequest(
            "missing required input(s) ['text_input']. Please provide all required input(s)."
        )

    is_streaming = message.format.is_streamed and values.get("stream", True)
    INPUTS.check_together(values, is_streamed=is_streaming)
    read_search(INPUTS, values, is_streamed=is_streaming)

    is_sampling = values.get("temperature") and values.get("top_p") != 0
    is_greedy = "beam_width" not in values and not is_sampling
    reasons = INPUTS.without_effect(values, is_greedy=is_greedy)
    if is_streaming:
        reasons["return_full_text"] = "in a stream"

    if "return_logprobs" not in values:
        reasons["num_top_log_probs"] = "without return_logprobs"

    INPUTS.drop(values, reasons, ignored)

    outputs: tuple[str, ...] = ()
    for flag, keys in RETURNS.items():
        if flag in values:
            outputs += keys

    has_log_probs = not LOG_PROB_OUTPUTS.isdisjoint(outputs)
    request = request_of(
        values,
        is_greedy=is_greedy,
        is_streaming=is_streaming,
        needs_log_probs=has_log_probs or "best_of" in values,
        guided_decoding=_guide(values.get("guide_type"), values.get("guide")),
    )

    field_names = {}
    if "use_beam_search" in values:
        field_names["beam_width"] = said("use_beam_search")

    format = replace(
        message.format,
        outputs=outputs,
        num_answers=values.get("n", request.sampling.beam_width),
        field_names=field_names,
    )
    return Parsed((request,), format, ignored)


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
    value = _scalar(said(PACKED), value, is_text=True)
    if not isinstance(value, str):
        raise InvalidParameter(said(PACKED), "a string that holds a JSON object", value)

    if not value:
        return {}

    try:
        fields = readers.read_object(value.encode())
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
            raise MalformedRequest(f"{said(name)} already exists in request")

        names.add(name)
        if name in INPUTS:
            _read_input(member, values)
        elif name in REFUSED:
            REFUSED[name](said(name), member.value)
        elif name != PACKED:
            _ignore(member, ignored)

    return values


def _read_input(member: _Member, values: dict[str, Any]) -> None:
    """Add the value of an input to `values`, if it has an effect."""
    row = INPUTS[member.name]
    checked = row.read(said(member.name), member.value)
    if checked is None or checked in row.off:
        return

    if row.name in values:
        raise MalformedRequest(
            f"{INPUTS.named(row.name)} already exists in request, and '{member.name}' means the "
            f"same"
        )

    values[row.name] = checked


def _ignore(member: _Member, ignored: list[str]) -> None:
    name = member.name
    if name in WITHOUT_EFFECT:
        ignored.append(f"{said(name)}: no effect, {WITHOUT_EFFECT[name]}")
    elif isinstance(member.value, str | int | float):
        ignored.append(f"{shorten(name)}: unknown")
    else:
        raise MalformedRequest(
            f"{member.error_prefix}parameter {shorten(name)} has invalid type. "
            "It is none of the model's inputs and should be a number, a boolean or a string."
        )


def _guide(kind: str | None, guide: str | None) -> GuidedDecodingParams | None:
    if kind is None and guide is None:
        return None

    if kind is None:
        raise InvalidParameter(
            said("guided_decoding_guide_type"), "given beside guided_decoding_guide", kind
        )

    if (guide is None) != (kind == "json"):
        rule = "left out for json" if kind == "json" else f"given for {kind}"
        raise InvalidParameter(said("guided_decoding_guide"), rule, guide)

    if kind == "json_schema":
        return json_schema(said("guided_decoding_guide"), guide)

    return GuidedDecodingParams(GUIDE_TYPES[kind], guide)
