"""The table of the inputs that a request may have at Triton's generate extension: those of Triton's
vLLM backend and of TensorRT-LLM's models.

Any scalar may come as a list of one, and a number or flag as text. Sources: vllm_backend;
TensorRT-LLM's models.
"""

from contextlib import suppress
from typing import Any

import orjson
from msgspec.structs import replace

from lmi.apis.base import readers
from lmi.apis.base.parameters import ROWS, Parameter, ParameterTable
from lmi.apis.base.readers import Reader, takes
from lmi.apis.beams import USE_BEAM_SEARCH
from lmi.apis.guides.fields import CONTRACT_NAME
from lmi.errors import InvalidRequest, Unsupported
from lmi.executor import GuideType
from lmi.executor.checks import MAX_INT

DEFAULT_MAX_NEW_TOKENS = 30
# The most characters of a number that comes as text.
MAX_NUMBER_CHARS = 32
# The input that holds other inputs, as the text of a JSON object.
PACKED = "sampling_parameters"
GUIDE_TYPES = {kind.name.lower(): kind for kind in GuideType}


def input_name(name: str) -> str:
    """Return the name that an error uses for an input."""
    return f"input '{name}'"


# Inputs that change no answer, with the reason that the log tells.
WITHOUT_EFFECT = {
    "end_id": "the model's own end tokens count",
    "pad_id": "nothing is padded",
    "accumulate_tokens": "an event holds what is new",
    "lora_ckpt_source": "without an adapter",
}

ADAPTERS_HAVE_NAMES = "an adapter is used by the name that it was loaded under, lora_name"
NO_IMAGES = "the model reads text alone"
NO_EMBEDDINGS = "no engine here takes embeddings"
NO_BIASES = "no API here can bias words"
NO_PLACE = "no API here carries it"
# Inputs that are refused unless they ask for nothing, with the reason.
REASONS_TO_REFUSE = {
    "lora_id": ADAPTERS_HAVE_NAMES,
    "lora_path": ADAPTERS_HAVE_NAMES,
    "lora_task_id": ADAPTERS_HAVE_NAMES,
    "lora_weights": ADAPTERS_HAVE_NAMES,
    "lora_config": ADAPTERS_HAVE_NAMES,
    "image": NO_IMAGES,
    "image_url": NO_IMAGES,
    "image_url_input": NO_IMAGES,
    "prompt_embedding_table": NO_EMBEDDINGS,
    "embedding_request": NO_EMBEDDINGS,
    "embedding_bias_words": NO_BIASES,
    "embedding_bias_weights": NO_BIASES,
    "logit_bias": NO_BIASES,
    "decoder_text_input": "the model has no encoder",
    "return_context_logits": NO_PLACE,
    "return_generation_logits": NO_PLACE,
    "return_perf_metrics": NO_PLACE,
    "sampling_param_return_perf_metrics": NO_PLACE,
    "return_stop_reason": NO_PLACE,
}
# The values by which these inputs ask for nothing.
NOTHING: tuple[object, ...] = ("", [], [""], [0], [False], False, 0)
REFUSED: dict[str, Reader] = {
    name: readers.refused(reason, *NOTHING) for name, reason in REASONS_TO_REFUSE.items()
}
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

read_prompt = readers.checked(
    {}, lambda value: "" if isinstance(value, str) and value else "a non-empty string"
)
read_negated = takes({"type": "boolean"})(lambda name, value: not readers.boolean(name, value))


def _unless_empty(read_value: Reader) -> Reader:
    """Make a reader for which "" counts as left out."""
    return lambda name, value: None if value == "" else read_value(name, value)


read_guide_type = _unless_empty(readers.choice(tuple(GUIDE_TYPES)))
read_guide = _unless_empty(readers.text)


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


read_stop_words = _words(readers.MAX_STOP_SEQUENCES)
read_bad_words = _words(readers.MAX_WORDS)


def read_stop(name: str, value: object) -> tuple[str, ...]:
    """Read stop words. Raises Unsupported for `true`: in TensorRT-LLM's LLM-API model `stop` is a
    flag, and ends the running request of the same id.
    """
    if value is True or value == [True]:
        raise Unsupported(name, "a request is cancelled by closing its connection")

    return () if value is False else read_stop_words(name, value)


def _flag(name: str) -> Parameter:
    """Return the parameter of a flag in RETURNS."""
    meaning = f"Whether the answer has {' and '.join(RETURNS[name])}."
    return Parameter(name, readers.boolean, meaning, (False,))


