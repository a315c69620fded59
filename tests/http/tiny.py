"""An application with its own worker and limits, which uses no other part of lmi."""

from __future__ import annotations

from typing import Any

from lmi.http.protocol import GuardedProtocol
from lmi.http.worker import GuardedWorker


class HastyProtocol(GuardedProtocol):
    header_timeout_s = 1.5


class HastyWorker(GuardedWorker):
    CONFIG_KWARGS = GuardedWorker.CONFIG_KWARGS | {"http": HastyProtocol}


async def app(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
        await send({"type": "http.response.body", "body": b"hello"})
