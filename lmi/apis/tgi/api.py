"""TGI's API at each of its paths."""

from functools import partial

from msgspec.structs import replace

from lmi import errors
from lmi.apis.base.api import Api
from lmi.apis.base.errors import ErrorRow, ErrorRules
from lmi.apis.base.formatters import ApiFormatters
from lmi.apis.lmi.api import TOO_LONG_AT_TGI
from lmi.apis.tgi.formatter import TgiStream, TgiWhole
from lmi.apis.tgi.schema import PARAMETERS, TgiFormat, parse, read


def _kind_of_status(status: int) -> str:
    """Return TGI's word for the errors of HTTP that have no row below."""
    if status < 500:
        return "validation"

    return "overloaded" if status == 503 else "generation"


FORMATTERS = ApiFormatters(TgiWhole, TgiStream)
TGI: Api[TgiFormat] = Api(
    name="tgi",
    # The 404 and 405 of this path are the LMI API's.
    paths=("/",),
    prefixes=("/info", "/health"),
    default_format=lambda model: TgiFormat(),
    read=read,
    parse=parse,
    formatter=FORMATTERS.formatter,
    errors=ErrorRules(
        FORMATTERS.write_error,
        (
            ErrorRow(errors.PromptTooLong, 422, "validation", opening=TOO_LONG_AT_TGI),
            ErrorRow(errors.InvalidRequest, 422, "validation"),
            ErrorRow(errors.GenerationFailed, 424, "generation"),
            ErrorRow(errors.Overloaded, 429, "overloaded"),
            ErrorRow(errors.EngineLost, 503, "incomplete_generation"),
        ),
        PARAMETERS.wire_names(input_token_ids="inputs"),
        _kind_of_status,
    ),
)
TGI_GENERATE = replace(
    TGI, name="tgi_generate", paths=("/generate",), read=partial(read, stream=False)
)
TGI_STREAM = replace(
    TGI, name="tgi_generate_stream", paths=("/generate_stream",), read=partial(read, stream=True)
)
