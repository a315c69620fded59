"""The LMI API's row: its formatters, its errors, and what decodes a body."""

from __future__ import annotations

from functools import partial

from lmi.apis.base.api import Api, ErrorRules, Forms, Row
from lmi.apis.base.formatter import ErrorFields, error_fields
from lmi.apis.lmi import schema
from lmi.apis.lmi.formatter import LmiEvents, LmiStream, LmiWhole
from lmi.apis.lmi.schema import WIRE_NAMES, LmiFormat
from lmi.errors import DeadlineExceeded, EngineLost, GenerationFailed, InvalidRequest, MalformedRequest, OutOfMemory

INVALID_STATUS = 424  # other APIs answer 400
FORMS = Forms(LmiWhole, LmiEvents, LmiStream)


def _write_error(error: ErrorFields, format: LmiFormat, *, in_answer: bool) -> tuple[str, bytes]:
    kind = "generation" if in_answer and error.kind == "overloaded" else error.kind
    error = error._replace(kind=kind if format.tgi_compat else None)
    if in_answer:
        return FORMS.write_error(error, format, in_answer=format.is_streamed)
    return LmiWhole.media_type, b"{%b}" % error_fields(error)


ERRORS = ErrorRules(
    _write_error,
    (
        Row(MalformedRequest, INVALID_STATUS, "validation"),
        Row(InvalidRequest, INVALID_STATUS, "validation", in_answer=True),
        Row(GenerationFailed, 424, "generation", in_answer=True),
        Row(DeadlineExceeded, 504, "generation", in_answer=True),
        Row(OutOfMemory, 507, "generation", in_answer=True),
        Row(EngineLost, 503, "generation", in_answer=True),
    ),
    WIRE_NAMES,
    lambda status: "validation" if status < 500 else "overloaded",
)
LMI: Api[LmiFormat] = Api(
    name="lmi",
    prefixes=("/",),
    default_format=lambda model: LmiFormat(tgi_compat=model.tgi_compat),
    read=schema.read,
    parse=schema.parse,
    formatter=FORMS.formatter,
    errors=ERRORS,
    read_for_events=partial(schema.read, accepts_events=True),
    takes_user_code=True,
    json_end=b"\n",
)
