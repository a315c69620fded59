"""The rows of OpenAI's APIs: chats and completions, at their own paths and at /invocations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from lmi import errors
from lmi.apis.base.api import Api, ErrorRules, Forms, Row
from lmi.apis.base.readers import Message
from lmi.apis.openai import chat_schema, schema
from lmi.apis.openai.chat_formatter import ChatLines, ChatStream, ChatWhole
from lmi.apis.openai.formatter import CompletionLines, CompletionStream, CompletionWhole
from lmi.apis.openai.schema import OpenAIFormat
from lmi.types import OutputFormat

CHATS = Forms(ChatWhole, ChatStream, ChatLines)
OPENAI_CHAT_ERRORS = ErrorRules(
    CHATS.write_error,
    (  # errors whose kind clients look for have OpenAI's kind; the others have our labels
        Row(errors.Unauthorized, 401, "invalid_api_key"),
        Row(errors.UnknownModel, 404, "model_not_found", param="model"),
        Row(errors.UnknownAdapter, 404, "model_not_found", param="model"),
        Row(errors.PromptTooLong, 400, "context_length_exceeded"),
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
    default_format=schema.default_format,
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
    formatter=Forms(CompletionWhole, CompletionStream, CompletionLines).formatter,
    errors=replace(OPENAI_CHAT_ERRORS, names=schema.COMPLETION.wire_names()),
)


def _at_invocations(
    api: Api[OpenAIFormat], read: Callable[..., Message[OpenAIFormat]], body_field: str
) -> Api[OpenAIFormat]:
    """A stream is lines, or events if Accept asks for them; body or settings may override it."""
    lines, events = (partial(read, stream_format=form) for form in (OutputFormat.JSONLINES, OutputFormat.SSE))
    name = f"{api.name}_lines"
    return replace(api, name=name, read=lines, read_for_events=events, paths=(), body_field=body_field, json_end=b"\n")


OPENAI_CHAT_LINES = _at_invocations(OPENAI_CHAT, chat_schema.read, "messages")
OPENAI_TEXT_LINES = _at_invocations(OPENAI_COMPLETIONS, schema.read, "prompt")
