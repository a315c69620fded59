"""How each API answers an error: a table of statuses and kinds, and a function that writes the body.

The first row of a table that matches an error counts. An error without a row keeps its status, and its kind is the one
that the API gives to every error of that status, else its label. Nothing here does I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

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
    UnknownAdapter,
    UnknownModel,
    UserCodeFailed,
)
from lmi.formatters.base import ErrorFields, Formatter, plain_error
from lmi.formatters.dynamic_batch import BatchStream, BatchWhole
from lmi.formatters.lmi import LmiEvents, LmiFormatter, LmiStream, LmiWhole
from lmi.formatters.openai_chat import ChatLines, ChatStream, ChatWhole
from lmi.formatters.tgi import TgiStream, TgiWhole
from lmi.formatters.triton import TritonStream, TritonWhole
from lmi.schemas import lmi, openai, openai_chat, tgi, triton
from lmi.schemas.lmi import LmiFormat
from lmi.types import AnswerFormat, OutputFormat

AnyFormat = TypeVar("AnyFormat", bound=AnswerFormat, contravariant=True)

FORMATTERS: dict[OutputFormat, type[LmiFormatter]] = {
    OutputFormat.JSON: LmiWhole,
    OutputFormat.JSONLINES: LmiStream,
    OutputFormat.SSE: LmiEvents,
}


@dataclass(frozen=True, slots=True)
class Rendered:
    """The response to an error. After the first byte only `body` is sent, which is a whole record of the stream."""

    status: int
    media_type: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


class Row(NamedTuple):
    """An API's answer to one class of errors."""

    cause: type[LmiError]
    status: int
    kind: str | None = None  # in the API's words
    in_answer: bool = False  # written in the form of the answer, because the request was understood
    param: str | None = None  # the field at fault, for errors that name none


class Write(Protocol[AnyFormat]):
    def __call__(self, error: ErrorFields, format: AnyFormat, *, in_answer: bool) -> tuple[str, bytes]:
        """Return the media type and the body. With `in_answer` the body has the form of the answer or a last record."""


@dataclass(frozen=True, slots=True)
class ErrorRules(Generic[AnyFormat]):
    """How one API answers errors. `names` holds the API's names for fields of the contract with engines."""

    write: Write[AnyFormat]
    rows: tuple[Row, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    kind_of_status: Callable[[int], str | None] = lambda status: None

    def render(self, error: LmiError, format: AnyFormat, *, accepted: bool) -> Rendered:
        """Render an error as the whole answer, or with `accepted` as the last record of a stream that has begun."""
        row = next((row for row in self.rows if isinstance(error, row.cause)), Row(LmiError, error.status))
        names = {**self.names, **format.field_names}
        fields = ErrorFields(
            error.spelled(names),
            row.status,
            row.kind or self.kind_of_status(row.status) or error.label,
            row.param or names.get(error.field or "", error.field),
        )
        media_type, body = self.write(fields, format, in_answer=accepted or row.in_answer)
        return Rendered(row.status, media_type, body, retry_header(error))

    def render_status(self, status: int, message: str, format: AnyFormat) -> Rendered:
        """Render an error of HTTP: 404, 405, 408, 413, 415, 431."""
        fields = ErrorFields(message, status, self.kind_of_status(status))
        return Rendered(status, *self.write(fields, format, in_answer=False))


def retry_header(error: LmiError) -> dict[str, str]:
    """Return the header that says when to try again, if that can help."""
    return {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}


def written_by(whole: type[Formatter[Any]], stream: type[Formatter[Any]]) -> Write[AnswerFormat]:
    """Make a Write that writes an error as a body of `whole`, or inside an answer as a record of `stream`."""

    def write(error: ErrorFields, format: AnswerFormat, *, in_answer: bool) -> tuple[str, bytes]:
        formatter = stream if in_answer else whole
        return formatter.media_type, formatter.error(error)

    return write


def _write_lmi(error: ErrorFields, format: LmiFormat, *, in_answer: bool) -> tuple[str, bytes]:
    kind = "generation" if in_answer and error.kind == "overloaded" else error.kind
    error = error._replace(kind=kind if format.tgi_compat else None)
    if in_answer:
        formatter = FORMATTERS[format.output_format]
        return formatter.media_type, formatter.error(error)
    return LmiWhole.media_type, plain_error(error)


def _write_openai(error: ErrorFields, format: AnswerFormat, *, in_answer: bool) -> tuple[str, bytes]:
    """Write an error. In a stream it is a record that the client raises, and the end that the client waits for."""
    stream = ChatLines if format.output_format is OutputFormat.JSONLINES else ChatStream
    return written_by(ChatWhole, stream)(error, format, in_answer=in_answer)


def _lmi_kind(status: int) -> str:
    return "validation" if status < 500 else "overloaded"


def _tgi_kind(status: int) -> str:
    return "validation" if status < 500 else "overloaded" if status == 503 else "generation"


LMI_INVALID_STATUS = 424  # other APIs answer 400
LMI_ERRORS = ErrorRules(
    _write_lmi,
    (
        Row(MalformedRequest, LMI_INVALID_STATUS, "validation"),
        Row(InvalidRequest, LMI_INVALID_STATUS, "validation", in_answer=True),
        Row(GenerationFailed, 424, "generation", in_answer=True),
        Row(DeadlineExceeded, 504, "generation", in_answer=True),
        Row(OutOfMemory, 507, "generation", in_answer=True),
        Row(EngineLost, 503, "generation", in_answer=True),
    ),
    lmi.WIRE_NAMES,
    _lmi_kind,
)
DYNAMIC_BATCH_ERRORS: ErrorRules[AnswerFormat] = ErrorRules(
    written_by(BatchWhole, BatchStream), (Row(InvalidRequest, LMI_INVALID_STATUS),), lmi.WIRE_NAMES
)
TRITON_ERRORS: ErrorRules[AnswerFormat] = ErrorRules(
    written_by(TritonWhole, TritonStream), (Row(GenerationFailed, 500),), triton.WIRE_NAMES
)
TGI_ERRORS: ErrorRules[AnswerFormat] = ErrorRules(
    written_by(TgiWhole, TgiStream),
    (
        Row(InvalidRequest, 422, "validation"),
        Row(GenerationFailed, 424, "generation"),
        Row(Overloaded, 429, "overloaded"),
        Row(EngineLost, 503, "incomplete_generation"),
    ),
    tgi.WIRE_NAMES,
    _tgi_kind,
)
OPENAI_CHAT_ERRORS: ErrorRules[AnswerFormat] = ErrorRules(
    _write_openai,
    (  # errors whose kind clients look for have OpenAI's kind; the others have our labels
        Row(UnknownModel, 404, "model_not_found", param="model"),
        Row(UnknownAdapter, 404, "model_not_found", param="model"),
        Row(PromptTooLong, 400, "context_length_exceeded"),
        Row(Overloaded, 429, "rate_limit_exceeded"),
        Row(UserCodeFailed, 424),
        Row(GenerationFailed, 500),
    ),
    openai_chat.WIRE_NAMES,
)
OPENAI_COMPLETIONS_ERRORS = replace(OPENAI_CHAT_ERRORS, names=openai.WIRE_NAMES)
