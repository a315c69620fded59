"""Calls that block, in threads that do not keep the process alive: a disk or a network may hang when it should end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


async def run_in_thread(call: Callable[..., T], *arguments: object) -> T:
    """Return what a call returns, or raise what it raises. The call goes on if its caller is cancelled."""
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()

    def run() -> None:
        try:
            outcome.set_result(call(*arguments))
        except Exception as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(outcome)
