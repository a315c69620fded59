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
from typing import Any

import orjson

from lmi.apis.base import readers
from lmi.apis.base.parameters import ROWS, Parameter, ParameterTable, request_of, rows
from lmi.apis.base.readers import Message, Parsed, Reader, takes
from lmi.apis.beams import FLAG, read_search
from lmi.apis.guides import CONTRACT_NAME, json_schema
from lmi.errors import InvalidParameter, InvalidRequest, MalformedRequest, Unsupported, shorten
from lmi.executor import GuidedDecodingParams, GuideType
from lmi.executor.checks import MAX_INT
from lmi.settings.config import ModelConfig
from lmi.types import AnswerFormat, OutputFormat

DEFAULT_MAX_NEW_TOKENS = 30
MAX_ID_BYTES = 1024  # every event repeats it
MAX_NUMBER_CHARS = 32  # of a number that comes as text
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


def _unless_empty(read: Reader) -> Reader:
    return lambda name, value: None if value == "" else read(name, value)


NEGATED = takes({"type": "boolean"})(lambda name, value: not readers.boolean(name, value))
GUIDE_TYPE = _unless_empty(readers.choice(tuple(GUIDE_TYPES)))
STOP_WORDS = _words(readers.MAX_STOP_SEQUENCES)
NOT_BUILT = {
    "an adapter is used by the name that it was loaded under, lora_name": (
        "lora_id lora_path lora_task_id lora_weights lora_config"
    ),
    "the model reads text alone": "image image_url image_url_input",
    "no engine here takes embeddings": "prompt_embedding_table embedding_request",
    "no API here can bias words": "embedding_bias_words embedding_bias_weights logit_bias",
    "the model has no encoder": "decoder_text_input",
    "no API here carries it": (
        "return_context_logits return_generation_logits return_perf_metrics "
        "sampling_param_return_perf_metrics "
        "return_stop_reason"
    ),
}
NOTHING: tuple[object, ...] = ("", [], [""], [0], [False], False, 0)
REFUSED = {
    name: readers.refused(reason, *NOTHING)
    for reason, names in NOT_BUILT.items()
    for name in names.split()
}
RETURNS: dict[str, tuple[str, ...]] = {  # flag -> keys of the answer
    f"return_{key}": (key,)
    for key in (
        "finish_reason",
        "num_input_tokens",
        "num_output_tokens",
        "cumulative_logprob",
        "logprobs",
    )
} | {"return_log_probs": ("cum_log_probs", "output_log_probs")}
LOG_PROB_OUTPUTS = frozenset(
    ("cumulative_logprob", "logprobs", "cum_log_probs", "output_log_probs")
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
    kind = schema["items"]["type"] if schema.get("type") == "array" else schema.get("type")
    if kind == "integer":
        return "UINT64" if schema.get("maximum", 0) > MAX_INT else "INT32"

    return "FP32" if kind == "number" else "BOOL" if kind == "boolean" else "BYTES"


def _input(row: Parameter) -> Parameter:
    """Return a parameter that may come as a tensor: a scalar as a list of one, a number or flag as
    text.
    """
    if () in row.off:  # it is a list by itself
        return row

    is_text = _datatype(row) == "BYTES"
    schema = readers.json_schema_of(row.read)

    def read(name: str, value: object) -> Any:
        return row.read(name, _scalar(name, value, is_text=is_text))

    if schema:
        list_of_one = {"type": "array", "items": schema, "minItems": 1, "maxItems": 1}
        as_text = [] if is_text else [{"type": "string", "description": "the same as text"}]
        read = takes({"anyOf": [schema, list_of_one, *as_text]})(read)

    return replace(row, read=read)


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
MEANT |= FLAG
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
    **{
        name: Parameter(
            name, readers.boolean, f"Whether the answer has {' and '.join(keys)}.", (False,)
        )
        for name, keys in RETURNS.items()
    },
}
TWINS = {  # the names of other models
    "streaming": "stream",
    "random_seed": "seed",
    "min_length": "min_tokens",
    "num_return_sequences": "n",
    "len_penalty": "length_penalty",
    "sampling_param_stop": "stop_words",
    "sampling_param_exclude_input_from_output": "exclude_input_in_output",
} | {
    f"sampling_param_{name}": name
    for name in (
        "max_tokens",
        "temperature",
        "top_k",
        "top_p",
        "seed",
        "presence_penalty",
        "frequency_penalty",
        "best_of",
    )
}
INPUTS = ParameterTable(
    {
        name: _input(row)
        for name, row in (MEANT | {twin: MEANT[name] for twin, name in TWINS.items()}).items()
    },
    said,
)