# The parameter that an input means, as other APIs read it: without lists of one and texts.
MEANINGS: dict[str, Parameter] = {
    "top_k": ROWS["top_k"],
    "top_p": ROWS["top_p"],
    "min_p": ROWS["min_p"],
    "seed": ROWS["seed"],
    "repetition_penalty": ROWS["repetition_penalty"],
    "presence_penalty": ROWS["presence_penalty"],
    "frequency_penalty": ROWS["frequency_penalty"],
    "min_tokens": ROWS["min_tokens"],
    "stop_token_ids": ROWS["stop_token_ids"],
    "ignore_eos": ROWS["ignore_eos"],
    "include_stop_str_in_output": ROWS["include_stop_str_in_output"],
    "skip_special_tokens": ROWS["skip_special_tokens"],
    "spaces_between_special_tokens": ROWS["spaces_between_special_tokens"],
    "n": ROWS["n"],
    "best_of": ROWS["best_of"],
    "beam_width": ROWS["beam_width"],
    "use_beam_search": USE_BEAM_SEARCH,
    "length_penalty": ROWS["length_penalty"],
    "early_stopping": ROWS["early_stopping"],
    "cache_salt": ROWS["cache_salt"],
    "logprobs": ROWS["num_top_log_probs"],
    "lora_name": ROWS["adapter"],
    "text_input": Parameter(
        "prompt", read_prompt, "The prompt.", fields=("inputs", "input_token_ids")
    ),
    "stream": Parameter("stream", readers.boolean, "Whether the answer comes token by token."),
    "max_tokens": replace(ROWS["max_new_tokens"], off=(DEFAULT_MAX_NEW_TOKENS,)),
    "temperature": replace(ROWS["temperature"], off=(0,)),
    "stop_words": replace(ROWS["stop_sequences"], read=read_stop_words),
    "stop": Parameter("stop", read_stop, "Texts that end the answer.", ((),)),
    "bad_words": replace(ROWS["bad_sequences"], read=read_bad_words),
    "logits_post_processor_name": replace(ROWS["logits_post_processor_name"], off=("",)),
    "guided_decoding_guide_type": Parameter(
        "guide_type",
        read_guide_type,
        "The kind of structure that the answer must have.",
        fields=(CONTRACT_NAME,),
    ),
    "guided_decoding_guide": Parameter("guide", read_guide, "That structure."),
    "exclude_input_in_output": replace(ROWS["return_full_text"], read=read_negated),
    "return_finish_reason": _flag("return_finish_reason"),
    "return_num_input_tokens": _flag("return_num_input_tokens"),
    "return_num_output_tokens": _flag("return_num_output_tokens"),
    "return_cumulative_logprob": _flag("return_cumulative_logprob"),
    "return_logprobs": _flag("return_logprobs"),
    "return_log_probs": _flag("return_log_probs"),
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


def tensor(name: str, row: Parameter) -> dict[str, object]:
    """Describe an input as Triton's metadata of a model do. A list has the shape [-1]."""
    return {"name": name, "datatype": datatype(row), "shape": [-1 if _is_list(row) else 1]}


def _is_list(row: Parameter) -> bool:
    """Whether the value of a parameter is a list: then an empty one means that it is left out."""
    return () in row.off


def datatype(row: Parameter) -> str:
    """Return Triton's type of the values that a parameter takes."""
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
    """Return a parameter that may also come as a list of one, and a number or flag as text."""
    if _is_list(row):
        return row

    is_text = datatype(row) == "BYTES"

    def read(name: str, value: object) -> Any:
        return row.read(name, scalar(name, value, is_text=is_text))

    schema = readers.json_schema_of(row.read)
    if schema:
        schemas = [schema, {"type": "array", "items": schema, "minItems": 1, "maxItems": 1}]
        if not is_text:
            schemas.append({"type": "string", "description": "the same as text"})

        read = takes({"anyOf": schemas})(read)

    return replace(row, read=read)


def scalar(name: str, value: object, *, is_text: bool) -> object:
    """Return the value of an input that is no list. A list of one becomes its element, and a text
    the number or flag that it spells, unless the input itself `is_text`.

    Raises InvalidRequest for a list of another length.
    """
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


def _inputs() -> dict[str, Parameter]:
    """Return the parameters by all of their names, those of TWINS last."""
    inputs = {name: _input(row) for name, row in MEANINGS.items()}
    for twin, name in TWINS.items():
        inputs[twin] = _input(MEANINGS[name])

    return inputs


INPUTS = ParameterTable(_inputs(), input_name)
