"""How each API answers an error: a table of statuses and kinds, and a function that writes the body.

The first row of a table that fits an error counts. An error that fits none keeps its own status, and its kind is the
one that the API gives to every error of that status. Pure: nothing here sends.
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
    """An error as it goes out. After the first byte only `body` does: it is a whole record of the stream."""

    status: int
    media_type: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


class Row(NamedTuple):
    """What an API answers for one class of errors."""

    cause: type[LmiError]
    status: int
    kind: str | None = None  # in the API's words
    in_answer: bool = False  # written in the form of the answer, because the request was understood
    param: str | None = None  # the field at fault, for errors that name none


class Write(Protocol[AnyFormat]):
    def __call__(self, error: ErrorFields, format: AnyFormat, *, in_answer: bool) -> tuple[str, bytes]:
        """Media type and body. `in_answer`: in the form of the answer or of its last record, else in a form for all."""


@dataclass(frozen=True, slots=True)
class ErrorRules(Generic[AnyFormat]):
    """How one API answers errors. `names`: its own names for fields of the contract with engines."""

    write: Write[AnyFormat]
    rows: tuple[Row, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    kind_of_status: Callable[[int], str | None] = lambda status: None

    def render(self, error: LmiError, format: AnyFormat, *, accepted: bool) -> Rendered:
        """`accepted`: the answer has begun, and the error is the last record of a stream; else it is the answer."""
        row = next((row for row in self.rows if isinstance(error, row.cause)), Row(LmiError, error.status))
        names = {**self.names, **format.field_names}
        fields = ErrorFields(
            error.spelled(names),
            row.status,
            row.kind or self.kind_of_status(row.status) or error.label,
            row.param or names.get(error.field or "", error.field),
        )
        media_type, body = self.write(fields, format, in_answer=accepted or row.in_answer)
        headers = {"Retry-After": str(error.retry_after_s)} if isinstance(error, Overloaded) else {}
        return Rendered(row.status, media_type, body, headers)

    def render_status(self, status: int, message: str, format: AnyFormat) -> Rendered:
        """An error of HTTP only: 404, 405, 408, 413, 415, 431."""
        fields = ErrorFields(message, status, self.kind_of_status(status))
        return Rendered(status, *self.write(fields, format, in_answer=False))


def written_by(whole: type[Formatter[Any]], stream: type[Formatter[Any]]) -> Write[AnswerFormat]:
    """An error as a body of `whole`, and in an answer as a record of `stream`."""

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
    """A stream ends with a record that the client raises, and the end that it waits for."""
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
    (  # where its clients look for a kind, they have OpenAI's; the others are our labels
        Row(UnknownModel, 404, "model_not_found", param="model"),
        Row(UnknownAdapter, 404, "model_not_found"),
        Row(PromptTooLong, 400, "context_length_exceeded"),
        Row(Overloaded, 429, "rate_limit_exceeded"),
        Row(UserCodeFailed, 424),
        Row(GenerationFailed, 500),
    ),
    openai_chat.WIRE_NAMES,
)
OPENAI_COMPLETIONS_ERRORS = replace(OPENAI_CHAT_ERRORS, names=openai.WIRE_NAMES)
