"""The request of Triton's generate extension: `{"id": "42", "text_input": "...", "parameters": {...}}`.

In Triton each model chooses its inputs. Here they are all inputs of Triton's vLLM backend and of TensorRT-LLM's models.
A name means the same at the top level, in `parameters`, and in the JSON text of `sampling_parameters`. A name that
comes twice is refused. A scalar may come as a list of one, a number or flag as text. An unknown name is ignored if its
value is a scalar, and refused otherwise. Decoding is greedy unless `temperature` is over 0, and if `top_p` is 0.
Refusals use the words of Triton's HTTP front end. Sources: Triton's extension_generate.md; the inputs of vllm_backend,
and of TensorRT-LLM's ensemble, BLS and LLM-API models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from lmi.apis.base.beams import MAX_BEAMS, OF_A_SEARCH, read_flag, read_width, without_search
from lmi.apis.base.guides import json_schema
from lmi.apis.base.parameters import (
    MAX_IGNORED,
    MAX_SEQUENCES,
    Given,
    check_best_of,
    check_least_tokens,
    check_one_sequence,
    check_stop,
    drop,
    shared_request,
)
from lmi.apis.base.readers import (
    MAX_STOP_SEQUENCES,
    MAX_WORDS,
    Message,
    Parsed,
    Reader,
    boolean,
    cache_salt,
    check_values,
    choice,
    integer,
    number,
    read_object,
    strings,
    takes,
    text,
    token_ids,
)
from lmi.errors import InvalidParameter, InvalidRequest, MalformedRequest, Unsupported, shorten
from lmi.executor import (
    MAX_PENALTY,
    MAX_SEED,
    MAX_TEMPERATURE,
    REPETITION_PENALTIES,
    GuidedDecodingParams,
    GuideType,
)
from lmi.settings.config import ModelConfig
from lmi.types import AnswerFormat, GenerationRequest, OutputFormat

DEFAULT_MAX_NEW_TOKENS = 30
MAX_ID_BYTES = 1024  # every event repeats it
MAX_NUMBER_CHARS = 32  # of a number that comes as text
BOM = b"\xef\xbb\xbf"
SAMPLING = ("top_k", "top_p", "min_p", "seed")
GUIDE_TYPES = {"json": GuideType.JSON, "json_schema": GuideType.JSON_SCHEMA, "regex": GuideType.REGEX} | {
    "ebnf_grammar": GuideType.EBNF_GRAMMAR
}


@dataclass(frozen=True, slots=True)
class Input:
    """One input: its reader, the datatype of its tensor in the metadata, and its other names (`twins`).

    `off` holds the values that mean the same as leaving it out.
    """

    read: Reader
    datatype: str
    off: tuple[object, ...] = ()
    twins: tuple[str, ...] = ()
    is_list: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonFormat(AnswerFormat):
    """The format of an answer. Each object has the keys of `head`: the id if there is one, model_name, model_version.

    `outputs` are the further keys that the request asks for. `num_answers` is the number of sequences in the answer.
    """

    head: Mapping[str, str] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    num_answers: int = 1


def _prompt(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidParameter(name, "a non-empty string", value)
    return value


def _words(max_words: int) -> Reader:
    """Make a reader of a string or a list of strings, where "" counts as left out."""
    read_list = strings(max_words)

    @takes({"type": ["string", "array"], "items": {"type": "string"}})
    def read(name: str, value: object) -> tuple[str, ...]:
        words = [value] if isinstance(value, str) else value
        return read_list(name, [word for word in words if word != ""] if isinstance(words, list) else words)  # type: ignore[no-any-return]

    return read


def _stop(name: str, value: object) -> tuple[str, ...]:
    """Read stop words. In TensorRT-LLM's LLM-API model `stop` is a flag that ends the running request of that id."""
    if value is True or value == [True]:
        raise Unsupported(name, "a request is cancelled by closing its connection")
    return () if value is False else STOP_WORDS(name, value)


def _unless_empty(read: Reader) -> Reader:
    return lambda name, value: None if value == "" else read(name, value)


def _refused(reason: str) -> Reader:
    """Make a reader that refuses every value except those that ask for nothing."""

    def read(name: str, value: object) -> None:
        if value not in ("", [], [""], [0], [False], 0):
            raise Unsupported(name, reason)

    return read


