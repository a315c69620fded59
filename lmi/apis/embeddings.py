"""OpenAI's embeddings: `{"model": "m", "input": "Hello"}`, where input may be a list, or token ids.

    {"object": "list", "data": [{"object": "embedding", "index": 0, "embedding": [0.5, …]}], "model": "m", "usage": {…}}

Each text is a request of its own, so a body counts as many sequences as it has texts. The answer is in their order.
"""

import base64
from array import array
from dataclasses import replace
from functools import partial

from orjson import Fragment, dumps

from lmi.apis.base.api import JSON, Api
from lmi.apis.base.parameters import Parameter, ParameterTable, named
from lmi.apis.base.readers import Message, Parsed, check_values, choice, integer, refused
from lmi.apis.openai.api import OPENAI_CHAT, OPENAI_CHAT_ERRORS, PROMPT
from lmi.apis.openai.fields import AS_THE_MODEL_SAYS, hidden
from lmi.apis.openai.formatter import OpenAIFormatter
from lmi.apis.openai.schema import SHARED, OpenAIFormat, anything, prompts_of, read
from lmi.description.parts import ApiDescription, asked, content, either, struct, taken
from lmi.executor import PoolingParams, SamplingConfig
from lmi.settings.config import Config
from lmi.types import Delta, GenerationRequest

MAX_INPUTS = 2048  # as of OpenAI; max_request_sequences of the server may be lower
BASE64 = "base64"
BY_MODEL = "the model says whether its embeddings are normalised"
CANNOT_EMBED = {  # fields of vLLM's server
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
        Parameter("input", anything, "A text or token ids, or a list of them.", fields=("inputs", "input_token_ids")),
        Parameter("encoding_format", choice(("float", BASE64)), "Numbers, or their bytes as float32 in base64."),
        Parameter(
            "dimensions", integer(1), "How many numbers an embedding has, where the model was trained for fewer."
        ),
        Parameter("stream", refused("an embedding comes whole", False), "Nothing but false."),
    ),
    hidden=hidden(CANNOT_EMBED),
)


def parse(message: Message[OpenAIFormat]) -> Parsed[OpenAIFormat]:
    ignored: list[str] = []
    given = PARAMETERS.read(message.fields, ignored)
    format = replace(message.format, is_base64=given.get("encoding_format") == BASE64)
    request = GenerationRequest(
        max_new_tokens=1,  # a place in the queue for each
        sampling=SamplingConfig(temperature=0.0),
        pooling=PoolingParams(given.get("dimensions")),
        adapter=format.adapter,
        **{name: given[name] for name in ("cache_salt", "priority", "add_special_tokens") if name in given},
    )
    prompts = prompts_of("input", given.get("input"), MAX_INPUTS)
    return Parsed(tuple(replace(request, **prompt) for prompt in prompts), format, ignored)


class EmbeddingsWhole(OpenAIFormatter):
    """All embeddings as one object. Each is written when it comes, so that no turn of the event loop is long."""

    media_type = JSON
    is_streaming = False
    kind, id_prefix = "list", ""

    def __init__(self, parsed: Parsed[OpenAIFormat]) -> None:
        super().__init__(parsed)
        self._written: dict[int, Fragment] = {}  # by index

    def feed(self, delta: Delta) -> list[bytes]:
        self._count(delta)
        assert delta.embedding is not None
        data = delta.embedding.data
        numbers = base64.b64encode(data).decode() if self._format.is_base64 else array("f", data).tolist()
        self._written[delta.index] = Fragment(
            dumps({"object": "embedding", "index": delta.index, "embedding": numbers})
        )
        if self._num_open:
            return []
        written = [self._written[index] for index in range(len(self._written))]
        usage = {"prompt_tokens": self._num_prompt_tokens, "total_tokens": self._num_prompt_tokens}
        return [dumps({"object": self.kind, "data": written, "model": self._format.model, "usage": usage})]


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

# The description, for /openapi.json.
EXAMPLE = {"input": "What is the capital of France?"}
SCHEMAS = {
    "EmbeddingsRequest": asked(taken(PARAMETERS) | {"input": PROMPT}, "input", example=EXAMPLE),
    "Embeddings": struct(
        object={"const": "list"},
        data=[struct(object={"const": "embedding"}, index=int, embedding=either([float], str))],
        model=str,
        usage=struct(prompt_tokens=int, total_tokens=int),
    ),
}


def describe(config: Config) -> ApiDescription:
    about, rules = "OpenAI's embeddings, of an embedding model.", [EMBEDDINGS.errors]
    api = ApiDescription("Embeddings", about, config.model, SCHEMAS, content("OpenAIError"), rules)
    api.infer("/v1/embeddings", "Embed texts", "Embeddings", "EmbeddingsRequest")
    return api
