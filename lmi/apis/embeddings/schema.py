"""The schema of OpenAI's embeddings: `{"model": "m", "input": "Hello"}`, where input may be a list, or token ids.

Each text is a request of its own, so a body counts as many sequences as it has texts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lmi.apis.base.parameters import MAX_IGNORED, Parameter, ParameterTable
from lmi.apis.base.readers import Message, Parsed, check_values, choice, integer, refused
from lmi.apis.openai.schema import SHARED, OpenAIFormat, anything, hidden, message, prompts_of
from lmi.executor import PoolingParams, SamplingConfig
from lmi.settings.config import ModelConfig
from lmi.types import GenerationRequest

MAX_INPUTS = 2048  # as of OpenAI; max_request_sequences of the server may be lower
BASE64 = "base64"
BY_MODEL = "the model says whether its embeddings are normalised"
CANNOT_EMBED = {  # fields of vLLM's server
    "messages": "an embedding is that of input",
    "truncate_prompt_tokens": "an input that is too long is refused",
    "embed_dtype": "embeddings are float32",
    "normalize": BY_MODEL,
    "use_activation": BY_MODEL,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingFormat(OpenAIFormat):
    """The format of embeddings: lists of numbers, or the bytes of float32, little-endian, in base64."""

    is_base64: bool = False


EMBEDDINGS = ParameterTable(
    {name: SHARED[name] for name in ("model", "cache_salt", "priority")}
    | {
        "input": Parameter(
            "input", anything, fields=("inputs", "input_token_ids"), help="A text or token ids, or a list of them."
        ),
        "encoding_format": Parameter(
            "encoding_format", choice(("float", BASE64)), help="Numbers, or their bytes as float32 in base64."
        ),
        "dimensions": Parameter(
            "dimensions", integer(1), help="How many numbers an embedding has, where the model was trained for fewer."
        ),
        "stream": Parameter("stream", refused("an embedding comes whole", False), help="Nothing but false."),
    },
    hidden=hidden(CANNOT_EMBED),
)


def read(body: bytes, content_type: str | None, model: ModelConfig) -> Message[OpenAIFormat]:
    """Decode the body. Raises MalformedRequest."""
    check_values(body, MAX_INPUTS)
    return message(body, model, kind=EmbeddingFormat)


def parse(message: Message[OpenAIFormat]) -> Parsed[OpenAIFormat]:
    """Return the requests of a body, one for each input. Raises InvalidParameter or Unsupported."""
    ignored: list[str] = []
    given = EMBEDDINGS.read(message.fields, ignored)
    assert isinstance(message.format, EmbeddingFormat)
    format = replace(message.format, is_base64=given.get("encoding_format") == BASE64)
    request = GenerationRequest(
        max_new_tokens=1,  # a place in the queue for each
        sampling=SamplingConfig(temperature=0.0),
        pooling=PoolingParams(given.get("dimensions")),
        adapter=format.adapter,
        **{name: given[name] for name in ("cache_salt", "priority") if name in given},
    )
    prompts = prompts_of("input", given.get("input"), MAX_INPUTS)
    return Parsed(tuple(replace(request, **prompt) for prompt in prompts), format, tuple(ignored[:MAX_IGNORED]))