STOP_WORDS = _words(MAX_STOP_SEQUENCES)
ADAPTER, IMAGE, EMBEDDING = (
    "an adapter is used by the name that it was loaded under, lora_name",
    "the model reads text alone",
    "no engine here takes embeddings",
)
NOT_BUILT: dict[str, tuple[str, ...]] = {
    ADAPTER: ("lora_id", "lora_path", "lora_task_id", "lora_weights", "lora_config"),
    IMAGE: ("image", "image_url", "image_url_input"),
    EMBEDDING: ("prompt_embedding_table", "embedding_request"),
    "no API here can bias words": ("embedding_bias_words", "embedding_bias_weights", "logit_bias"),
    "the model has no encoder": ("decoder_text_input",),
    "no API here carries it": (
        "return_context_logits",
        "return_generation_logits",
        "return_perf_metrics",
        "sampling_param_return_perf_metrics",
        "return_stop_reason",
    ),
}
RETURNS: dict[str, tuple[str, ...]] = {  # flag -> keys of the answer
    "return_finish_reason": ("finish_reason",),
    "return_num_input_tokens": ("num_input_tokens",),
    "return_num_output_tokens": ("num_output_tokens",),
    "return_cumulative_logprob": ("cumulative_logprob",),
    "return_logprobs": ("logprobs",),
    "return_log_probs": ("cum_log_probs", "output_log_probs"),
}
LOG_PROB_OUTPUTS = frozenset(("cumulative_logprob", "logprobs", "cum_log_probs", "output_log_probs"))
INPUTS: dict[str, Input] = {
    "text_input": Input(_prompt, "BYTES"),
    "max_tokens": Input(integer(1), "INT32", (DEFAULT_MAX_NEW_TOKENS,), ("sampling_param_max_tokens",)),
    "stream": Input(boolean, "BOOL", (), ("streaming",)),
    "temperature": Input(number(0, MAX_TEMPERATURE), "FP32", (0,), ("sampling_param_temperature",)),
    "top_k": Input(integer(-1), "INT32", (-1, 0), ("sampling_param_top_k",)),
    "top_p": Input(number(0, 1), "FP32", (1,), ("sampling_param_top_p",)),
    "min_p": Input(number(0, 1), "FP32", (0,)),
    "seed": Input(integer(0, MAX_SEED), "UINT64", (), ("random_seed", "sampling_param_seed")),
    "repetition_penalty": Input(number(*REPETITION_PENALTIES), "FP32", (1,)),
    "presence_penalty": Input(number(-MAX_PENALTY, MAX_PENALTY), "FP32", (0,), ("sampling_param_presence_penalty",)),
    "frequency_penalty": Input(number(-MAX_PENALTY, MAX_PENALTY), "FP32", (0,), ("sampling_param_frequency_penalty",)),
    "min_tokens": Input(integer(0), "INT32", (0,), ("min_length",)),
    "stop_words": Input(STOP_WORDS, "BYTES", ((),), ("sampling_param_stop",), is_list=True),
    "stop": Input(_stop, "BYTES", ((),), is_list=True),
    "bad_words": Input(_words(MAX_WORDS), "BYTES", ((),), is_list=True),
    "stop_token_ids": Input(token_ids(MAX_WORDS), "INT32", ((),), is_list=True),
    "ignore_eos": Input(boolean, "BOOL", (False,)),
    "include_stop_str_in_output": Input(boolean, "BOOL", (False,)),
    "skip_special_tokens": Input(boolean, "BOOL", (True,)),
    "spaces_between_special_tokens": Input(boolean, "BOOL", (True,)),
    "n": Input(integer(1, MAX_SEQUENCES), "INT32", (1,), ("num_return_sequences",)),
    "best_of": Input(integer(1, MAX_SEQUENCES), "INT32", (1,), ("sampling_param_best_of",)),
    "beam_width": Input(integer(1, MAX_BEAMS), "INT32", (1,)),
    "use_beam_search": Input(boolean, "BOOL", (False,)),
    "length_penalty": Input(OF_A_SEARCH["length_penalty"].read, "FP32", (1,), ("len_penalty",)),
    "early_stopping": Input(OF_A_SEARCH["early_stopping"].read, "BOOL", (False,)),
    "logprobs": Input(integer(0), "INT32"),
    "guided_decoding_guide_type": Input(_unless_empty(choice(tuple(GUIDE_TYPES))), "BYTES", (None,)),
    "guided_decoding_guide": Input(_unless_empty(text), "BYTES", (None,)),
    "lora_name": Input(text, "BYTES", ("",)),
    "cache_salt": Input(cache_salt, "BYTES"),
    "logits_post_processor_name": Input(text, "BYTES", ("",)),
    "exclude_input_in_output": Input(boolean, "BOOL", (True,), ("sampling_param_exclude_input_from_output",)),
    **{name: Input(boolean, "BOOL", (False,)) for name in RETURNS},
}
REFUSED = {name: _refused(reason) for reason, names in NOT_BUILT.items() for name in names}
WITHOUT_EFFECT = {
    "end_id": "the model's own end tokens count",
    "pad_id": "nothing is padded",
    "accumulate_tokens": "an event holds what is new",
    "lora_ckpt_source": "without an adapter",
}
PACKED = "sampling_parameters"
MEANINGS = {name: meaning for meaning, entry in INPUTS.items() for name in (meaning, *entry.twins)}


