"""The LMI schema with `option.rolling_batch=disable`: `{"inputs": ["...", "..."], "parameters": {...}}`.

Each input is one request. All share the parameters, which mean the same as in the rolling-batch schema. Only details
have no effect. Source: LMI handlers' inference API schema (v0.28.0 page), second half.
"""

from __future__ import annotations

from dataclasses import replace

from lmi.apis.base.parameters import MAX_IGNORED, ONE_SEQUENCE_STREAMED
from lmi.apis.base.readers import Message, Parsed, adapter, boolean, check_types, read_inputs
from lmi.apis.lmi import schema as lmi
from lmi.errors import MalformedRequest, Unsupported, shorten
from lmi.settings.config import ModelConfig
from lmi.types import AnswerFormat, OutputFormat

MAX_INPUTS = 1000
WITHOUT_EFFECT = ("details", "output_formatter")


def default_format(model: ModelConfig) -> AnswerFormat:
    return AnswerFormat(output_format=OutputFormat.JSONLINES if model.enable_streaming else OutputFormat.JSON)


def read(body: bytes, content_type: str | None, model: ModelConfig) -> Message[AnswerFormat]:
    """Decode the body and check it as a whole. Raises MalformedRequest."""
    fields = read_inputs(body, content_type, MAX_INPUTS)
    inputs = fields.get("inputs")
    if "inputs" not in fields:
        raise MalformedRequest("inputs is missing")
    texts = inputs if isinstance(inputs, list) else [inputs]
    if not 1 <= len(texts) <= MAX_INPUTS:
        raise MalformedRequest(f"inputs must be one string or a list of 1 to {MAX_INPUTS}, given {shorten(inputs)}")
    for text in texts:
        if not isinstance(text, str) or not text:
            raise MalformedRequest(f"inputs must be non-empty strings, given {shorten(text)}")
    check_types(fields, has_stream=False)
    details = (fields.get("parameters") or {}).get("details") is True
    return Message(fields, replace(default_format(model), details=details), model.sampling_defaults)


def parse(message: Message[AnswerFormat]) -> Parsed[AnswerFormat]:
    """Return one request for each input. Raises InvalidParameter or Unsupported."""
    fields, format = message.fields, message.format
    parameters, ignored = dict(fields.get("parameters") or {}), []
    for name in WITHOUT_EFFECT:
        if parameters.get(name) is not None:
            lmi.PARAMETERS[name].read(f"parameters.{name}", parameters.pop(name))
            ignored.append(f"parameters.{name}: no effect with option.rolling_batch=disable")
    if fields.get("stream") is not None:
        boolean("stream", fields["stream"])
        ignored.append("stream: no effect, option.enable_streaming says it for all requests")
    inputs = fields["inputs"] if isinstance(fields["inputs"], list) else [fields["inputs"]]
    first = {"inputs": inputs[0], "parameters": parameters, "stream": None, "adapters": None}
    single = lmi.parse(Message(fields | first, lmi.LmiFormat(), message.sampling_defaults))
    request = replace(single.request, is_streaming=format.is_streamed)
    if request.is_streaming and request.num_sequences > 1:
        raise Unsupported(lmi.name_of_several(parameters), ONE_SEQUENCE_STREAMED)
    adapters = _adapters(fields.get("adapters"), len(inputs))
    requests = tuple(replace(request, prompt=text, adapter=name) for text, name in zip(inputs, adapters, strict=True))
    format = replace(format, field_names=single.format.field_names)
    return Parsed(requests, format, (*ignored, *single.ignored)[:MAX_IGNORED])


def _adapters(value: object, num_inputs: int) -> list[str | None]:
    """Read one adapter for all inputs, or a list with one for each input."""
    if isinstance(value, list) and len(value) == num_inputs:
        return [adapter("adapters", name) for name in value]
    return [adapter("adapters", value)] * num_inputs
