"""The LMI API, with a rolling batch. It also answers wherever no other API does."""

from functools import partial

from lmi import errors
from lmi.apis.base.api import Api
from lmi.apis.base.errors import ErrorFields, ErrorRow, ErrorRules
from lmi.apis.base.formatters import ApiFormatters
from lmi.apis.lmi.formatter import LmiEvents, LmiStream, LmiWhole, error_fields
from lmi.apis.lmi.schema import WIRE_NAMES, LmiFormat, parse, read

# Other APIs answer 400.
INVALID_STATUS = 424
# By these words clients of TGI know a prompt that is too long, and send a shorter one.
TOO_LONG_AT_TGI = "`inputs` tokens + `max_new_tokens` must be <= {max_context}: "
FORMATTERS = ApiFormatters(LmiWhole, LmiEvents, LmiStream)


def _write_error(error: ErrorFields, format: LmiFormat, *, in_answer: bool) -> tuple[str, bytes]:
    """Write an error. Only with tgi_compat it has a kind."""
    kind = error.kind
    if not format.tgi_compat:
        kind = None
    elif in_answer and kind == "overloaded":
        kind = "generation"

    error = error._replace(kind=kind)
    if in_answer:
        return FORMATTERS.write_error(error, format, in_answer=format.is_streamed)

    return LmiWhole.media_type, b"{%b}" % error_fields(error)


LMI: Api[LmiFormat] = Api(
    name="lmi",
    prefixes=("/",),
    default_format=lambda model: LmiFormat(tgi_compat=model.tgi_compat),
    read=read,
    parse=parse,
    formatter=FORMATTERS.formatter,
    errors=ErrorRules(
        _write_error,
        (
            ErrorRow(errors.MalformedRequest, INVALID_STATUS, "validation"),
            ErrorRow(
                errors.PromptTooLong,
                INVALID_STATUS,
                "validation",
                in_answer=True,
                opening=TOO_LONG_AT_TGI,
            ),
            ErrorRow(errors.InvalidRequest, INVALID_STATUS, "validation", in_answer=True),
            ErrorRow(errors.GenerationFailed, 424, "generation", in_answer=True),
            ErrorRow(errors.DeadlineExceeded, 504, "generation", in_answer=True),
            ErrorRow(errors.OutOfMemory, 507, "generation", in_answer=True),
            ErrorRow(errors.EngineLost, 503, "generation", in_answer=True),
        ),
        WIRE_NAMES,
        lambda status: "validation" if status < 500 else "overloaded",
    ),
    read_for_events=partial(read, accepts_events=True),
    takes_user_code=True,
    json_end=b"\n",
)
