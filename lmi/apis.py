"""The APIs of the server: what each reads, how it answers, and which status each error has there.

A row is a handful of functions. `read` decodes the body and says in which format it is answered, `parse` checks its
requests, `formatter` writes their answer; `render_error` answers an error of ours, `render_status` one of HTTP only
(404, 405, 408, 413, 415, 431). Pure: nothing here sends.

    bytes --read--> Message[Format] --parse--> Parsed[Format] --formatter--> Formatter[Format] --> bytes
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from lmi.errors import (
    DeadlineExceeded,
    EngineLost,
    GenerationFailed,
    InvalidRequest,
    LmiError,
    MalformedRequest,
    OutOfMemory,
    Overloaded,
    PromptTooLong,
    Unavailable,
    UnknownModel,
)
from lmi.formatters.base import ErrorFields, Formatter, plain_error
from lmi.formatters.dynamic_batch import BatchStream, BatchWhole
from lmi.formatters.lmi import LmiEvents, LmiFormatter, LmiStream, LmiWhole
from lmi.formatters.openai import CompletionLines, CompletionStream, CompletionWhole, OpenAIFormatter, error_object
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
class Rendered:
    """An error as it goes out. After the first byte only `body` does: it is a whole record of the stream."""

    status: int
    media_type: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


AnyFormat = TypeVar("AnyFormat", bound=AnswerFormat, contravariant=True)


class RenderError(Protocol[AnyFormat]):
    def __call__(self, error: LmiError, format: AnyFormat, *, accepted: bool) -> Rendered:
        """`accepted`: the answer has begun, and the error is the last record of a stream; else it is the answer."""


class RenderStatus(Protocol[AnyFormat]):
    def __call__(self, status: int, message: str, format: AnyFormat) -> Rendered: ...


@dataclass(frozen=True, slots=True)
class Api(Generic[Format]):
    """One API.

    `default_format` is the format of the answer to a body that `read` refuses. `read_for_events` reads the body of a
    client whose Accept asks for server-sent events. At /invocations Custom-Attributes may name the API by `route`, or a
    body chooses it by having `body_field`.
    """

    name: str
    prefixes: tuple[str, ...]  # of the paths whose 404, 405 and the like are answered as this API does
    default_format: Callable[[ModelConfig], Format]
    read: Callable[[bytes, str | None, ModelConfig], Message[Format]]
    parse: Callable[[Message[Format]], Parsed[Format]]
    formatter: Callable[[Parsed[Format]], Formatter[Format]]
    render_error: RenderError[Format]
    render_status: RenderStatus[Format]
    read_for_events: Callable[[bytes, str | None, ModelConfig], Message[Format]] | None = None
    route: str = ""
    body_field: str = ""
    is_customisable: bool = False  # the model's own formatters take part
    json_end: bytes = b""  # ends an answer that is one JSON value

    def whole(self, media_type: str, body: bytes) -> bytes:
        """A body that goes out in one piece."""
        return body + self.json_end if media_type == LmiWhole.media_type else body

    def for_accept(self, accept: str) -> Api[Format]:
        """This API as it reads the body of a client with this Accept header."""
        if self.read_for_events is None or "text/event-stream" not in accept.lower():
            return self
        return replace(self, read=self.read_for_events)


AnyApi = Api[Any]

FORMATTERS: dict[OutputFormat, type[LmiFormatter]] = {
    OutputFormat.JSON: LmiWhole,
    OutputFormat.JSONLINES: LmiStream,
    OutputFormat.SSE: LmiEvents,
}

LMI_INVALID_STATUS = 424  # every InvalidRequest; other APIs say 400
CLIENTS_FAULTS = (404, 413, 415)  # of errors that are no InvalidRequest
OWN_FAULTS = (InvalidRequest, GenerationFailed, DeadlineExceeded, OutOfMemory)
"""Errors of a request itself. One that was understood is answered in its own form even before an engine has it."""


def _lmi_formatter(parsed: Parsed[LmiFormat]) -> LmiFormatter:
    return FORMATTERS[parsed.format.output_format](parsed)


def _render_lmi_error(error: LmiError, format: LmiFormat, *, accepted: bool) -> Rendered:
    accepted = accepted or isinstance(error, EngineLost)  # the engine had it, so it has the form of an answer
    status = LMI_INVALID_STATUS if isinstance(error, InvalidRequest) else error.status
    fields = ErrorFields(
        _wire_message(error, {**lmi.WIRE_NAMES, **format.field_names}),
        status,
        _tgi_type(error, accepted) if format.tgi_compat else None,
    )
    headers = {"Retry-After": str(error.retry_after_s)} if isinstance(error, Overloaded) else {}
    if accepted or (isinstance(error, OWN_FAULTS) and not isinstance(error, MalformedRequest)):
        formatter = FORMATTERS[format.output_format]
        return Rendered(status, formatter.media_type, formatter.error(fields), headers)
    return Rendered(status, LmiWhole.media_type, plain_error(fields), headers)


def _render_lmi_status(status: int, message: str, format: LmiFormat) -> Rendered:
    tgi_type = None if not format.tgi_compat else "validation" if status < 500 else "overloaded"
    return Rendered(status, LmiWhole.media_type, plain_error(ErrorFields(message, status, tgi_type)))


def _wire_message(error: LmiError, wire_names: Mapping[str, str]) -> str:
    """The error's text, with the client's name of the field where the engine's contract has another.

    A refusal that came over the engine's socket is a text alone, so the name is read off its beginning.
    """
    name, space, rest = str(error).partition(" ")
    return wire_names.get(name, name) + space + rest if isinstance(error, InvalidRequest) else str(error)


def _tgi_type(error: LmiError, accepted: bool) -> str:
    if isinstance(error, InvalidRequest) or error.status in CLIENTS_FAULTS:
        return "validation"
    return "overloaded" if isinstance(error, Overloaded | Unavailable) and not accepted else "generation"


def _triton_formatter(parsed: Parsed[TritonFormat]) -> Formatter[TritonFormat]:
    if not parsed.format.is_streamed:
        return TritonWhole(parsed)
    return TritonStream(parsed) if parsed.request.is_streaming else TritonOneEvent(parsed)


def _render_triton_error(error: LmiError, format: AnswerFormat, *, accepted: bool) -> Rendered:
    status = 500 if isinstance(error, GenerationFailed) else error.status
    fields = ErrorFields(_wire_message(error, triton.WIRE_NAMES), status)
    headers = {"Retry-After": str(error.retry_after_s)} if isinstance(error, Overloaded) else {}
    formatter = TritonStream if accepted else TritonWhole
    return Rendered(status, formatter.media_type, formatter.error(fields), headers)


def _render_triton_status(status: int, message: str, format: AnswerFormat) -> Rendered:
    return Rendered(status, TritonWhole.media_type, TritonWhole.error(ErrorFields(message, status)))


def _dynamic_batch_formatter(parsed: Parsed[AnswerFormat]) -> Formatter[AnswerFormat]:
    return BatchStream(parsed) if parsed.format.is_streamed else BatchWhole(parsed)


def _render_dynamic_batch_error(error: LmiError, format: AnswerFormat, *, accepted: bool) -> Rendered:
    status = LMI_INVALID_STATUS if isinstance(error, InvalidRequest) else error.status
    headers = {"Retry-After": str(error.retry_after_s)} if isinstance(error, Overloaded) else {}
    formatter = BatchStream if accepted else BatchWhole
    body = formatter.error(
        ErrorFields(_wire_message(error, {**dynamic_batch.WIRE_NAMES, **format.field_names}), status)
    )
    return Rendered(status, formatter.media_type, body, headers)


def _render_dynamic_batch_status(status: int, message: str, format: AnswerFormat) -> Rendered:
    return Rendered(status, BatchWhole.media_type, BatchWhole.error(ErrorFields(message, status)))


TGI_ERRORS: tuple[tuple[type[LmiError], int, str], ...] = (
    (InvalidRequest, 422, "validation"),
    (GenerationFailed, 424, "generation"),
    (Overloaded, 429, "overloaded"),
    (EngineLost, 503, "incomplete_generation"),
    (Unavailable, 503, "overloaded"),
)
"""Status and error_type of TGI; the first row that fits counts."""


def _tgi_formatter(parsed: Parsed[TgiFormat]) -> Formatter[TgiFormat]:
    return TgiStream(parsed) if parsed.format.is_streamed else TgiWhole(parsed)


def _render_tgi_error(error: LmiError, format: AnswerFormat, *, accepted: bool) -> Rendered:
    rows = ((status, kind) for cause, status, kind in TGI_ERRORS if isinstance(error, cause))
    status, kind = next(rows, (error.status, _tgi_status_type(error.status)))
    formatter = TgiStream if accepted else TgiWhole
    headers = {"Retry-After": str(error.retry_after_s)} if isinstance(error, Overloaded) else {}
    body = formatter.error(ErrorFields(_wire_message(error, tgi.WIRE_NAMES), status, kind))
    return Rendered(status, formatter.media_type, body, headers)


def _render_tgi_status(status: int, message: str, format: AnswerFormat) -> Rendered:
    body = TgiWhole.error(ErrorFields(message, status, _tgi_status_type(status)))
    return Rendered(status, TgiWhole.media_type, body)


def _tgi_status_type(status: int) -> str:
    return "validation" if status < 500 else "overloaded" if status == 503 else "generation"


OPENAI_STATUS: dict[type[LmiError], int] = {Overloaded: 429, GenerationFailed: 500}
"""Where OpenAI's clients expect another one."""


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


