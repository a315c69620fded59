"""OpenAI's embeddings: `{"model": "m", "input": "Hello"}`, where input may be a list, or token ids.

    {"object": "list", "data": [{"object": "embedding", "index": 0, "embedding": [0.5, …]}],
     "model": "m", "usage": {…}}

Each text is a request of its own, so a body counts as many sequences as it has texts. The answer is
in their order.

At `/invocations` LMI's body `{"inputs": "Hello"}`, where inputs may be a list, is answered with a
bare list of vectors, `[[0.5, …], …]`, also for one text. Source: vllm_async_service.py of the LMI
handlers (v0.36).
"""

import base64
import math
from array import array
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from orjson import Fragment, dumps

from lmi.apis import lmi
from lmi.apis.base import parameters, readers
from lmi.apis.base.api import JSON, Api, ErrorFields, ErrorRules, Formatter, Row
from lmi.apis.base.parameters import Parameter, ParameterTable, in_parameters, named
from lmi.apis.base.readers import (
    Message,
    Parsed,
    anything,
    boolean,
    check_types,
    check_values,
    choice,
    integer,
    read_inputs,
    refused,
)
from lmi.apis.openai.answer_format import OpenAIFormat
from lmi.apis.openai.api import OPENAI_CHAT, OPENAI_CHAT_ERRORS
from lmi.apis.openai.description import PROMPT
from lmi.apis.openai.fields import AS_THE_MODEL_SAYS, hidden
from lmi.apis.openai.formatter import OpenAIFormatter
from lmi.apis.openai.schema import prompts_of, read
from lmi.apis.openai.shared_parameters import SHARED
from lmi.description.parts import (
    ApiDescription,
    answer_object,
    content,
    either,
    request_object,
    table_schemas,
)
from lmi.errors import InvalidParameter, InvalidRequest, Unsupported
from lmi.executor import PoolingParams, SamplingConfig
from lmi.settings.config import Config, ModelConfig
from lmi.types import Delta, GenerationRequest

# The length of a float32 vector that the engine has normalised may differ from 1 by so much.
UNIT_ERROR = 1e-5
# OpenAI's limit. The server's max_request_sequences may be lower.
MAX_INPUTS = 2048
BASE64 = "base64"
BY_MODEL = "the model says whether its embeddings are normalised"
# These are fields of vLLM's server.
CANNOT_EMBED = {
    "messages": "an embedding is that of input",
    "truncate_prompt_tokens": "an input that is too long is refused",
    "embed_dtype": "embeddings are float32",
    "endianness": "embeddings are little-endian",
    "mm_processor_kwargs": AS_THE_MODEL_SAYS,
    "normalize": BY_MODEL,
    "padding": "an input is as long as it is",
    "truncation_side": "an input that is too long is refused",
    "use_activation": BY_MODEL,
}
PARAMETERS = ParameterTable(
    {name: SHARED[name] for name in ("model", "cache_salt", "priority", "add_special_tokens")}
    | named(
        Parameter(
            "input",
            anything,
            "A text or token ids, or a list of them.",
            fields=("inputs", "input_token_ids"),
        ),
        Parameter(
            "encoding_format",
            choice(("float", BASE64)),
            "Numbers, or their bytes as float32 in base64.",
        ),
        Parameter(
            "dimensions",
            integer(1),
            "How many numbers an embedding has, where the model was trained for fewer.",
        ),
        Parameter("stream", refused("an embedding comes whole", False), "Nothing but false."),
    ),
    hidden=hidden(CANNOT_EMBED),
)


def parse(message: Message[OpenAIFormat]) -> Parsed[OpenAIFormat]:
    ignored: list[str] = []
    values = PARAMETERS.read(message.fields, ignored)
    format = replace(message.format, is_base64=values.get("encoding_format") == BASE64)

    request = _request(values.get("dimensions"), format)
    for name in ("cache_salt", "priority", "add_special_tokens"):
        if name in values:
            request = replace(request, **{name: values[name]})

    prompts = prompts_of("input", values.get("input"), MAX_INPUTS)
    return Parsed(tuple(replace(request, **prompt) for prompt in prompts), format, ignored)


def _request(dimensions: int | None, format: OpenAIFormat) -> GenerationRequest:
    """Return the request of one embedding, which has a place in the queue as one token has."""
    return GenerationRequest(
        max_new_tokens=1,
        sampling=SamplingConfig(temperature=0.0),
        pooling=PoolingParams(dimensions),
        adapter=format.adapter,
    )


class EmbeddingsWhole(OpenAIFormatter):
    """All embeddings as one object. Each is written when it comes, so that no turn of the event
    loop is long.
    """

    media_type = JSON
    is_streaming = False
    kind = "list"
    id_prefix = ""

    def __init__(self, parsed: Parsed[OpenAIFormat]) -> None:
        super().__init__(parsed)
        self._written_by_index: dict[int, Fragment] = {}

    def feed(self, delta: Delta) -> list[bytes]:
        self._count(delta)
        assert delta.embedding is not None
        data = delta.embedding.data
        embedding: str | list[float]
        if self._format.is_base64:
            embedding = base64.b64encode(data).decode()
        else:
            embedding = array("f", data).tolist()

        fields = {"object": "embedding", "index": delta.index, "embedding": embedding}
        self._written_by_index[delta.index] = Fragment(dumps(fields))
        if self._num_open:
            return []

        num_tokens = self._num_prompt_tokens
        answer = {
            "object": self.kind,
            "data": _in_order(self._written_by_index),
            "model": self._format.model,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }
        return [dumps(answer)]


