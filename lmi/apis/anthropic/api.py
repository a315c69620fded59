"""Anthropic's Messages as an API, and the count of a message's tokens."""

from functools import partial

from msgspec.structs import replace

from lmi import errors
from lmi.apis.anthropic.formatter import MessageStream, MessageWhole
from lmi.apis.anthropic.schema import MESSAGES, THREAD_DETAILS, ThreadUnsupported, parse
from lmi.apis.base.api import Api
from lmi.apis.base.errors import ErrorRow, ErrorRules
from lmi.apis.base.formatters import ApiFormatters
from lmi.apis.openai import chat_schema
from lmi.apis.openai.answer_format import OpenAIFormat, default_format

# The type of an error, by its status. Further ones are those of their hundred.
TYPES_OF_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
# By these words agents know that they must shorten a conversation.
TOO_LONG = "prompt is too long: "


def _kind_of_status(status: int) -> str:
    """Return Anthropic's type of the errors that have no row below."""
    default = "invalid_request_error" if status < 500 else "api_error"
    return TYPES_OF_ERRORS.get(status, default)


FORMATTERS = ApiFormatters(MessageWhole, MessageStream)
ANTHROPIC: Api[OpenAIFormat] = Api(
    name="anthropic",
    paths=("/v1/messages",),
    default_format=default_format,
    read=chat_schema.read,
    parse=parse,
    formatter=FORMATTERS.formatter,
    errors=ErrorRules(
        FORMATTERS.write_error,
        (
            ErrorRow(ThreadUnsupported, 400, details=THREAD_DETAILS),
            ErrorRow(errors.UnknownModel, 404),
            ErrorRow(errors.UnknownAdapter, 404),
            ErrorRow(errors.PromptTooLong, 400, opening=TOO_LONG),
            # Its clients know this status, and come back after Retry-After.
            ErrorRow(errors.Overloaded, 529),
            ErrorRow(errors.GenerationFailed, 500),
        ),
        MESSAGES.wire_names(),
        _kind_of_status,
    ),
)
COUNT_TOKENS = replace(
    ANTHROPIC, name="anthropic_count", parse=partial(parse, is_counted=True), paths=()
)
