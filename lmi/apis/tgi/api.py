"""The rows of TGI's API: `/` with `stream` in the body, `/generate` and `/generate_stream`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from lmi.apis.base.api import Api, ErrorRules, Forms, Row
from lmi.apis.tgi import schema
from lmi.apis.tgi.formatter import TgiStream, TgiWhole
from lmi.apis.tgi.schema import TgiFormat
from lmi.errors import EngineLost, GenerationFailed, InvalidRequest, Overloaded

FORMS = Forms(TgiWhole, TgiStream)
TGI: Api[TgiFormat] = Api(
    name="tgi",
    paths=("/",),  # whose 404 and 405 are the LMI API's
    prefixes=("/info", "/health"),
    default_format=lambda model: TgiFormat(),
    read=schema.read,
    parse=schema.parse,
    formatter=FORMS.formatter,
    errors=ErrorRules(
        FORMS.write_error,
        (
            Row(InvalidRequest, 422, "validation"),
            Row(GenerationFailed, 424, "generation"),
            Row(Overloaded, 429, "overloaded"),
            Row(EngineLost, 503, "incomplete_generation"),
        ),
        schema.PARAMETERS.wire_names(input_token_ids="inputs"),
        lambda status: "validation" if status < 500 else "overloaded" if status == 503 else "generation",
    ),
)
TGI_GENERATE = replace(TGI, name="tgi_generate", paths=("/generate",), read=partial(schema.read, stream=False))
TGI_STREAM = replace(
    TGI, name="tgi_generate_stream", paths=("/generate_stream",), read=partial(schema.read, stream=True)
)