def _in_order(fragments: dict[int, Fragment]) -> list[Fragment]:
    return [fragments[index] for index in range(len(fragments))]


EMBEDDINGS: Api[OpenAIFormat] = replace(
    OPENAI_CHAT,
    name="embeddings",
    paths=("/v1/embeddings",),
    prefixes=(),
    read=partial(read, check=partial(check_values, max_texts=MAX_INPUTS)),
    parse=parse,
    formatter=EmbeddingsWhole,
    errors=replace(OPENAI_CHAT_ERRORS, names=PARAMETERS.wire_names(pooling_params="model")),
)


# LMI's schema.


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorsFormat(OpenAIFormat):
    # Each vector is divided by its length.
    is_normalised: bool


def _default_format(model: ModelConfig) -> VectorsFormat:
    return VectorsFormat(model=model.name, is_normalised=model.normalize)


def _read_inputs(
    body: bytes, content_type: str | None, model: ModelConfig
) -> Message[VectorsFormat]:
    fields = read_inputs(body, content_type, MAX_INPUTS)
    check_types(fields)
    format = _default_format(model)
    adapter = readers.adapter("adapters", fields.get("adapters"))
    if adapter is not None:
        format = replace(format, model=adapter, adapter=adapter, is_adapter_named=True)

    return Message(fields, format)


LMI_PARAMETERS = ParameterTable(
    named(
        Parameter("normalize", boolean, "Whether each vector has the length 1."),
        Parameter(
            "dimensions",
            integer(1),
            "How many numbers a vector has, where the model was trained for fewer.",
        ),
    ),
    in_parameters,
    hidden=hidden({"truncate": "an input that is too long is refused"}, ()),
)


def _parse_inputs(message: Message[VectorsFormat]) -> Parsed[VectorsFormat]:
    fields = message.fields
    format = message.format
    ignored = parameters.unknown(fields, lmi.KNOWN_FIELDS)
    values = LMI_PARAMETERS.read(fields.get("parameters") or {}, ignored)
    if fields.get("stream"):
        raise Unsupported("stream", "embeddings come whole")

    inputs = fields.get("inputs")
    texts: list[Any] = inputs if isinstance(inputs, list) else [inputs]
    are_texts = all(isinstance(text, str) and text for text in texts)
    if not 1 <= len(texts) <= MAX_INPUTS or not are_texts:
        rule = f"a non-empty string or a list of 1 to {MAX_INPUTS} of them"
        raise InvalidParameter("inputs", rule, inputs)

    request = _request(values.get("dimensions"), format)
    format = replace(format, is_normalised=values.get("normalize", format.is_normalised))
    return Parsed(tuple(replace(request, prompt=text) for text in texts), format, ignored)


class VectorsWhole(OpenAIFormatter):
    """A list of vectors. Each is written when it comes, so that no turn of the event
    loop is long.
    """

    media_type = JSON
    is_streaming = False
    kind = "list"
    id_prefix = ""

    def __init__(self, parsed: Parsed[Any]) -> None:
        super().__init__(parsed)
        self._is_normalised = parsed.format.is_normalised
        self._written_by_index: dict[int, Fragment] = {}

    def feed(self, delta: Delta) -> list[bytes]:
        self._count(delta)
        assert delta.embedding is not None
        numbers = array("f", delta.embedding.data).tolist()
        if self._is_normalised:
            numbers = _normalised(numbers)

        self._written_by_index[delta.index] = Fragment(dumps(numbers))
        if self._num_open:
            return []

        return [dumps(_in_order(self._written_by_index))]


def _formatter(parsed: Parsed[VectorsFormat]) -> Formatter[Any]:
    return VectorsWhole(parsed)


def _normalised(numbers: list[float]) -> list[float]:
    length = math.sqrt(math.fsum(number * number for number in numbers))
    is_done = abs(length - 1) < UNIT_ERROR
    if is_done or not length:
        return numbers

    return [number / length for number in numbers]


def _write_error(
    error: ErrorFields, format: VectorsFormat, *, in_answer: bool
) -> tuple[str, bytes]:
    return JSON, b"{%b}" % lmi.error_fields(error._replace(kind=None))


EMBEDDING_INPUTS: Api[VectorsFormat] = Api(
    name="embedding_inputs",
    default_format=_default_format,
    read=_read_inputs,
    parse=_parse_inputs,
    formatter=_formatter,
    errors=ErrorRules(
        _write_error,
        (Row(InvalidRequest, lmi.INVALID_STATUS),),
        LMI_PARAMETERS.wire_names(lora_config="adapters", input_token_ids="inputs"),
    ),
    json_end=b"\n",
)

# The description, for /openapi.json.
EXAMPLE = {"input": "What is the capital of France?"}
SCHEMAS = {
    "EmbeddingsRequest": request_object(
        table_schemas(PARAMETERS) | {"input": PROMPT}, required=("input",), example=EXAMPLE
    ),
    "Embeddings": answer_object(
        object={"const": "list"},
        data=[
            answer_object(object={"const": "embedding"}, index=int, embedding=either([float], str))
        ],
        model=str,
        usage=answer_object(prompt_tokens=int, total_tokens=int),
    ),
}


def describe(config: Config) -> ApiDescription:
    about = "OpenAI's embeddings, of an embedding model."
    rules = [EMBEDDINGS.errors]
    api = ApiDescription("Embeddings", about, config.model, SCHEMAS, content("OpenAIError"), rules)
    api.infer("/v1/embeddings", "Embed texts", "Embeddings", "EmbeddingsRequest")
    return api
