"""Which status, headers and body each error has at an API."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from msgspec import Struct, field

from lmi.errors import LmiError, PromptTooLong, Unauthorized
from lmi.http.refusals import refusal_headers
from lmi.types import AnswerFormat


class ErrorFields(NamedTuple):
    """An error as a body names it. `kind` is in the words of the API; the LMI API has one only
    under tgi_compat.
    """

    message: str
    # The status of HTTP.
    code: int
    kind: str | None = None
    # The field at fault.
    param: str | None = None
    request_id: str | None = None
    # What clients of the API act on.
    details: Mapping[str, object] | None = None


class RenderedError(Struct, frozen=True):
    """The response to an error. After the first byte only `body` is sent, which is a whole record
    of the stream.
    """

    status: int
    media_type: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


class ErrorRow(NamedTuple):
    """An API's answer to one class of errors."""

    cause: type[LmiError]
    status: int
    # In the API's words.
    kind: str | None = None
    # Written in the form of the answer, because the request was understood.
    in_answer: bool = False
    # The field at fault, for errors that name none.
    param: str | None = None
    # Words that clients look for, before the message; {max_context} is that of a PromptTooLong.
    opening: str = ""
    # What clients act on, in the API's words.
    details: Mapping[str, object] | None = None


class ErrorWriter(Protocol):
    """Writes an error in the form of one API."""

    def __call__(self, error: ErrorFields, format: Any, *, in_answer: bool) -> tuple[str, bytes]:
        """Return the media type and the body. With `in_answer` the body has the form of the answer,
        or is its last record.
        """


class ErrorRules(Struct, frozen=True):
    """How one API answers errors. `names` holds the API's names for fields of the contract with
    engines.

    The first row that matches an error counts. An error without a row keeps its status, and its
    kind is the one that the API gives to every error of that status, else its label.
    """

    write: ErrorWriter
    rows: tuple[ErrorRow, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    kind_of_status: Callable[[int], str | None] = lambda status: None

    def render(
        self,
        error: LmiError,
        format: AnswerFormat,
        *,
        accepted: bool,
        request_id: str | None = None,
    ) -> RenderedError:
        """Render an error as the whole answer, or with `accepted` as the last record of a stream
        that has begun.
        """
        row = self._row_of(type(error)) or ErrorRow(LmiError, error.status)
        names = {**self.names, **format.field_names}
        fields = ErrorFields(
            message=_opening(row, error) + error.spelled(names),
            code=row.status,
            kind=row.kind or self.kind_of_status(row.status) or error.label,
            param=row.param or names.get(error.field or "", error.field),
            request_id=request_id,
            details=row.details,
        )

        media_type, body = self.write(fields, format, in_answer=accepted or row.in_answer)
        return RenderedError(row.status, media_type, body, error_headers(error))

    def status_of(self, kind: type[LmiError]) -> int:
        """Return the status that errors of this class have here."""
        row = self._row_of(kind)
        return kind.status if row is None else row.status

    def _row_of(self, kind: type[LmiError]) -> ErrorRow | None:
        return next((row for row in self.rows if issubclass(kind, row.cause)), None)

    def render_status(
        self, status: int, message: str, format: AnswerFormat, request_id: str | None = None
    ) -> RenderedError:
        """Render an error of HTTP: 404, 405, 408, 413, 415, 431."""
        fields = ErrorFields(message, status, self.kind_of_status(status), request_id=request_id)
        return RenderedError(status, *self.write(fields, format, in_answer=False))


def _opening(row: ErrorRow, error: LmiError) -> str:
    if "{max_context}" not in row.opening:
        return row.opening

    limit = error.max_context if isinstance(error, PromptTooLong) else None
    return "" if limit is None else row.opening.format(max_context=limit)


def error_headers(error: LmiError) -> dict[str, str]:
    """Return the headers that say when and where to try again, if that can help, or that a key is
    missing.
    """
    if isinstance(error, Unauthorized):
        return {"WWW-Authenticate": "Bearer"}

    return refusal_headers(error)
