"""The APIs of the server: what each reads, how it answers, and which status each error has there.

A row holds a few functions. `read` decodes the body and chooses the format of its answer, `parse` checks its requests,
`formatter` writes their answer, and `errors` writes errors. Nothing here does I/O.

    bytes --read--> Message[Format] --parse--> Parsed[Format] --formatter--> Formatter[Format] --> bytes
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic

from lmi.errors import LmiError
from lmi.formatters.base import Formatter
from lmi.formatters.dynamic_batch import BatchStream, BatchWhole
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
from lmi.formatters.lmi import LmiFormatter, LmiWhole
from lmi.formatters.openai import CompletionLines, CompletionStream, CompletionWhole, OpenAIFormatter
from lmi.formatters.openai_chat import ChatLines, ChatStream, ChatWhole
from lmi.formatters.tgi import TgiStream, TgiWhole
from lmi.formatters.triton import TritonOneEvent, TritonStream, TritonWhole
from lmi.schemas import dynamic_batch, lmi, openai, openai_chat, tgi, triton
from lmi.schemas.common import Message, Parsed
from lmi.schemas.lmi import LmiFormat
from lmi.schemas.openai import OpenAIFormat
from lmi.schemas.tgi import TgiFormat
from lmi.schemas.triton import TritonFormat
from lmi.settings.config import ModelConfig
from lmi.types import AnswerFormat, Format, OutputFormat


@dataclass(frozen=True, slots=True)
class Api(Generic[Format]):
    """One API.

    `default_format` is the format of the answer to a body that `read` refuses. `read_for_events` reads the body of a
    client whose Accept asks for server-sent events. At /invocations a request selects the API with its `route` in
    Custom-Attributes, or with `body_field` in its body.
    """

    name: str
    prefixes: tuple[str, ...]  # of the paths whose 404, 405 and similar errors have this API's form
    default_format: Callable[[ModelConfig], Format]
    read: Callable[[bytes, str | None, ModelConfig], Message[Format]]
    parse: Callable[[Message[Format]], Parsed[Format]]
    formatter: Callable[[Parsed[Format]], Formatter[Format]]
    errors: ErrorRules[Format]
    read_for_events: Callable[[bytes, str | None, ModelConfig], Message[Format]] | None = None
    route: str = ""
    body_field: str = ""
    takes_user_code: bool = False  # formatters of user code take part
    json_end: bytes = b""  # ends an answer that is one JSON value

    def render_error(self, error: LmiError, format: Format, *, accepted: bool) -> Rendered:
        return self.errors.render(error, format, accepted=accepted)

    def render_status(self, status: int, message: str, format: Format) -> Rendered:
        return self.errors.render_status(status, message, format)

    def whole(self, media_type: str, body: bytes) -> bytes:
        """Return a body that is sent in one piece, with `json_end` if it is JSON."""
        return body + self.json_end if media_type == LmiWhole.media_type else body

    def for_accept(self, accept: str) -> Api[Format]:
        """Return this API with the `read` for a client with this Accept header."""
        if self.read_for_events is None or "text/event-stream" not in accept.lower():
            return self
        return replace(self, read=self.read_for_events)


AnyApi = Api[Any]


def _lmi_formatter(parsed: Parsed[LmiFormat]) -> LmiFormatter:
    return FORMATTERS[parsed.format.output_format](parsed)


def _triton_formatter(parsed: Parsed[TritonFormat]) -> Formatter[TritonFormat]:
    if not parsed.format.is_streamed:
        return TritonWhole(parsed)
    return TritonStream(parsed) if parsed.request.is_streaming else TritonOneEvent(parsed)


def _dynamic_batch_formatter(parsed: Parsed[AnswerFormat]) -> Formatter[AnswerFormat]:
    return BatchStream(parsed) if parsed.format.is_streamed else BatchWhole(parsed)


def _tgi_formatter(parsed: Parsed[TgiFormat]) -> Formatter[TgiFormat]:
    return TgiStream(parsed) if parsed.format.is_streamed else TgiWhole(parsed)


CHATS: dict[OutputFormat, type[OpenAIFormatter]] = {
    OutputFormat.JSON: ChatWhole,
    OutputFormat.JSONLINES: ChatLines,
    OutputFormat.SSE: ChatStream,
}
COMPLETIONS: dict[OutputFormat, type[OpenAIFormatter]] = {
    OutputFormat.JSON: CompletionWhole,
    OutputFormat.JSONLINES: CompletionLines,
    OutputFormat.SSE: CompletionStream,
}


def _chat_formatter(parsed: Parsed[OpenAIFormat]) -> OpenAIFormatter:
    return CHATS[parsed.format.output_format](parsed)


def _completion_formatter(parsed: Parsed[OpenAIFormat]) -> OpenAIFormatter:
    return COMPLETIONS[parsed.format.output_format](parsed)


LMI: Api[LmiFormat] = Api(
    name="lmi",
    prefixes=("/",),
    default_format=lmi.default_format,
    read=lmi.read,
    parse=lmi.parse,
    formatter=_lmi_formatter,
    errors=LMI_ERRORS,
    read_for_events=partial(lmi.read, accepts_events=True),
    takes_user_code=True,
    json_end=b"\n",
)

DYNAMIC_BATCH: Api[AnswerFormat] = Api(
    name="dynamic_batch",
    prefixes=(),
    default_format=dynamic_batch.default_format,
    read=dynamic_batch.read,
    parse=dynamic_batch.parse,
    formatter=_dynamic_batch_formatter,
    errors=DYNAMIC_BATCH_ERRORS,
    takes_user_code=True,
    json_end=b"\n",
)

TRITON: Api[TritonFormat] = Api(
    name="triton",
    prefixes=("/v2",),
    default_format=triton.default_format,
    read=triton.reader(OutputFormat.JSON),
    parse=triton.parse,
    formatter=_triton_formatter,
    errors=TRITON_ERRORS,
)
TRITON_STREAM = replace(TRITON, name="triton_stream", prefixes=(), read=triton.reader(OutputFormat.SSE))

OPENAI_CHAT: Api[OpenAIFormat] = Api(
    name="openai_chat",
    prefixes=("/v1/",),
    default_format=openai.default_format,
    read=openai_chat.read,
    parse=openai_chat.parse,
    formatter=_chat_formatter,
    errors=OPENAI_CHAT_ERRORS,
    route="/v1/chat/completions",
)
OPENAI_COMPLETIONS = replace(
    OPENAI_CHAT,
    name="openai_completions",
    prefixes=("/v1/completions",),
    read=openai.read,
    parse=openai.parse,
    formatter=_completion_formatter,
    errors=OPENAI_COMPLETIONS_ERRORS,
    route="/v1/completions",
)


# OpenAI's APIs at /invocations: a stream is lines, or events if Accept asks for them; body or settings may override it.
OPENAI_CHAT_LINES = replace(
    OPENAI_CHAT,
    name="openai_chat_lines",
    prefixes=(),
    read=partial(openai_chat.read, stream_format=OutputFormat.JSONLINES),
    read_for_events=partial(openai_chat.read, stream_format=OutputFormat.SSE),
    route="",
    body_field="messages",
    json_end=b"\n",
)
OPENAI_TEXT_LINES = replace(
    OPENAI_COMPLETIONS,
    name="openai_completions_lines",
    prefixes=(),
    read=partial(openai.read, stream_format=OutputFormat.JSONLINES),
    read_for_events=partial(openai.read, stream_format=OutputFormat.SSE),
    route="",
    body_field="prompt",
    json_end=b"\n",
)

TGI: Api[TgiFormat] = Api(
    name="tgi",  # at "/", whose 404 and 405 are the LMI API's
    prefixes=("/info", "/health"),
    default_format=tgi.default_format,
    read=tgi.read,
    parse=tgi.parse,
    formatter=_tgi_formatter,
    errors=TGI_ERRORS,
)
TGI_GENERATE = replace(
    TGI,
    name="tgi_generate",
    prefixes=("/generate",),
    read=partial(tgi.read, stream=False),
    route="/generate",
)
TGI_STREAM = replace(
    TGI,
    name="tgi_generate_stream",
    prefixes=("/generate_stream",),
    read=partial(tgi.read, stream=True),
    route="/generate_stream",
)

ROWS: tuple[AnyApi, ...] = (
    *(LMI, DYNAMIC_BATCH, TRITON, TRITON_STREAM),
    *(OPENAI_CHAT, OPENAI_CHAT_LINES, OPENAI_COMPLETIONS, OPENAI_TEXT_LINES),
    *(TGI, TGI_GENERATE, TGI_STREAM),
)
APIS = {api.name: api for api in ROWS}
BY_ROUTE = {api.route: replace(api, json_end=b"\n") for api in ROWS if api.route}
BY_FIELD = {api.body_field: api for api in ROWS if api.body_field}
"""Further APIs of /invocations. Their JSON ends with a newline, because clients read that path by lines."""


def api_at(path: str, model: ModelConfig) -> AnyApi:
    """Return the API with the longest prefix of a path, even if nothing is served there.

    With dynamic batches DYNAMIC_BATCH replaces LMI.
    """
    places = [(prefix, api) for api in APIS.values() for prefix in api.prefixes]
    api = max((place for place in places if path.startswith(place[0])), key=lambda place: len(place[0]))[1]
    return DYNAMIC_BATCH if api is LMI and model.dynamic_batch else api
