"""OpenAI's chats and completions as APIs: at their own paths, and at /invocations."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from lmi import errors
from lmi.apis.base.api import TOO_LONG_AT_OPENAI, Api, ErrorRules, Forms, Row
from lmi.apis.base.readers import Message
from lmi.apis.openai import chat_formatter, chat_schema, formatter, schema
from lmi.apis.openai.answer_format import OpenAIFormat, default_format
from lmi.types import OutputFormat

CHATS = Forms(chat_formatter.ChatWhole, chat_formatter.ChatStream, chat_formatter.ChatLines)
TEXTS = Forms(formatter.CompletionWhole, formatter.CompletionStream, formatter.CompletionLines)
OPENAI_CHAT_ERRORS = ErrorRules(
    CHATS.write_error,
    # These errors have OpenAI's kinds, because clients look for them. The others have our labels.
    (
        Row(errors.Unauthorized, 401, "invalid_api_key"),
        Row(errors.UnknownModel, 404, "model_not_found", param="model"),
        Row(errors.UnknownAdapter, 404, "model_not_found", param="model"),
        Row(errors.PromptTooLong, 400, "context_length_exceeded", opening=TOO_LONG_AT_OPENAI),
        Row(errors.Overloaded, 429, "rate_limit_exceeded"),
        Row(errors.UserCodeFailed, 424),
        Row(errors.GenerationFailed, 500),
    ),
    chat_schema.CHAT.wire_names(),
)
OPENAI_CHAT: Api[OpenAIFormat] = Api(
    name="openai_chat",
    paths=("/v1/chat/completions",),
    prefixes=("/v1/", "/tokenize", "/detokenize"),
    default_format=default_format,
    read=chat_schema.read,
    parse=chat_schema.parse,
    formatter=CHATS.formatter,
    errors=OPENAI_CHAT_ERRORS,
)
OPENAI_COMPLETIONS = replace(
    OPENAI_CHAT,
    name="openai_completions",
    paths=("/v1/completions",),
    read=schema.read,
    parse=schema.parse,
    formatter=TEXTS.formatter,
    errors=replace(OPENAI_CHAT_ERRORS, names=schema.COMPLETION.wire_names()),
)


def _at_invocations(api: Api[OpenAIFormat], body_field: str) -> Api[OpenAIFormat]:
    """Return the API as it is at /invocations. There a stream is lines, or events if Accept asks
    for them, unless the body or the server's settings say otherwise.
    """
    read_body: Callable[..., Message[OpenAIFormat]] = api.read
    name = f"{api.name}_lines"

    return replace(
        api,
        name=name,
        read=partial(read_body, stream_format=OutputFormat.JSONLINES),
        read_for_events=partial(read_body, stream_format=OutputFormat.SSE),
        paths=(),
        body_field=body_field,
        json_end=b"\n",
    )


OPENAI_CHAT_LINES = _at_invocations(OPENAI_CHAT, "messages")
OPENAI_TEXT_LINES = _at_invocations(OPENAI_COMPLETIONS, "prompt")
