"""The rows of Anthropic's API: messages, and the number of their prompt's tokens, which has a route of its own."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from lmi.apis.anthropic import schema
from lmi.apis.anthropic.formatter import MessageStream, MessageWhole
from lmi.apis.base.api import Api, ErrorRules, Forms, Row
from lmi.apis.openai import chat_schema
from lmi.apis.openai.schema import OpenAIFormat, default_format
from lmi.errors import GenerationFailed, Overloaded, PromptTooLong, UnknownAdapter, UnknownModel

KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
TOO_LONG = "prompt is too long: "  # by which agents know that they must shorten a conversation
FORMS = Forms(MessageWhole, MessageStream)
ANTHROPIC: Api[OpenAIFormat] = Api(
    name="anthropic",
    paths=("/v1/messages",),
    default_format=default_format,
    read=chat_schema.read,
    parse=schema.parse,
    formatter=FORMS.formatter,
    errors=ErrorRules(
        FORMS.write_error,
        (
            Row(UnknownModel, 404),
            Row(UnknownAdapter, 404),
            Row(PromptTooLong, 400, opening=TOO_LONG),
            Row(Overloaded, 529),  # its clients know this status, and come back after Retry-After
            Row(GenerationFailed, 500),
        ),
        schema.MESSAGES.wire_names(),
        lambda status: KINDS.get(status, "invalid_request_error" if status < 500 else "api_error"),
    ),
)
COUNT_TOKENS = replace(ANTHROPIC, name="anthropic_count", parse=partial(schema.parse, is_counted=True), paths=())
