"""An event loop on its own thread, for an engine in other processes: a task for each sequence
awaits its outputs.

executor's thread ──begin, abort───▶ event loop: one task for each sequence ──▶ the engine's
processes
                  ◀─outputs, batched─
"""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Coroutine, Iterable
from functools import partial
from typing import Any, TypeVar

from handlers.driven.outputs import SequenceOutput

T = TypeVar("T")


class EngineLoop:
    """The part of an engine that awaits outputs. Its own tasks use `put`, any other thread may use
    the rest.
    """

    def __init__(self, title: str) -> None:
        """Start the thread, which `title` names."""
        # Batches of outputs that nobody has taken yet.
        self._ready = queue.SimpleQueue[list[SequenceOutput]]()
        # The outputs of this turn of the event loop.
        self._batch: list[SequenceOutput] = []
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._loop = asyncio.new_event_loop()

        run = self._loop.run_forever
        self._thread = threading.Thread(target=run, name=title, daemon=True)
        self._thread.start()

    def begin(self, name: str, coroutine: Coroutine[Any, Any, None]) -> None:
        """Begin a task, which `abort` knows by its name until it ends."""
        self._loop.call_soon_threadsafe(self._begin, name, coroutine)

    def abort(self, names: Iterable[str]) -> None:
        """Cancel tasks; those that have ended are ignored."""
        for name in list(names):
            self._loop.call_soon_threadsafe(self._cancel, name)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end. Raises what it raises."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def put(self, output: SequenceOutput) -> None:
        """Batch the outputs of one turn of the event loop, so that those of a step stay
        together.
        """
        if not self._batch:
            self._loop.call_soon(self._flush)

        self._batch.append(output)

    def take(self, timeout_s: float) -> list[SequenceOutput]:
        """Take the outputs that have come. Waits for the first ones, until `timeout_s` are over or
        for a `wake`.
        """
        batch: list[SequenceOutput] = []
        with contextlib.suppress(queue.Empty):
            batch += self._ready.get(timeout=timeout_s)
            while True:
                batch += self._ready.get_nowait()

        return batch

    def wake(self) -> None:
        """End the wait of `take`."""
        self._ready.put([])

    def cancel_all(self, timeout_s: float) -> None:
        """Cancel every task of the loop and wait until they have ended. Raises TimeoutError."""

        async def cancel_others() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()

            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(cancel_others(), self._loop).result(timeout_s)

    def end_loop(self, timeout_s: float) -> None:
        """End the event loop and its thread. One that hangs is left behind."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._loop.close()

    def _begin(self, name: str, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks[name] = task
        # The callback runs even if the task is cancelled before it begins.
        task.add_done_callback(partial(self._forget, name))

    def _forget(self, name: str, task: asyncio.Task[None]) -> None:
        # Another task may have begun since, by the same name.
        if self._tasks.get(name) is task:
            del self._tasks[name]

    def _cancel(self, name: str) -> None:
        task = self._tasks.get(name)
        if task is not None:
            task.cancel()

    def _flush(self) -> None:
        self._ready.put(self._batch)
        self._batch = []
