"""Messages of AWS's event stream, as a client sends them: bytes become messages.

Each has an integrity check for its lengths and one for all of it. Source: Amazon's description of
the vnd.amazon.eventstream encoding.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from zlib import crc32

from lmi.gateway.errors import AwsError, invalid
from lmi.gateway.eventstream import NUM_OTHER_BYTES

# Two lengths and their checksum.
NUM_PRELUDE_BYTES = 12
NUM_CHECKSUM_BYTES = 4
MAX_HEADERS_BYTES = 128 << 10
TRUE = 0
FALSE = 1
BYTES = 6
TEXT = 7
TIMESTAMP = 8
# How values of a fixed length are packed, by their type. The last is a UUID.
FORMS = {2: "!b", 3: "!h", 4: "!i", 5: "!q", TIMESTAMP: "!q", 9: "!16s"}


class Timestamp(int):
    """The value of a header that is a time, in milliseconds since 1970."""


HeaderValue = bool | int | bytes | str


@dataclass(frozen=True, slots=True)
class EventMessage:
    """One message: its headers by name, and its payload."""

    headers: Mapping[str, HeaderValue]
    payload: bytes

    def text(self, name: str, default: str = "") -> str:
        """Return a header. Raises AwsError if it is there and no text."""
        value = self.headers.get(name, default)
        if not isinstance(value, str):
            raise invalid(f"Header {name} of a message must be a string.")

        return value


class MessageReader:
    """Cuts what a client sends into messages of at most `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._unread = bytearray()

    @property
    def num_unread_bytes(self) -> int:
        return len(self._unread)

    def feed(self, data: bytes) -> None:
        """Add what has come."""
        self._unread += data

    def take(self) -> EventMessage | None:
        """Return the next message, or None until it is whole.

        Raises AwsError for bytes that are none, and for a message that is too long as soon as its
        length has come.
        """
        if len(self._unread) < NUM_PRELUDE_BYTES:
            return None

        num_bytes, num_header_bytes, checksum = struct.unpack_from("!III", self._unread)
        if checksum != crc32(self._unread[:8]):
            raise _broken("the checksum of its lengths is wrong")

        if num_bytes > self._max_bytes:
            raise invalid(
                f"A message of the event stream must have at most {self._max_bytes} bytes, "
                f"given {num_bytes}."
            )

        if num_header_bytes > min(MAX_HEADERS_BYTES, num_bytes - NUM_OTHER_BYTES):
            raise _broken(f"its headers cannot have {num_header_bytes} bytes")

        if len(self._unread) < num_bytes:
            return None

        data = bytes(self._unread[:num_bytes])
        del self._unread[:num_bytes]

        end = num_bytes - NUM_CHECKSUM_BYTES
        if int.from_bytes(data[end:]) != crc32(data[:end]):
            raise _broken("its checksum is wrong")

        payload_begin = NUM_PRELUDE_BYTES + num_header_bytes
        headers = _read_headers(data[NUM_PRELUDE_BYTES:payload_begin])
        return EventMessage(headers, data[payload_begin:end])


def read_message(data: bytes) -> EventMessage:
    """Return the message that these bytes are. Raises AwsError if they are more or less than
    one.
    """
    reader = MessageReader(len(data))
    reader.feed(data)
    message = reader.take()
    if message is None or reader.num_unread_bytes:
        raise _broken("the payload of a signed message is one message")

    return message


def _broken(rule: str) -> AwsError:
    return invalid(f"The request is no event stream: a message is broken, {rule}.")


def _read_headers(encoded: bytes) -> dict[str, HeaderValue]:
    """Return the headers by name. Raises AwsError."""
    fields = _HeaderBytes(encoded)
    headers: dict[str, HeaderValue] = {}
    while fields.is_left:
        name = _text_of(fields.take(fields.number("!B")))
        if name in headers:
            raise _broken(f"its header {name} comes twice")

        headers[name] = _read_value(fields)

    return headers


def _read_value(fields: "_HeaderBytes") -> HeaderValue:
    kind = fields.number("!B")
    if kind in (TRUE, FALSE):
        return kind == TRUE

    if kind in (BYTES, TEXT):
        value = fields.take(fields.number("!H"))
        return value if kind == BYTES else _text_of(value)

    if kind not in FORMS:
        raise _broken(f"a header cannot have the type {kind}")

    number: int | bytes = fields.unpack(FORMS[kind])
    return Timestamp(number) if kind == TIMESTAMP else number


def _text_of(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise _broken("its headers are no UTF-8") from None


class _HeaderBytes:
    """The bytes of headers, from the first one on."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    @property
    def is_left(self) -> bool:
        """Whether anything is left."""
        return self._position < len(self._data)

    def take(self, num_bytes: int) -> bytes:
        """Return the next bytes. Raises AwsError if they are not there."""
        end = self._position + num_bytes
        if end > len(self._data):
            raise _broken("its headers are cut")

        taken = self._data[self._position : end]
        self._position = end
        return taken

    def unpack(self, form: str) -> int | bytes:
        """Return the next value of this form."""
        value: int | bytes = struct.unpack(form, self.take(struct.calcsize(form)))[0]
        return value

    def number(self, form: str) -> int:
        """Return the next number of this form."""
        return int(self.unpack(form))
