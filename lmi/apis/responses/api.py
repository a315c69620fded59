"""The row of OpenAI's Responses."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from lmi.apis.base.api import Api, Forms
from lmi.apis.base.formatter import JSON, SSE, ErrorFields
from lmi.apis.openai import chat_schema
from lmi.apis.openai.api import OPENAI_CHAT, OPENAI_CHAT_ERRORS
from lmi.apis.openai.schema import OpenAIFormat, default_format
from lmi.apis.responses import schema
from lmi.apis.responses.formatter import ItemsStream, ItemsWhole
from lmi.apis.responses.schema import ResponseFormat
from lmi.types import AnswerFormat


def _write_error(error: ErrorFields, format: AnswerFormat, *, in_answer: bool) -> tuple[str, bytes]:
    if in_answer and isinstance(format, ResponseFormat):
        return SSE, format.state.failed(error)
    return JSON, ItemsWhole.error(error)


RESPONSES: Api[OpenAIFormat] = replace(
    OPENAI_CHAT,
    name="responses",
    paths=("/v1/responses",),
    prefixes=(),
    default_format=partial(default_format, kind=ResponseFormat),
    read=partial(chat_schema.read, kind=ResponseFormat),
    parse=schema.parse,
    formatter=Forms(ItemsWhole, ItemsStream).formatter,
    errors=replace(OPENAI_CHAT_ERRORS, write=_write_error, names=schema.RESPONSES.wire_names()),
)
