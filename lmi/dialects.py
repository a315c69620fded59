"""The doors of the server: what each reads, how it answers, and which status each error has there.

A row is a handful of functions. `read` gives the body and the form of its answer, `parse` the request, `formatter` the
writer of its answer; `errors` answers what went wrong. Later doors add a row. Pure: nothing here sends.

    frame = dialect.default_frame(model)
    try:
        message = dialect.read(body, content_type, model)
        frame = message.frame
        parsed = dialect.parse(message)
        ...
    except LmiError as error:
        rendered = dialect.render_error(error, frame, accepted=...)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from lmi.errors import LmiError
from lmi.formatters.base import Formatter
from lmi.formatters.dynamic_batch import TextLines, TextList
from lmi.formatters.errors import (
    DYNAMIC_BATCH_ERRORS,
    FORMATTERS,
    LMI_ERRORS,
    OPENAI_CHAT_ERRORS,
    OPENAI_COMPLETIONS_ERRORS,
    TGI_ERRORS,
    TRITON_ERRORS,
    ErrorRules,
    Rendered,
)
from lmi.formatters.json_object import JsonObject
from lmi.formatters.openai import Completion, CompletionLines, CompletionStream, OpenAIFormatter
from lmi.formatters.openai_chat import Chat, ChatLines, ChatStream
from lmi.formatters.tgi import TgiEvents, TgiObject
from lmi.formatters.triton import Events, Generate, OneEvent
from lmi.schemas import dynamic_batch, lmi, openai, openai_chat, tgi, triton
from lmi.schemas.common import Message, Parsed
from lmi.settings.config import ModelConfig
from lmi.types import Frame, OutputFormat


@dataclass(frozen=True, slots=True)
class Dialect:
    """One door."""

    name: str
    prefixes: tuple[str, ...]  # of the paths whose 404, 405 and the like are told in its way
    default_frame: Callable[[ModelConfig], Frame]
    read: Callable[[bytes, str | None, ModelConfig], Message]
    parse: Callable[[Message], Parsed]
    formatter: Callable[[Parsed], Formatter]
    errors: ErrorRules
    takes_user_code: bool = False  # formatters of user code take part
    json_end: bytes = b""  # stands behind an answer that is one JSON value

    def render_error(self, error: LmiError, frame: Frame, *, accepted: bool) -> Rendered:
        return self.errors.render(error, frame, accepted=accepted)

    def render_status(self, status: int, message: str, frame: Frame) -> Rendered:
        return self.errors.render_status(status, message, frame)

    def whole(self, media_type: str, body: bytes) -> bytes:
        """A body that goes out in one piece."""
        return body + self.json_end if media_type == JsonObject.media_type else body


def _lmi_formatter(parsed: Parsed) -> Formatter:
    return FORMATTERS[parsed.request.output_format](parsed.request)


def _triton_formatter(parsed: Parsed) -> Formatter:
    request, echo = parsed.request, parsed.echo
    kind = Generate if request.output_format is OutputFormat.JSON else Events if request.is_streaming else OneEvent
    return kind(request, echo.head, echo.outputs, echo.num_answers)


def _dynamic_batch_formatter(parsed: Parsed) -> Formatter:
    return (TextLines if parsed.requests[0].is_streaming else TextList)(parsed.requests)


def _tgi_formatter(parsed: Parsed) -> Formatter:
    if parsed.request.is_streaming:
        return TgiEvents(parsed.request)
    return TgiObject(parsed.request, is_list=parsed.echo.is_list)


CHATS: dict[OutputFormat, type[OpenAIFormatter]] = {
    OutputFormat.JSON: Chat,
    OutputFormat.JSONLINES: ChatLines,
    OutputFormat.SSE: ChatStream,
}
COMPLETIONS: dict[OutputFormat, type[OpenAIFormatter]] = {
    OutputFormat.JSON: Completion,
    OutputFormat.JSONLINES: CompletionLines,
    OutputFormat.SSE: CompletionStream,
}


def _chat_formatter(parsed: Parsed) -> Formatter:
    return CHATS[parsed.requests[0].output_format](parsed)


def _completion_formatter(parsed: Parsed) -> Formatter:
    return COMPLETIONS[parsed.requests[0].output_format](parsed)


LMI = Dialect(
    name="lmi",
    prefixes=("/",),
    default_frame=lmi.default_frame,
    read=lmi.read,
    parse=lmi.parse,
    formatter=_lmi_formatter,
    errors=LMI_ERRORS,
    takes_user_code=True,
    json_end=b"\n",
)

LMI_EVENTS = replace(LMI, prefixes=(), read=partial(lmi.read, accepts_events=True))
"""The LMI door to a client whose Accept asks for server-sent events."""

DYNAMIC_BATCH = Dialect(
    name="dynamic_batch",
    prefixes=(),
    default_frame=dynamic_batch.default_frame,
    read=dynamic_batch.read,
    parse=dynamic_batch.parse,
    formatter=_dynamic_batch_formatter,
    errors=DYNAMIC_BATCH_ERRORS,
    takes_user_code=True,
    json_end=b"\n",
)

TRITON = Dialect(
    name="triton",
    prefixes=("/v2",),
    default_frame=triton.default_frame,
    read=triton.reader(OutputFormat.JSON),
    parse=triton.parse,
    formatter=_triton_formatter,
    errors=TRITON_ERRORS,
)
TRITON_STREAM = replace(TRITON, name="triton_stream", prefixes=(), read=triton.reader(OutputFormat.SSE))

OPENAI_CHAT = Dialect(
    name="openai_chat",
    prefixes=("/v1/",),
    default_frame=openai.default_frame,
    read=openai_chat.read,
    parse=openai_chat.parse,
    formatter=_chat_formatter,
    errors=OPENAI_CHAT_ERRORS,
)
OPENAI_COMPLETIONS = replace(
    OPENAI_CHAT,
    name="openai_completions",
    prefixes=("/v1/completions",),
    read=openai.read,
    parse=openai.parse,
    formatter=_completion_formatter,
    errors=OPENAI_COMPLETIONS_ERRORS,
)


# The same doors at /invocations: a stream is lines or events, unless body or settings name the other.
OPENAI_CHAT_LINES = replace(
    OPENAI_CHAT,
    name="openai_chat_lines",
    prefixes=(),
    read=partial(openai_chat.read, stream_format=OutputFormat.JSONLINES),
    json_end=b"\n",
)
OPENAI_CHAT_EVENTS = replace(OPENAI_CHAT_LINES, read=partial(openai_chat.read, stream_format=OutputFormat.SSE))
OPENAI_TEXT_LINES = replace(
    OPENAI_COMPLETIONS,
    name="openai_completions_lines",
    prefixes=(),
    read=partial(openai.read, stream_format=OutputFormat.JSONLINES),
    json_end=b"\n",
)
OPENAI_TEXT_EVENTS = replace(OPENAI_TEXT_LINES, read=partial(openai.read, stream_format=OutputFormat.SSE))

TGI = Dialect(
    name="tgi",  # at "/", whose 404 and 405 are the LMI door's
    prefixes=("/info", "/health"),
    default_frame=tgi.default_frame,
    read=tgi.read,
    parse=tgi.parse,
    formatter=_tgi_formatter,
    errors=TGI_ERRORS,
)
TGI_GENERATE = replace(TGI, name="tgi_generate", prefixes=("/generate",), read=partial(tgi.read, stream=False))
TGI_STREAM = replace(
    TGI, name="tgi_generate_stream", prefixes=("/generate_stream",), read=partial(tgi.read, stream=True)
)

ROWS = (
    *(LMI, DYNAMIC_BATCH, TRITON, TRITON_STREAM, TGI, TGI_GENERATE, TGI_STREAM),
    *(OPENAI_CHAT, OPENAI_CHAT_LINES, OPENAI_COMPLETIONS, OPENAI_TEXT_LINES),
)
DIALECTS: dict[str, Dialect] = {dialect.name: dialect for dialect in ROWS}


def dialect_at(path: str, model: ModelConfig) -> Dialect:
    """The door that a path belongs to, also where nothing is: the one with the longest prefix.

    Under the dynamic-batch schema what else is the LMI door's is answered in its way.
    """
    places = [(prefix, dialect) for dialect in DIALECTS.values() for prefix in dialect.prefixes]
    dialect = max((place for place in places if path.startswith(place[0])), key=lambda place: len(place[0]))[1]
    return DYNAMIC_BATCH if dialect is LMI and model.dynamic_batch else dialect
