"""An ASGI application that is asked without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

from starlette.types import ASGIApp

# A message of ASGI, or the scope of a request.
Message = dict[str, Any]


async def messages_of(app: ASGIApp, scope: Message, body: bytes) -> AsyncIterator[list[Message]]:
    """Yield what the application sends, in one list what it has sent since the last one.

    Ray takes half a millisecond for each. Who closes this, or is cancelled in it, leaves like a
    client.
    """
    requests = [{"type": "http.request", "body": body}]
    messages: asyncio.Queue[Message | None] = asyncio.Queue()

    async def receive() -> Message:
        if not requests:
            await asyncio.Event().wait()

        return requests.pop()

    async def send(message: Message) -> None:
        messages.put_nowait(message)

    async def run() -> None:
        try:
            await app(scope, receive, send)
        finally:
            messages.put_nowait(None)

    answering = asyncio.create_task(run())
    try:
        is_over = False
        while not is_over:
            sent = [await messages.get()]
            while not messages.empty():
                sent.append(messages.get_nowait())

            is_over = sent[-1] is None
            yield [message for message in sent if message is not None]

        await answering
    finally:
        answering.cancel()


def body_of(messages: Iterable[Message]) -> bytes:
    """Return the part of the body that is in these messages."""
    return b"".join([message.get("body", b"") for message in messages])


async def check_health(app: ASGIApp) -> None:
    """Raise RuntimeError if the application cannot answer."""
    scope = {"type": "http", "method": "GET", "path": "/ping", "headers": []}
    messages: list[Message] = []
    async for sent in messages_of(app, scope, b""):
        messages += sent

    if messages[0]["status"] != 200:
        raise RuntimeError(f"/ping: {body_of(messages).decode()}")
