"""Blocking calls beside the event loop."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


async def run_in_thread(call: Callable[..., T], *arguments: object) -> T:
    """Return what a blocking call returns, or raise what it raises. The call goes on if its caller
    is cancelled.

    Its thread does not keep the process alive, because a disk or a network may hang when the
    process should end.
    """
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()

    def run() -> None:
        try:
            outcome.set_result(call(*arguments))
        except Exception as error:
            outcome.set_exception(error)
        except BaseException as error:
            # As itself a SystemExit would end the event loop of the caller.
            outcome.set_exception(RuntimeError(f"a thread ended with {error!r}"))

    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(outcome)