def _render_openai_error(wire_names: Mapping[str, str]) -> RenderError[AnswerFormat]:
    def render(error: LmiError, format: AnswerFormat, *, accepted: bool) -> Rendered:
        status = OPENAI_STATUS.get(type(error), error.status)
        names = {**wire_names, **format.field_names}
        message, name = _wire_message(error, names), getattr(error, "name", None)
        body = error_object(
            message,
            status,
            param="model" if isinstance(error, UnknownModel) else names.get(name or "", name),
            code=_openai_code(error),
        )
        headers = {"Retry-After": str(error.retry_after_s)} if isinstance(error, Overloaded) else {}
        if accepted:  # a record that the client raises, and the end that it waits for
            stream = ChatLines if format.output_format is OutputFormat.JSONLINES else ChatStream
            return Rendered(status, stream.media_type, stream.record(body) + stream.done, headers)
        return Rendered(status, ChatWhole.media_type, body, headers)

    return render


def _openai_code(error: LmiError) -> str:
    """Those that clients look for have OpenAI's names, the others ours."""
    if isinstance(error, UnknownModel):
        return "model_not_found"
    if isinstance(error, Overloaded):
        return "rate_limit_exceeded"
    return "context_length_exceeded" if isinstance(error, PromptTooLong) else error.label


