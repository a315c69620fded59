"""What an API is: how it reads a body, how it answers, and which status and body each error has
there.

bytes --read--> Message[Format] --parse--> Parsed[Format] --formatter--> Formatter[Format] --> bytes

A formatter turns the Deltas of one answer into records, each sent as one body message. orjson
writes strings and floats, so NaN and infinities become null.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, NamedTuple, Self

from lmi.apis.base.readers import Message, Parsed
from lmi.errors import LmiError, PromptTooLong, Unauthorized
from lmi.http.refusals import refusal_headers
from lmi.settings.config import ModelConfig
from lmi.types import Answer, AnswerFormat, Delta, Format, OutputFormat, Token, WaitStatus

NO_TOKEN = Token(id=-1, text="", is_special=True)
"""The token of an empty step, as the reference writes it."""

# By these words clients know a prompt that is too long, and send a shorter one or ask another
# model.
TOO_LONG_AT_OPENAI = "This model's maximum context length is {max_context} tokens. However, "
TOO_LONG_AT_TGI = "`inputs` tokens + `max_new_tokens` must be <= {max_context}: "
JSON = "application/json"
JSONLINES = "application/jsonlines"
SSE = "text/event-stream"
ESCAPES = {char.encode(): b"\\u%04x" % ord(char) for char in "\x85\u2028\u2029"}


def joined(tokens: Sequence[Token]) -> Token:
    """Return the tokens of one step as one: the last one's id, and text and log-prob of all.

    A step is one record, because some clients lose records that a platform passes on together.
    """
    if len(tokens) == 1:
        return tokens[0]

    log_probs = [token.log_prob for token in tokens]
    log_prob = None
    if None not in log_probs:
        log_prob = sum(filter(None, log_probs))

    top = list[Token]()
    for token in tokens:
        top += token.top or ()

    return Token(
        id=tokens[-1].id,
        text=text_of(tokens),
        log_prob=log_prob,
        is_special=all(token.is_special for token in tokens),
        top=top,
    )


def text_of(tokens: Sequence[Token]) -> str:
    """Return the text of the tokens of one step."""
    return tokens[0].text if len(tokens) == 1 else "".join([token.text for token in tokens])


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


class AsyncFormatter(ABC):
    """Turns the Deltas of one answer into the records of its body. It may wait for other processes.
    Always `close` it.

    A whole answer's records together are its body. An empty record only begins the response.
    """

    media_type: str
    is_streaming: bool
    # The body is sent as it is, without the API's line end.
    is_verbatim: bool = False
    # A stream may begin without a token, and say that it waits.
    begins_early: ClassVar[bool] = False

    async def begin(self) -> None:
        """Get ready, before anything is generated."""
        return

    @abstractmethod
    def feed(self, delta: Delta) -> list[bytes] | Awaitable[list[bytes]]:
        """Return the records that this Delta completes, in order. The next one is fed when they
        have been sent.
        """

    def waiting(self, status: WaitStatus, waited_s: float) -> list[bytes]:
        """Return records that say that the answer has no token yet. Only a stream that
        `begins_early` has some.
        """
        return []

    def close(self) -> None:
        """Let the other processes go."""
        return


class Formatter(AsyncFormatter, Generic[Format]):
    """Writes the answer to one body, which holds one request or several, without waiting for
    anything.
    """

    opening: ClassVar[bytes] = b""
    closing: ClassVar[bytes] = b""

    def __init__(self, parsed: Parsed[Format]) -> None:
        self._requests = parsed.requests
        self._request = parsed.requests[0]
        self._format = parsed.format

    @abstractmethod
    def feed(self, delta: Delta) -> list[bytes]: ...

    @staticmethod
    @abstractmethod
    def error(error: ErrorFields) -> bytes:
        """Return the record that reports why the answer failed, before it began or after."""

    @classmethod
    def record(cls, data: bytes) -> bytes:
        """Return a record that holds this JSON."""
        return cls.opening + one_line(data) + cls.closing

    def _full_text(self, text: str) -> str:
        return self._request.prompt + text if self._request.return_full_text else text


class WholeFormatter(Formatter[Format]):
    """Writes an answer as one JSON value, when all of its sequences have ended."""

    media_type = JSON
    is_streaming = False

    def __init__(self, parsed: Parsed[Format]) -> None:
        super().__init__(parsed)
        self._answers = [Answer() for _ in range(parsed.num_sequences)]
        self._num_running = parsed.num_sequences

    def feed(self, delta: Delta) -> list[bytes]:
        self._answers[delta.index].add(delta)
        self._num_running -= delta.finish_reason is not None
        return [] if self._num_running else [self._whole(self._answers)]

    @abstractmethod
    def _whole(self, answers: list[Answer]) -> bytes: ...


class StepFormatter(Formatter[Format]):
    """Writes a record for each step, which is nearly always one token. An answer without one ends
    with NO_TOKEN.
    """

    is_streaming = True

    def __init__(self, parsed: Parsed[Format]) -> None:
        super().__init__(parsed)
        self._answer = Answer()

    def feed(self, delta: Delta) -> list[bytes]:
        self._answer.add(delta)
        if delta.tokens:
            return [self._step(joined(delta.tokens))]

        return [] if delta.finish_reason is None else [self._step(NO_TOKEN)]

    @abstractmethod
    def _step(self, token: Token) -> bytes:
        """Return a record. The answer so far has the token, and its `finish_reason` with the last
        one.
        """


def waiting_fields(status: WaitStatus, waited_s: float) -> dict[str, Any]:
    """Return what is known of an answer that waits, in llama-server's words, and the place in the
    queue in litellm's.

    The time is null while the engine's speed is not known.
    """
    fields: dict[str, Any] = {}
    if status.num_computed_tokens is not None:
        fields["prompt_progress"] = {
            "total": status.num_prompt_tokens,
            "cache": status.num_cached_tokens,
            "processed": status.num_computed_tokens,
            "time_ms": round(waited_s * 1000),
        }

    if status.queue_position is not None:
        wait_s = None if status.wait_s is None else round(status.wait_s, 1)
        fields["queue_status"] = {
            "queue_position": status.queue_position,
            "estimated_wait_seconds": wait_s,
        }

    return fields


def one_line(fields: bytes) -> bytes:
    """Escape U+0085, U+2028 and U+2029 in JSON, because clients that split text into lines cut a
    record there.
    """
    if not fields.isascii():
        for char, escape in ESCAPES.items():
            fields = fields.replace(char, escape)

    return fields


@dataclass(frozen=True, slots=True)
class Rendered:
    """The response to an error. After the first byte only `body` is sent, which is a whole record
    of the stream.
    """

    status: int
    media_type: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


class Row(NamedTuple):
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


@dataclass(frozen=True, slots=True)
class ErrorRules:
    """How one API answers errors. `names` holds the API's names for fields of the contract with
    engines.

    `write` takes an error and a format, and returns the media type and the body. With `in_answer`
    the body has the form of the answer, or is its last record.

    The first row that matches an error counts. An error without a row keeps its status, and its
    kind is the one that the API gives to every error of that status, else its label.
    """

    write: Callable[..., tuple[str, bytes]]
    rows: tuple[Row, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    kind_of_status: Callable[[int], str | None] = lambda status: None

    def render(
        self,
        error: LmiError,
        format: AnswerFormat,
        *,
        accepted: bool,
        request_id: str | None = None,
    ) -> Rendered:
        """Render an error as the whole answer, or with `accepted` as the last record of a stream
        that has begun.
        """
        row = self._row_of(type(error)) or Row(LmiError, error.status)
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
        return Rendered(row.status, media_type, body, retry_header(error))

    def status_of(self, kind: type[LmiError]) -> int:
        """Return the status that errors of this class have here."""
        row = self._row_of(kind)
        return kind.status if row is None else row.status

    def _row_of(self, kind: type[LmiError]) -> Row | None:
        return next((row for row in self.rows if issubclass(kind, row.cause)), None)

    def render_status(
        self, status: int, message: str, format: AnswerFormat, request_id: str | None = None
    ) -> Rendered:
        """Render an error of HTTP: 404, 405, 408, 413, 415, 431."""
        fields = ErrorFields(message, status, self.kind_of_status(status), request_id=request_id)
        return Rendered(status, *self.write(fields, format, in_answer=False))


def _opening(row: Row, error: LmiError) -> str:
    if "{max_context}" not in row.opening:
        return row.opening

    limit = error.max_context if isinstance(error, PromptTooLong) else None
    return "" if limit is None else row.opening.format(max_context=limit)


def retry_header(error: LmiError) -> dict[str, str]:
    """Return the headers that say when and where to try again, if that can help, or that a key is
    missing.
    """
    if isinstance(error, Unauthorized):
        return {"WWW-Authenticate": "Bearer"}

    return refusal_headers(error)


class Forms(NamedTuple):
    """The formatters of an API: of a whole answer, of a stream, and of one that is lines if that
    differs.
    """

    whole: type[Formatter[Any]]
    stream: type[Formatter[Any]]
    lines: type[Formatter[Any]] | None = None

    def formatter(self, parsed: Parsed[Any]) -> Formatter[Any]:
        """Return the formatter of the answer to this body."""
        if parsed.format.is_streamed:
            return self._stream(parsed.format)(parsed)

        return self.whole(parsed)

    def write_error(
        self, error: ErrorFields, format: AnswerFormat, *, in_answer: bool
    ) -> tuple[str, bytes]:
        """Write an error as a body, or inside an answer as the last record of a stream."""
        formatter = self._stream(format) if in_answer else self.whole
        return formatter.media_type, formatter.error(error)

    def _stream(self, format: AnswerFormat) -> type[Formatter[Any]]:
        if self.lines is not None and format.output_format is OutputFormat.JSONLINES:
            return self.lines

        return self.stream


@dataclass(frozen=True, slots=True)
class Api(Generic[Format]):
    """One API.

    `read` decodes a body and checks it as a whole (else MalformedRequest), `parse` checks its
    fields (else InvalidParameter or Unsupported). `default_format` is the format of the answer to a
    body that `read` refuses. `read_for_events` reads the body of a client whose Accept asks for
    server-sent events. At /invocations a request selects the API with one of its `paths` as the
    route in Custom-Attributes, or with `body_field` in its body.
    """

    name: str
    default_format: Callable[[ModelConfig], Format]
    read: Callable[[bytes, str | None, ModelConfig], Message[Format]]
    parse: Callable[[Message[Format]], Parsed[Format]]
    formatter: Callable[[Parsed[Format]], Formatter[Format]]
    errors: ErrorRules
    read_for_events: Callable[[bytes, str | None, ModelConfig], Message[Format]] | None = None
    # The paths of the routes that this API answers by POST.
    paths: tuple[str, ...] = ()
    # Beginnings of further paths, whose 404, 405 and similar errors have this API's form.
    prefixes: tuple[str, ...] = ()
    body_field: str = ""
    # Formatters of user code take part.
    takes_user_code: bool = False
    # This ends an answer that is one JSON value.
    json_end: bytes = b""

    def whole(self, media_type: str, body: bytes) -> bytes:
        """Return a body that is sent in one piece, with `json_end` if it is JSON."""
        return body + self.json_end if media_type == JSON else body

    def for_accept(self, accept: str) -> Self:
        """Return the API for a client with this Accept: whose streams are events, if it asks for
        them.
        """
        if self.read_for_events is None or "text/event-stream" not in accept.lower():
            return self

        return replace(self, read=self.read_for_events)


AnyApi = Api[Any]