def said(name: str) -> str:
    """Return the name that an error uses for an input. WIRE_NAMES translates the contract's names."""
    return f"input '{name}'"


UNCHANGED = (
    *("temperature", "min_p", "seed", "repetition_penalty", "presence_penalty", "frequency_penalty", "bad_words"),
    *("beam_width", "logits_post_processor_name", "cache_salt"),
)
WIRE_NAMES = {
    name: said(meaning)
    for name, meaning in {
        "inputs": "text_input",
        "input_token_ids": "text_input",
        "max_tokens": "max_tokens",
        "num_top_log_probs": "logprobs",
        "stop_words": "stop_token_ids",
        "end_ids": "stop_token_ids",
        "num_return_sequences": "n",
        "guided_decoding_params": "guided_decoding_guide_type",
        "lora_config": "lora_name",
    }.items()
} | {name: said(name) for name in UNCHANGED}


def default_format(model: ModelConfig) -> TritonFormat:
    return TritonFormat()


def reader(output_format: OutputFormat) -> Callable[[bytes, str | None, ModelConfig], Message[TritonFormat]]:
    """Make the `read` of one of the two URLs: JSON for generate, SSE for generate_stream."""

    def read(body: bytes, content_type: str | None, model: ModelConfig) -> Message[TritonFormat]:
        """Decode a body of any content type. Raises MalformedRequest."""
        body = body.removeprefix(BOM)
        check_values(body)
        try:
            fields = read_object(body)
        except MalformedRequest as error:
            raise MalformedRequest(f"failed to parse the request JSON buffer: {error}") from None
        head = {"id": _id(fields)} if fields.get("id", "") != "" else {}
        head |= {"model_name": model.name, "model_version": model.version}
        return Message(fields, TritonFormat(output_format=output_format, head=head))

    return read


def _id(fields: dict[str, Any]) -> str:
    given = fields["id"]
    if not isinstance(given, str):
        raise MalformedRequest(f"Unable to parse 'id': it must be a string, given {shorten(given)}")
    if len(given.encode()) > MAX_ID_BYTES:
        raise MalformedRequest(f"Unable to parse 'id': it must have at most {MAX_ID_BYTES} bytes")
    return given


def parse(message: Message[TritonFormat]) -> Parsed[TritonFormat]:
    """Check the inputs and build the request. Raises InvalidRequest."""
    reading = Reading()
    for where, name, value in _members(message.fields):
        reading.add(where, name, value)
    given = reading.given
    if "text_input" not in given:
        raise MalformedRequest("missing required input(s) ['text_input']. Please provide all required input(s).")
    is_streaming = message.format.is_streamed and given.get("stream", True)
    _check_together(given, is_streaming)
    is_flagged = _read_search(given)
    is_greedy = "beam_width" not in given and (not given.get("temperature") or given.get("top_p") == 0)
    drop(given, _without_effect(given, is_greedy, is_streaming), reading.ignored)
    outputs = tuple(key for flag, keys in RETURNS.items() if flag in given for key in keys)
    request = _request(given, is_greedy, is_streaming, needs_log_probs=not LOG_PROB_OUTPUTS.isdisjoint(outputs))
    format = replace(
        message.format,
        outputs=outputs,
        num_answers=given.get("n", request.sampling.beam_width),
        field_names={"beam_width": said("use_beam_search")} if is_flagged else {},
    )
    return Parsed((request,), format, tuple(reading.ignored[:MAX_IGNORED]))


def _members(fields: dict[str, Any]) -> Iterator[tuple[str, str, object]]:
    """Yield (prefix for an error, name, value) for each field of the body."""
    for name, value in fields.items():
        if name == "parameters":
            if not isinstance(value, dict):
                raise MalformedRequest(f"Expected JSON object for keyword: 'parameters', given {shorten(value)}")
            for inner, inner_value in value.items():
                yield "Converting keyword: 'parameters': ", inner, inner_value
        elif name != "id":
            yield "", name, value