def read(
    body: bytes, content_type: str | None, model: ModelConfig, *, output_format: OutputFormat
) -> Message[TritonFormat]:
    readers.check_values(body)
    try:
        fields = readers.read_object(body)
    except MalformedRequest as error:
        raise MalformedRequest(f"failed to parse the request JSON buffer: {error}") from None

    head = {"id": _id(fields)} if fields.get("id", "") != "" else {}
    head |= {"model_name": model.name, "model_version": model.version}
    return Message(fields, TritonFormat(output_format=output_format, head=head))


def _id(fields: dict[str, Any]) -> str:
    given = fields["id"]
    if not isinstance(given, str):
        raise MalformedRequest(f"Unable to parse 'id': it must be a string, given {shorten(given)}")

    if len(given.encode()) > MAX_ID_BYTES:
        raise MalformedRequest(f"Unable to parse 'id': it must have at most {MAX_ID_BYTES} bytes")

    return given


def parse(message: Message[TritonFormat]) -> Parsed[TritonFormat]:
    ignored: list[str] = []
    given = {"max_new_tokens": DEFAULT_MAX_NEW_TOKENS} | _read(message.fields, ignored)
    if "prompt" not in given:
        raise MalformedRequest(
            "missing required input(s) ['text_input']. Please provide all required input(s)."
        )

    is_streaming = message.format.is_streamed and given.get("stream", True)
    INPUTS.check_together(given, is_streamed=is_streaming)
    read_search(INPUTS, given, is_streamed=is_streaming)
    is_greedy = "beam_width" not in given and (
        not given.get("temperature") or given.get("top_p") == 0
    )
    reasons = INPUTS.without_effect(given, is_greedy=is_greedy)
    if is_streaming:
        reasons["return_full_text"] = "in a stream"

    if "return_logprobs" not in given:
        reasons["num_top_log_probs"] = "without return_logprobs"

    INPUTS.drop(given, reasons, ignored)
    outputs = tuple(key for flag, keys in RETURNS.items() if flag in given for key in keys)
    request = request_of(
        given,
        is_greedy=is_greedy,
        is_streaming=is_streaming,
        needs_log_probs=not LOG_PROB_OUTPUTS.isdisjoint(outputs) or "best_of" in given,
        guided_decoding=_guide(given.get("guide_type"), given.get("guide")),
    )
    format = replace(
        message.format,
        outputs=outputs,
        num_answers=given.get("n", request.sampling.beam_width),
        field_names={"beam_width": said("use_beam_search")} if "use_beam_search" in given else {},
    )
    return Parsed((request,), format, ignored)


def _members(fields: dict[str, Any], where: str = "") -> Iterator[tuple[str, str, object]]:
    """Yield (prefix for an error, name, value) for each field of the body, and for those that a
    field holds.
    """
    for name, value in fields.items():
        if name == "parameters" and not where:
            if not isinstance(value, dict):
                raise MalformedRequest(
                    f"Expected JSON object for keyword: 'parameters', given {shorten(value)}"
                )

            yield from _members(value, "Converting keyword: 'parameters': ")
        elif name != "id" or where:
            yield where, name, value
            if name == PACKED:
                yield from _members(_unpack(value), f"Converting keyword: '{PACKED}': ")


def _unpack(value: object) -> dict[str, Any]:
    value = _scalar(said(PACKED), value, is_text=True)
    if not isinstance(value, str):
        raise InvalidParameter(said(PACKED), "a string that holds a JSON object", value)

    if not value:
        return {}

    try:
        fields = readers.read_object(value.encode())
    except MalformedRequest as error:
        raise MalformedRequest(f"Unable to parse '{PACKED}': {error}") from None

    return {
        name: inner for name, inner in fields.items() if inner is not None
    }  # some clients' libraries write null


def _read(fields: dict[str, Any], ignored: list[str]) -> dict[str, Any]:
    """Return the checked values that have an effect. Unlike other APIs' null, Triton's
    is a value.
    """
    given: dict[str, Any] = {}
    names: set[str] = set()
    for where, name, value in _members(fields):
        if name in names and (name in INPUTS or name in REFUSED or name == PACKED):
            raise MalformedRequest(f"{said(name)} already exists in request")

        names.add(name)
        if name in INPUTS:
            row = INPUTS[name]
            checked = row.read(said(name), value)
            if checked is None or checked in row.off:
                continue

            if row.name in given:
                raise MalformedRequest(
                    f"{INPUTS.named(row.name)} already exists in request, and '{name}' means the "
                    f"same"
                )

            given[row.name] = checked
        elif name in REFUSED:
            REFUSED[name](said(name), value)
        elif name != PACKED:
            _ignore(where, name, value, ignored)

    return given


def _ignore(where: str, name: str, value: object, ignored: list[str]) -> None:
    if name in WITHOUT_EFFECT:
        ignored.append(f"{said(name)}: no effect, {WITHOUT_EFFECT[name]}")
    elif isinstance(value, str | int | float):
        ignored.append(f"{shorten(name)}: unknown")
    else:
        raise MalformedRequest(
            f"{where}parameter {shorten(name)} has invalid type. "
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
