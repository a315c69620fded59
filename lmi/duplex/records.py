"""The pieces of an answer over HTTP become records, each of which is one message."""

from collections.abc import Callable

import orjson

# A record of events is the data of one.
EVENTS = "text/event-stream"
LINES = "application/jsonlines"
# What ends the events of OpenAI's APIs, beside a message that says so.
DONE = b"[DONE]"


class Records:
    """Cuts one answer into records, wherever the pieces of it end."""

    def __init__(self, media_type: str, *, is_whole: bool) -> None:
        """`is_whole`: the answer is one record, however it is written."""
        self._is_whole = is_whole
        # What ends a record. Without it a stream has a record in each piece.
        self._end = b""
        self._read: Callable[[bytes], bytes] = bytes.strip
        if media_type.startswith(EVENTS) and not is_whole:
            self._end = b"\n\n"
            self._read = data_of
        elif media_type.startswith(LINES) and not is_whole:
            self._end = b"\n"

        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the records that end in this piece."""
        self._rest += piece
        if self._is_whole:
            return []

        if not self._end:
            return self.end()

        *records, self._rest = self._rest.split(self._end)
        return [record for record in map(self._read, records) if record]

    def end(self) -> list[bytes]:
        """Return the last record, if nothing has ended it."""
        record = self._rest
        self._rest = b""
        if self._is_whole or self._end:
            record = self._read(record)

        return [record] if record else []


def data_of(event: bytes) -> bytes:
    """Return the data of an event, b"" for a comment. Source: the HTML standard, 9.2.6."""
    lines = []
    for line in event.splitlines():
        name, _, value = line.partition(b":")
        if name == b"data":
            lines.append(value.removeprefix(b" "))

    return b"\n".join(lines)


def as_json(record: bytes) -> bytes:
    """Return a record that is JSON as it is, any other as the JSON of its text."""
    try:
        orjson.loads(record)
    except orjson.JSONDecodeError:
        return orjson.dumps(record.decode(errors="replace"))

    return record


def with_status(error: bytes, status: int) -> bytes:
    """Return the body of an error with its status, which no other message has."""
    try:
        fields = orjson.loads(error)
    except orjson.JSONDecodeError:
        fields = None

    if not isinstance(fields, dict):
        fields = {"error": error.decode(errors="replace")}

    return orjson.dumps({"code": status} | fields)
