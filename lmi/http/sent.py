"""What `send` returns for data that the transport already has. Awaiting it costs no turn of the event loop."""

from __future__ import annotations

from collections.abc import Awaitable, Generator


class Sent(Awaitable[None]):
    """An awaitable that is done."""

    def __await__(self) -> Generator[None]:
        yield from ()


SENT = Sent()
