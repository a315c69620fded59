"""Streams that are sent whole, where `option.buffer_streams` says so."""

from collections.abc import Awaitable, Iterable

from starlette.types import Receive, Scope, Send

from lmi.http.exchange import SENT, Exchange, Header


class BufferedExchange(Exchange):
    """Sends a streamed response whole at its end, with its length and with the status of an error
    inside it.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        super().__init__(scope, receive, send)
        self._media_type = ""
        self._fields: list[Header] = []
        self._body = bytearray()
        self._is_sent = False

    @property
    def has_begun(self) -> bool:
        return self._is_sent

    async def send_whole(
        self, status: int, media_type: str, body: bytes, headers: Iterable[Header] = ()
    ) -> None:
        self._is_sent = True
        await super().send_whole(status, media_type, body, headers)

    async def start(self, status: int, media_type: str, headers: Iterable[Header] = ()) -> None:
        self.status = status
        self._media_type = media_type
        self._fields = list(headers)

    def write(self, data: bytes) -> Awaitable[None]:
        self._written = data or self._written
        self._body += data
        return SENT

    async def end(self, data: bytes = b"") -> None:
        await self.send_whole(self.status, self._media_type, bytes(self._body + data), self._fields)

    def note_failure(self, status: int, headers: Iterable[Header] = ()) -> None:
        self.status = status
        self._fields += headers