def _render_openai_status(status: int, message: str, format: AnswerFormat) -> Rendered:
    return Rendered(status, ChatWhole.media_type, error_object(message, status))


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
    render_error=_render_lmi_error,
    render_status=_render_lmi_status,
    read_for_events=partial(lmi.read, accepts_events=True),
    is_customisable=True,
    json_end=b"\n",
)

DYNAMIC_BATCH: Api[AnswerFormat] = Api(
    name="dynamic_batch",
    prefixes=(),
    default_format=dynamic_batch.default_format,
    read=dynamic_batch.read,
    parse=dynamic_batch.parse,
    formatter=_dynamic_batch_formatter,
    render_error=_render_dynamic_batch_error,
    render_status=_render_dynamic_batch_status,
    is_customisable=True,
    json_end=b"\n",
)

TRITON: Api[TritonFormat] = Api(
    name="triton",
    prefixes=("/v2",),
    default_format=triton.default_format,
    read=triton.reader(OutputFormat.JSON),
    parse=triton.parse,
    formatter=_triton_formatter,
    render_error=_render_triton_error,
    render_status=_render_triton_status,
)
TRITON_STREAM = replace(TRITON, name="triton_stream", prefixes=(), read=triton.reader(OutputFormat.SSE))

OPENAI_CHAT: Api[OpenAIFormat] = Api(
    name="openai_chat",
    prefixes=("/v1/",),
    default_format=openai.default_format,
    read=openai_chat.read,
    parse=openai_chat.parse,
    formatter=_chat_formatter,
    render_error=_render_openai_error(openai_chat.WIRE_NAMES),
    render_status=_render_openai_status,
    route="/v1/chat/completions",
)
OPENAI_COMPLETIONS = replace(
    OPENAI_CHAT,
    name="openai_completions",
    prefixes=("/v1/completions",),
    read=openai.read,
    parse=openai.parse,
    formatter=_completion_formatter,
    render_error=_render_openai_error(openai.WIRE_NAMES),
    route="/v1/completions",
)


# OpenAI's APIs at /invocations: a stream is lines or events, unless body or settings name the other.
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
    render_error=_render_tgi_error,
    render_status=_render_tgi_status,
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
"""The APIs that /invocations serves beside its own; the newline is what clients read that path by."""


def api_at(path: str, model: ModelConfig) -> AnyApi:
    """The API that a path belongs to, also where nothing is served: the one with the longest prefix.

    With dynamic batches that API takes the place of the LMI API.
    """
    places = [(prefix, api) for api in APIS.values() for prefix in api.prefixes]
    api = max((place for place in places if path.startswith(place[0])), key=lambda place: len(place[0]))[1]
    return DYNAMIC_BATCH if api is LMI and model.dynamic_batch else api
