"""The request of OpenAI's embeddings: `{"model": "m", "input": "Hello"}`, where input may be a
list, or token ids.

Each text is a request of its own, so a body counts as many sequences as it has texts.
"""

from msgspec.structs import replace

from lmi.apis.base.body import Message, Parsed
from lmi.apis.base.parameters import Parameter, ParameterTable, named
from lmi.apis.base.readers import anything, choice, integer, refused
from lmi.apis.openai.answer_format import OpenAIFormat
from lmi.apis.openai.fields import AS_THE_MODEL_SAYS, hidden
from lmi.apis.openai.schema import prompts_of
from lmi.apis.openai.shared_parameters import SHARED
from lmi.executor import PoolingParams, SamplingConfig
from lmi.types import GenerationRequest

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
    """Check the fields, and return a request for each text."""
    ignored: list[str] = []
    values = PARAMETERS.read(message.fields, ignored)
    format = replace(message.format, is_base64=values.get("encoding_format") == BASE64)

    request = embedding_request(values.get("dimensions"), format)
    for name in ("cache_salt", "priority", "add_special_tokens"):
        if name in values:
            request = replace(request, **{name: values[name]})

    requests = []
    for prompt in prompts_of("input", values.get("input"), MAX_INPUTS):
        requests.append(replace(request, **prompt))

    return Parsed(tuple(requests), format, ignored)


def embedding_request(dimensions: int | None, format: OpenAIFormat) -> GenerationRequest:
    """Return the request of one embedding, which has a place in the queue as one token has."""
    return GenerationRequest(
        max_new_tokens=1,
        sampling=SamplingConfig(temperature=0.0),
        pooling=PoolingParams(dimensions),
        adapter=format.adapter,
    )
