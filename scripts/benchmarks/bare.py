"""The least that a front end can cost: a bare ASGI application that streams ready-made lines.

It reads no request, decodes no token and makes no line, so only uvicorn's cost of one write per
line remains. All streams share one tick, which makes waiting as cheap as possible.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any

LINE = b'{"token": {"id": 1042, "text": " token", "log_prob": -0.6931471805599453}}\n'
STEP_S = float(os.environ.get("BENCH_STEP_S", "0.02"))
NUM_TOKENS = int(os.environ.get("BENCH_NUM_TOKENS", "200"))

tick = asyncio.Event()
ticker: asyncio.Task[None] | None = None


async def keep_ticking() -> None:
    """Wake all streams after each step."""
    global tick
    while True:
        await asyncio.sleep(STEP_S)
        passed_tick = tick
        tick = asyncio.Event()
        passed_tick.set()


async def app(
    scope: dict[str, Any],
    receive: Callable[[], Awaitable[Any]],
    send: Callable[[Any], Awaitable[None]],
) -> None:
    global ticker
    if ticker is None:
        ticker = asyncio.create_task(keep_ticking())

    headers = [(b"content-type", b"application/jsonlines")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    if scope["path"] == "/invocations":
        for _ in range(NUM_TOKENS):
            await tick.wait()
            await send({"type": "http.response.body", "body": LINE, "more_body": True})

    await send({"type": "http.response.body", "body": b""})
