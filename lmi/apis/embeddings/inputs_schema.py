"""The request of vectors at `/invocations`: LMI's body `{"inputs": "Hello"}`, where inputs may be a
list.

Source: vllm_async_service.py of the LMI handlers (v0.36).
"""

from typing import Any

from msgspec.structs import replace

from lmi.apis.base import parameters, readers
from lmi.apis.base.body import Message, Parsed, check_types, read_inputs
from lmi.apis.base.parameters import Parameter, ParameterTable, in_parameters, named
from lmi.apis.base.readers import boolean, integer
from lmi.apis.embeddings.schema import MAX_INPUTS, embedding_request
from lmi.apis.lmi.schema import KNOWN_FIELDS
from lmi.apis.openai.answer_format import OpenAIFormat
from lmi.apis.openai.fields import hidden
from lmi.errors import InvalidParameter, Unsupported
from lmi.settings.config import ModelConfig


class VectorsFormat(OpenAIFormat, frozen=True, kw_only=True):
    """The format of a list of vectors, each divided by its length if they are `is_normalised`."""

    is_normalised: bool


def default_format(model: ModelConfig) -> VectorsFormat:
    """Return the format of a body that says nothing of it."""
    return VectorsFormat(model=model.name, is_normalised=model.normalize)


def read(body: bytes, content_type: str | None, model: ModelConfig) -> Message[VectorsFormat]:
    """Read a body. Raises MalformedRequest."""
    fields = read_inputs(body, content_type, MAX_INPUTS)
    check_types(fields)
    format = default_format(model)
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


def parse(message: Message[VectorsFormat]) -> Parsed[VectorsFormat]:
    """Check the fields, and return a request for each text."""
    fields = message.fields
    format = message.format
    ignored = parameters.unknown(fields, KNOWN_FIELDS)
    values = LMI_PARAMETERS.read(fields.get("parameters") or {}, ignored)
    if fields.get("stream"):
        raise Unsupported("stream", "embeddings come whole")

    inputs = fields.get("inputs")
    texts: list[Any] = inputs if isinstance(inputs, list) else [inputs]
    are_texts = all(isinstance(text, str) and text for text in texts)
    if not 1 <= len(texts) <= MAX_INPUTS or not are_texts:
        rule = f"a non-empty string or a list of 1 to {MAX_INPUTS} of them"
        raise InvalidParameter("inputs", rule, inputs)

    request = embedding_request(values.get("dimensions"), format)
    format = replace(format, is_normalised=values.get("normalize", format.is_normalised))
    return Parsed(tuple(replace(request, prompt=text) for text in texts), format, ignored)
