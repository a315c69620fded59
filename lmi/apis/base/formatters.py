"""Formatters, which turn the Deltas of one answer into records, each sent as one body message.

orjson writes strings and floats, so NaN and infinities become null.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence
from typing import Any, ClassVar, Generic, NamedTuple

from lmi.apis.base.body import Parsed
from lmi.apis.base.errors import ErrorFields
from lmi.apis.base.media_types import JSON
from lmi.types import Answer, AnswerFormat, Delta, Format, OutputFormat, Token, WaitStatus

NO_TOKEN = Token(id=-1, text="", is_special=True)
"""The token of an empty step, as the reference writes it."""

ESCAPES = {char.encode(): b"\\u%04x" % ord(char) for char in "\x85\u2028\u2029"}


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
        if delta.finish_reason is not None:
            self._num_running -= 1

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


class ApiFormatters(NamedTuple):
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


def joined(tokens: Sequence[Token]) -> Token:
    """Return the tokens of one step as one: the last one's id, and text and log-prob of all.

    A step is one record, because some clients lose records that a platform passes on together.
    """
    if len(tokens) == 1:
        return tokens[0]

    log_probs = [token.log_prob for token in tokens]
    log_prob = None
    if None not in log_probs:
        # The filter is for the type checker: None is not among them.
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


def one_line(fields: bytes) -> bytes:
    """Escape U+0085, U+2028 and U+2029 in JSON, because clients that split text into lines cut a
    record there.
    """
    if not fields.isascii():
        for char, escape in ESCAPES.items():
            fields = fields.replace(char, escape)

    return fields
