"""The LMI schema with `option.rolling_batch=disable`: `{"inputs": ["...", "..."], "parameters": {...}}`.

Each input is a request of its own, all with the same parameters, which mean what they mean in the rolling-batch schema.
What that schema puts into details has no effect here, and no request says whether it is streamed: that is
`option.enable_streaming`. Source: LMI handlers' inference API schema (v0.28.0 page), second half.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from lmi.config import ModelConfig
from lmi.errors import MalformedRequest, Unsupported, shorten
from lmi.schemas import lmi
from lmi.schemas.common import (
    MAX_VALUES_BYTES,
    Message,
    Parsed,
    boolean,
    read_object,
    read_text,
)
from lmi.types import Frame, OutputFormat

MAX_INPUTS = 1000
WITHOUT_EFFECT = ("details", "output_formatter")
WIRE_NAMES = lmi.WIRE_NAMES


class _Texts(msgspec.Struct):
    inputs: str | list[str]


class _Rest(msgspec.Struct):
    inputs: msgspec.Raw = msgspec.Raw()


def default_frame(model: ModelConfig) -> Frame:
    return Frame(output_format=OutputFormat.JSONLINES if model.enable_streaming else OutputFormat.JSON)


def read(body: bytes, content_type: str | None, model: ModelConfig) -> Message:
    """The body as a whole. Raises MalformedRequest."""
    is_text = content_type is not None and content_type.strip().lower().startswith("text/plain")
    if not is_text:
        _check_values(body)
    fields: dict[str, Any] = {"inputs": read_text(body)} if is_text else read_object(body)
    inputs, parameters = fields.get("inputs"), fields.get("parameters")
    if "inputs" not in fields:
        raise MalformedRequest("inputs is missing")
    texts = inputs if isinstance(inputs, list) else [inputs]
    if not 1 <= len(texts) <= MAX_INPUTS:
        raise MalformedRequest(f"inputs must be one string or a list of 1 to {MAX_INPUTS}, given {shorten(inputs)}")
    for text in texts:
        if not isinstance(text, str) or not text:
            raise MalformedRequest(f"inputs must be non-empty strings, given {shorten(text)}")
    if not isinstance(parameters, dict | None):
        raise MalformedRequest(f"parameters must be an object, given {shorten(parameters)}")
    return Message(fields, default_frame(model))


def _check_values(body: bytes) -> None:
    """Raise MalformedRequest if a large body holds more than large prompts, in a fraction of the time to read it."""
    if len(body) <= MAX_VALUES_BYTES:
        return
    try:
        inputs = bytes(msgspec.json.decode(body, type=_Rest).inputs)
        if inputs.count(b'"') - inputs.count(b'\\"') <= 4 * MAX_INPUTS:  # never fewer than a list of so many has
            msgspec.json.decode(body, type=_Texts)
            num_bytes = len(body) - len(inputs)
        else:
            num_bytes = len(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedRequest(f"the body is not the JSON of an object with texts: {error}") from None
    if num_bytes > MAX_VALUES_BYTES:
        raise MalformedRequest(f"all but the prompts must have at most {MAX_VALUES_BYTES} bytes, not {num_bytes}")


def parse(message: Message) -> Parsed:
    """One request for each input. Raises InvalidParameter or Unsupported."""
    fields, frame = message.fields, message.frame
    parameters, tolerated = dict(fields.get("parameters") or {}), []
    for name in WITHOUT_EFFECT:
        if parameters.get(name) is not None:
            lmi.PARAMETERS[name].read(f"parameters.{name}", parameters.pop(name))
            tolerated.append(f"parameters.{name}: no effect with option.rolling_batch=disable")
    if fields.get("stream") is not None:
        boolean("stream", fields["stream"])
        tolerated.append("stream: no effect, option.enable_streaming says it for all requests")
    first, *rest = fields["inputs"] if isinstance(fields["inputs"], list) else [fields["inputs"]]
    alone = lmi.parse(Message(fields | {"inputs": first, "parameters": parameters, "stream": None}, Frame()))
    request = replace(alone.request, is_streaming=frame.output_format is not OutputFormat.JSON)
    if request.is_streaming and request.num_sequences > 1:
        name = "n" if parameters.get("n", 1) != 1 else "best_of"
        raise Unsupported(f"parameters.{name}", "several sequences come only in an answer that is not streamed")
    requests = (request, *(replace(request, prompt=text) for text in rest))
    return Parsed(requests, (*tolerated, *alone.tolerated)[: lmi.MAX_TOLERATED])
