"""An application with its own worker and limits, which uses no other part of lmi."""

from __future__ import annotations

import asyncio
from typing import Any

from lmi.http.protocol import GuardedProtocol
from lmi.http.worker import LAST_S, GuardedWorker

told_to_end = asyncio.Event()


class HastyProtocol(GuardedProtocol):
    header_timeout_s = 1.5


class HastyWorker(GuardedWorker):
    CONFIG_KWARGS = GuardedWorker.CONFIG_KWARGS | {"http": HastyProtocol, "timeout_graceful_shutdown": LAST_S + 0.5}

    def end_requests(self) -> None:
        told_to_end.set()


async def app(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "http":
        if scope["path"] == "/patient":
            await told_to_end.wait()
        if scope["path"] == "/endless":
            await asyncio.Event().wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
        await send({"type": "http.response.body", "body": b"hello"})
