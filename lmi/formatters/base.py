"""What every formatter shares: its interface, and the keys of a plain error.

A formatter belongs to one answer: Deltas in, records out, each record one body message. It knows nothing of HTTP
statuses, sockets or where the tokens come from. orjson writes strings and floats, so NaN and infinities become null.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Generic, NamedTuple

from orjson import dumps

from lmi.schemas.common import Parsed
from lmi.types import Delta, Format, Token

NO_TOKEN = Token(id=-1, text="", is_special=True)
"""Takes the place of a token where an answer ends without one, as the reference writes an empty step."""

ESCAPES = {char.encode(): b"\\u%04x" % ord(char) for char in "\x85\u2028\u2029"}


class ErrorFields(NamedTuple):
    """An error as it stands in a body. `tgi_type` is given under tgi_compat: validation, generation, overloaded."""

    message: str
    code: int
    tgi_type: str | None = None


class Formatter(ABC, Generic[Format]):
    """Writes the answer to one body, which is to one request or to several."""

    media_type: ClassVar[str]
    is_streaming: ClassVar[bool]  # False: feed gives one record in all, the whole body

    def __init__(self, parsed: Parsed[Format]) -> None:
        self._request = parsed.requests[0]
        self._format = parsed.format

    @abstractmethod
    def feed(self, delta: Delta) -> list[bytes]:
        """The records that this Delta completes, in order."""

    @staticmethod
    @abstractmethod
    def error(error: ErrorFields) -> bytes:
        """The one record that reports why there is no answer, or no more of it."""

    def _full_text(self, text: str) -> str:
        return self._request.prompt + text if self._request.return_full_text else text


def error_fields(error: ErrorFields) -> bytes:
    """The two or three keys that every error ends with."""
    # A message may hold bytes of a file name that are no UTF-8; orjson would refuse them.
    message = error.message.encode(errors="replace").decode()
    fields = b'"error": %b, "code": %d' % (dumps(message), error.code)
    return fields if error.tgi_type is None else b'%b, "error_type": %b' % (fields, dumps(error.tgi_type))


def plain_error(error: ErrorFields) -> bytes:
    """The body of an error, for a request that could not be read."""
    return b"{%b}" % error_fields(error)


def one_line(fields: bytes) -> bytes:
    """JSON in which U+0085, U+2028 and U+2029 are escaped: clients that split text into lines cut a record there."""
    if not fields.isascii():
        for char, escape in ESCAPES.items():
            fields = fields.replace(char, escape)
    return fields
