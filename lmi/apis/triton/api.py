"""The rows of Triton's generate extension: a whole answer, and a stream."""

from __future__ import annotations

from dataclasses import replace

from lmi.apis.base.api import Api, ErrorRules, Forms, Row
from lmi.apis.triton import schema
from lmi.apis.triton.formatter import TritonOneEvent, TritonStream, TritonWhole
from lmi.apis.triton.schema import TritonFormat
from lmi.errors import GenerationFailed
from lmi.types import OutputFormat

MODELS = ("/v2/models/{model}", "/v2/models/{model}/versions/{version}")
WHOLE = Forms(TritonWhole, TritonOneEvent)
EVENTS = Forms(TritonWhole, TritonStream)
TRITON: Api[TritonFormat] = Api(
    name="triton",
    paths=tuple(f"{model}/generate" for model in MODELS),
    prefixes=("/v2",),
    default_format=lambda model: TritonFormat(),
    read=schema.reader(OutputFormat.JSON),
    parse=schema.parse,
    formatter=lambda parsed: (EVENTS if parsed.request.is_streaming else WHOLE).formatter(parsed),
    errors=ErrorRules(EVENTS.write_error, (Row(GenerationFailed, 500),), schema.INPUTS.wire_names()),
)
TRITON_STREAM = replace(
    TRITON,
    name="triton_stream",
    paths=tuple(f"{model}/generate_stream" for model in MODELS),
    read=schema.reader(OutputFormat.SSE),
)
