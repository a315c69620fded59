"""OpenAI's Responses as an API."""

from msgspec.structs import replace

from lmi.apis.base.api import Api
from lmi.apis.base.errors import ErrorFields
from lmi.apis.base.formatters import ApiFormatters
from lmi.apis.base.media_types import JSON, SSE
from lmi.apis.openai.answer_format import OpenAIFormat
from lmi.apis.openai.api import OPENAI_CHAT, OPENAI_CHAT_ERRORS
from lmi.apis.responses import schema
from lmi.apis.responses.formatter import ItemsStream, ItemsWhole
from lmi.apis.responses.state import ResponseState


def _write_error(error: ErrorFields, format: OpenAIFormat, *, in_answer: bool) -> tuple[str, bytes]:
    state: ResponseState | None = format.state
    if not in_answer or state is None:
        return JSON, ItemsWhole.error(error)

    error_object = {"code": error.kind or "server_error", "message": error.message}
    response = state.response("failed", error=error_object)
    return SSE, state.event("response.failed", response=response)


RESPONSES: Api[OpenAIFormat] = replace(
    OPENAI_CHAT,
    name="responses",
    paths=("/v1/responses",),
    prefixes=(),
    parse=schema.parse,
    formatter=ApiFormatters(ItemsWhole, ItemsStream).formatter,
    errors=replace(OPENAI_CHAT_ERRORS, write=_write_error, names=schema.RESPONSES.wire_names()),
)
