"""How each API answers an error: a table of statuses and kinds, and a function that writes the body.

The first row of a table that matches an error counts. An error without a row keeps its status, and its kind is the one
that the API gives to every error of that status, else its label. Nothing here does I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from lmi.apis.base.formatter import ErrorFields, Formatter
from lmi.errors import LmiError
from lmi.types import AnswerFormat

AnyFormat = TypeVar("AnyFormat", bound=AnswerFormat, contravariant=True)


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

    def status_of(self, kind: type[LmiError]) -> int:
        return next((row.status for row in self.rows if issubclass(kind, row.cause)), kind.status)

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
