"""The body of one answer, as its records come."""

import json
import re
from collections.abc import Awaitable

from lmi.apis.base.api import AnyApi
from lmi.apis.base.errors import RenderedError
from lmi.apis.base.formatters import AsyncFormatter
from lmi.http.exchange import SENT, Exchange

NOT_ASCII = re.compile(r"[^\x00-\x7f]")


class AnswerBody:
    """A whole answer, or a stream of records, each of which is sent at once and in one piece.

    The last byte of a stream is a newline, because client libraries that read lines wait forever
    for the end of one. With `is_ascii` a stream has other characters as the `\\uXXXX` of JSON: many
    clients decode each piece that a platform hands them, and a piece may end within a character.
    """

    def __init__(
        self, exchange: Exchange, formatter: AsyncFormatter, *, is_ascii: bool = False
    ) -> None:
        self.formatter = formatter
        self._exchange = exchange
        self._is_ascii = is_ascii
        # The records of a whole answer, until it ends.
        self._kept_records: list[bytes] = []

    def take(self, records: list[bytes]) -> Awaitable[None] | None:
        """Send records of a stream, or keep those of a whole answer.

        Returns an awaitable if they could not be sent at once: the first ones, or if the client
        reads slowly.
        """
        if not self.formatter.is_streaming:
            self._kept_records += records
            return None

        if not records:
            return None

        # The usual case, in which no coroutine is made.
        if len(records) == 1 and self._exchange.status and records[0]:
            pause = self._write(records[0])
            return None if pause is SENT else pause

        return self._send(records)

    async def _send(self, records: list[bytes]) -> None:
        if not self._exchange.status:
            await self._exchange.start(
                200, self.formatter.media_type, [("cache-control", "no-cache")]
            )

        for record in filter(None, records):
            await self._write(record)

    def _write(self, record: bytes) -> Awaitable[None]:
        if self._is_ascii:
            record = as_ascii(record)

        return self._exchange.write(record)

    async def fail(self, rendered: RenderedError) -> None:
        """Send an error in a stream that has begun. It begins a line, whatever stands before it."""
        self._exchange.note_failure(rendered.status, rendered.headers.items())
        await self._write(self._exchange.line_end() + rendered.body)

    async def end(self, api: AnyApi) -> None:
        """End a stream, or send the whole answer."""
        if self._exchange.status:
            await self._exchange.end(self._exchange.line_end())
            return

        body = b"".join(self._kept_records)
        media_type = self.formatter.media_type
        if not self.formatter.is_verbatim:
            body = api.whole(media_type, body)

        await self._exchange.send_whole(200, media_type, body)


def as_ascii(record: bytes) -> bytes:
    """Return a record with every other character escaped as in a JSON string. Bytes that are not
    UTF-8 stay.
    """
    if record.isascii():
        return record

    try:
        text = record.decode()
    except UnicodeDecodeError:
        return record

    return NOT_ASCII.sub(lambda match: json.dumps(match[0])[1:-1], text).encode()
