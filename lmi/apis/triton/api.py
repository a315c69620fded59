"""The rows of Triton's generate extension: a whole answer, and a stream."""

from __future__ import annotations

from dataclasses import replace

from lmi.apis.base.api import Api, ErrorRules, Row, written_by
from lmi.apis.base.formatter import Formatter
from lmi.apis.base.readers import Parsed
from lmi.apis.triton import schema
from lmi.apis.triton.formatter import TritonOneEvent, TritonStream, TritonWhole
from lmi.apis.triton.schema import TritonFormat
from lmi.errors import GenerationFailed
from lmi.types import OutputFormat

MODELS = ("/v2/models/{model}", "/v2/models/{model}/versions/{version}")


def _formatter(parsed: Parsed[TritonFormat]) -> Formatter[TritonFormat]:
    if not parsed.format.is_streamed:
        return TritonWhole(parsed)
    return TritonStream(parsed) if parsed.request.is_streaming else TritonOneEvent(parsed)


TRITON: Api[TritonFormat] = Api(
    name="triton",
    paths=tuple(f"{model}/generate" for model in MODELS),
    prefixes=("/v2",),
    default_format=schema.default_format,
    read=schema.reader(OutputFormat.JSON),
    parse=schema.parse,
    formatter=_formatter,
    errors=ErrorRules(written_by(TritonWhole, TritonStream), (Row(GenerationFailed, 500),), schema.INPUTS.wire_names()),
)
TRITON_STREAM = replace(
    TRITON,
    name="triton_stream",
    paths=tuple(f"{model}/generate_stream" for model in MODELS),
    read=schema.reader(OutputFormat.SSE),
)
