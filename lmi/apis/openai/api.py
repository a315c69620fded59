"""OpenAI's chats and completions as APIs: at their own paths, and at /invocations."""

from collections.abc import Callable
from functools import partial

from msgspec.structs import replace

from lmi import errors
from lmi.apis.base.api import Api
from lmi.apis.base.body import Message
from lmi.apis.base.errors import ErrorRow, ErrorRules
from lmi.apis.base.formatters import ApiFormatters
from lmi.apis.openai import chat_formatter, chat_schema, formatter, schema
from lmi.apis.openai.answer_format import OpenAIFormat, default_format
from lmi.types import OutputFormat

# By these words clients know a prompt that is too long, and send a shorter one or ask another
# model.
TOO_LONG_AT_OPENAI = "This model's maximum context length is {max_context} tokens. However, "
CHATS = ApiFormatters(chat_formatter.ChatWhole, chat_formatter.ChatStream, chat_formatter.ChatLines)
TEXTS = ApiFormatters(
    formatter.CompletionWhole, formatter.CompletionStream, formatter.CompletionLines
)
OPENAI_CHAT_ERRORS = ErrorRules(
    CHATS.write_error,
    # These errors have OpenAI's kinds, because clients look for them. The others have our labels.
    (
        ErrorRow(errors.Unauthorized, 401, "invalid_api_key"),
        ErrorRow(errors.UnknownModel, 404, "model_not_found", param="model"),
        ErrorRow(errors.UnknownAdapter, 404, "model_not_found", param="model"),
        ErrorRow(errors.PromptTooLong, 400, "context_length_exceeded", opening=TOO_LONG_AT_OPENAI),
        ErrorRow(errors.Overloaded, 429, "rate_limit_exceeded"),
        ErrorRow(errors.UserCodeFailed, 424),
        ErrorRow(errors.GenerationFailed, 500),
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
