"""The interface of formatters, which turn the Deltas of one answer into records, each sent as one body message.

orjson writes strings and floats, so NaN and infinities become null.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence
from typing import ClassVar, Generic, NamedTuple

from orjson import dumps

from lmi.apis.base.readers import Parsed
from lmi.types import Answer, Delta, Format, Token

NO_TOKEN = Token(id=-1, text="", is_special=True)
"""The token of an empty step, as the reference writes it."""

JSON, JSONLINES, SSE = "application/json", "application/jsonlines", "text/event-stream"
ESCAPES = {char.encode(): b"\\u%04x" % ord(char) for char in "\x85\u2028\u2029"}


def joined(tokens: Sequence[Token]) -> Token:
    """Return the tokens of one step as one: the last one's id, and text and log-prob of all.

    A step is one record, because some clients lose records that a platform passes on together.
    """
    if len(tokens) == 1:
        return tokens[0]
    log_probs = [token.log_prob for token in tokens]
    return Token(
        id=tokens[-1].id,
        text=text_of(tokens),
        log_prob=None if None in log_probs else sum(filter(None, log_probs)),
        is_special=all(token.is_special for token in tokens),
        top=[other for token in tokens for other in token.top or ()],
    )


def text_of(tokens: Sequence[Token]) -> str:
    return tokens[0].text if len(tokens) == 1 else "".join([token.text for token in tokens])


class ErrorFields(NamedTuple):
    """An error as a body names it. `kind` is in the words of the API; the LMI API has one only under tgi_compat."""

    message: str
    code: int  # HTTP's
    kind: str | None = None
    param: str | None = None  # the field at fault
    request_id: str | None = None


class AsyncFormatter(ABC):
    """Turns the Deltas of one answer into the records of its body. It may wait for other processes. Always `close` it.

    A whole answer's records together are its body. An empty record only begins the response.
    """

    media_type: str
    is_streaming: bool
    is_verbatim: bool = False  # the body is sent as it is, without the API's line end

    async def begin(self) -> None:
        """Get ready, before anything is generated."""
        return

    @abstractmethod
    def feed(self, delta: Delta) -> list[bytes] | Awaitable[list[bytes]]:
        """Return the records that this Delta completes, in order. The next one is fed when they have been sent."""

    def close(self) -> None:
        """Let the other processes go."""
        return


class Formatter(AsyncFormatter, Generic[Format]):
    """Writes the answer to one body, which holds one request or several, without waiting for anything."""

    opening: ClassVar[bytes] = b""
    closing: ClassVar[bytes] = b""

    def __init__(self, parsed: Parsed[Format]) -> None:
        self._requests, self._request = parsed.requests, parsed.requests[0]
        self._format = parsed.format

    @abstractmethod
    def feed(self, delta: Delta) -> list[bytes]:
        """Return the records that this Delta completes, in order. If not streaming, the last one completes the body."""

    @staticmethod
    @abstractmethod
    def error(error: ErrorFields) -> bytes:
        """Return the record that reports why the answer failed, before it began or after."""

    @classmethod
    def record(cls, data: bytes) -> bytes:
        """Return JSON as a record of a stream."""
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
    """Writes a record for each step, which is nearly always one token. An answer without one ends with NO_TOKEN."""

    is_streaming = True

    def __init__(self, parsed: Parsed[Format]) -> None:
        super().__init__(parsed)
        self._answer = Answer()

    def feed(self, delta: Delta) -> list[bytes]:
        self._answer.add(delta)
        if not delta.tokens and delta.finish_reason is None:
            return []
        return [self._step(joined(delta.tokens) if delta.tokens else NO_TOKEN)]

    @abstractmethod
    def _step(self, token: Token) -> bytes:
        """Return a record. The answer so far has the token, and its `finish_reason` with the last one."""


def error_fields(error: ErrorFields) -> bytes:
    """Return the two or three keys that every error ends with."""
    fields = b'"error": %b, "code": %d' % (dumps(error.message), error.code)
    return fields if error.kind is None else b'%b, "error_type": %b' % (fields, dumps(error.kind))


def one_line(fields: bytes) -> bytes:
    """Escape U+0085, U+2028 and U+2029 in JSON, because clients that split text into lines cut a record there."""
    if not fields.isascii():
        for char, escape in ESCAPES.items():
            fields = fields.replace(char, escape)
    return fields