class Reading:
    """Collects the inputs of one request. `given` holds the checked values that have an effect."""

    def __init__(self) -> None:
        self.given: dict[str, Any] = {}
        self.ignored: list[str] = []
        self._names: set[str] = set()

    def add(self, where: str, name: str, value: object) -> None:
        if name == PACKED or name in REFUSED or name in MEANINGS:
            if name in self._names:
                raise MalformedRequest(f"input '{name}' already exists in request")
            self._names.add(name)
        if name == PACKED:
            for inner, inner_value in _unpack(value).items():
                if inner_value is not None:  # left out; some clients' libraries write null
                    self.add(f"Converting keyword: '{PACKED}': ", inner, inner_value)
        elif name in REFUSED:
            REFUSED[name](said(name), value)
        elif name in MEANINGS:
            self._keep(name, MEANINGS[name], value)
        else:
            self._ignore(where, name, value)

    def _keep(self, name: str, meaning: str, value: object) -> None:
        entry = INPUTS[meaning]
        checked = entry.read(said(name), value if entry.is_list else _scalar(name, value, entry.datatype))
        if checked in entry.off:
            return
        if meaning in self.given:
            raise MalformedRequest(f"input '{meaning}' already exists in request, and '{name}' means the same")
        self.given[meaning] = checked

    def _ignore(self, where: str, name: str, value: object) -> None:
        if name in WITHOUT_EFFECT:
            self.ignored.append(f"{name}: no effect, {WITHOUT_EFFECT[name]}")
        elif isinstance(value, str | int | float):
            self.ignored.append(f"{shorten(name)}: unknown")
        else:
            raise MalformedRequest(
                f"{where}parameter {shorten(name)} has invalid type. "
                "It is none of the model's inputs and should be a number, a boolean or a string."
            )


def _scalar(name: str, value: object, datatype: str) -> object:
    if isinstance(value, list):
        if len(value) != 1:
            raise InvalidRequest(f"The schema can not convert input '{name}' to tensor with proper shape: one element")
        value = value[0]
    if isinstance(value, str) and datatype != "BYTES" and len(value) <= MAX_NUMBER_CHARS:
        with suppress(orjson.JSONDecodeError):
            return orjson.loads(value.lower())
    return value


def _unpack(value: object) -> dict[str, Any]:
    value = _scalar(PACKED, value, "BYTES")
    if not isinstance(value, str):
        raise InvalidParameter(said(PACKED), "a string that holds a JSON object", value)
    if not value:
        return {}
    try:
        return read_object(value.encode())
    except MalformedRequest as error:
        raise MalformedRequest(f"Unable to parse '{PACKED}': {error}") from None


def _read_search(given: dict[str, Any]) -> bool:
    """Read the width of a beam search. Returns whether vLLM's flag asks for it, not TensorRT-LLM's input."""
    is_flagged = "use_beam_search" in given
    if is_flagged and "beam_width" in given:
        raise InvalidParameter(said("use_beam_search"), "left out beside beam_width", True)
    if is_flagged:
        read_flag(given)
    else:
        read_width(given, "beam_width", said)
    return is_flagged


def _check_together(given: Given, is_streaming: bool) -> None:
    check_best_of(given, said)
    check_stop(given, "stop_words", said)
    check_least_tokens(given, ["min_tokens"], "max_tokens", given.get("max_tokens", DEFAULT_MAX_NEW_TOKENS), said)
    if is_streaming:
        check_one_sequence(given, said, "beam_width")


def _without_effect(given: Given, is_greedy: bool, is_streaming: bool) -> dict[str, str]:
    """Return the inputs that this request cannot use, with the reasons."""
    reasons = without_search(given, ("temperature", *SAMPLING))
    if is_greedy:
        reasons |= dict.fromkeys(SAMPLING, "in greedy decoding")
    if is_streaming:
        reasons["exclude_input_in_output"] = "in a stream"
    if "return_logprobs" not in given:
        reasons["logprobs"] = "without return_logprobs"
    return reasons


def _guide(given: Given) -> GuidedDecodingParams | None:
    kind, guide = given.get("guided_decoding_guide_type"), given.get("guided_decoding_guide")
    if kind is None and guide is None:
        return None
    if kind is None:
        raise InvalidParameter(said("guided_decoding_guide_type"), "given beside guided_decoding_guide", kind)
    if (guide is None) != (kind == "json"):
        rule = "left out for json" if kind == "json" else f"given for {kind}"
        raise InvalidParameter(said("guided_decoding_guide"), rule, guide)
    if kind == "json_schema":
        return json_schema(said("guided_decoding_guide"), guide)
    return GuidedDecodingParams(GUIDE_TYPES[kind], guide)


def _request(given: Given, is_greedy: bool, is_streaming: bool, needs_log_probs: bool) -> GenerationRequest:
    max_tokens = given.get("max_tokens", DEFAULT_MAX_NEW_TOKENS)
    return replace(
        shared_request(given, max_new_tokens=max_tokens, is_greedy=is_greedy, is_streaming=is_streaming),
        prompt=given["text_input"],
        stop_sequences=given.get("stop_words", ()) + given.get("stop", ()),
        bad_sequences=given.get("bad_words", ()),
        return_full_text="exclude_input_in_output" in given,
        num_top_log_probs=given.get("logprobs"),
        needs_log_probs=needs_log_probs or "best_of" in given,
        guided_decoding=_guide(given),
        adapter=given.get("lora_name"),
    )
