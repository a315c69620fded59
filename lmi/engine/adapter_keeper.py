"""Keeps an engine's adapters as messages of front ends and the runtime folder say.

A front end that loads an adapter sends it to every engine and then marks its entry in the folder READY. An engine that
starts later or was not reached loads it from the folder. Adapters that the engine found beside its model are not in the
folder and stay.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine

from lmi.engine.messages import LoadAdapter, UnloadAdapter
from lmi.executor import Executor
from lmi.shared.desired_state import Adapter, Folder, State, Version

log = logging.getLogger(__name__)


class AdapterKeeper:
    """Changes the adapters of one executor. Use it on one event loop.

    The executor's calls may read large files, so they run on another thread.
    """

    def __init__(self, executor: Executor, folder: Folder[Adapter] | None, has_changed: Callable[[], None]) -> None:
        self._executor = executor
        self._folder = folder if executor.capabilities.lora else None
        self._has_changed = has_changed
        self._lock = asyncio.Lock()  # one change at a time
        self._version: Version | None = frozenset()  # of the folder, as it was last read; None: look again
        self._loaded: dict[str, tuple[str, bool]] = {}  # path and is_pinned by name, of adapters loaded here

    async def change(self, message: LoadAdapter | UnloadAdapter) -> None:
        """Load or unload an adapter. An adapter whose entry is removed while it loads is unloaded again.

        Raises the errors of the executor.
        """
        async with self._lock:
            if isinstance(message, LoadAdapter):
                self._version = None
                await self._load(message.name, message.path, message.is_pinned)
            else:
                await self._unload(message.name)

    async def reconcile(self) -> None:
        """Load the adapters that the folder has and unload those that it no longer has.

        A PENDING entry is left to the front end that works on it. A change that fails is logged and tried again when
        the folder changes.
        """
        if self._folder is None or self._lock.locked() or (version := self._folder.version()) == self._version:
            return
        async with self._lock:
            self._version, entries = version, self._folder.entries()
            for name in self._loaded.keys() - {entry.name for entry in entries}:
                await self._report_failure(name, self._unload(name))
            for entry in entries:
                if entry.state is State.READY:
                    await self._report_failure(entry.name, self._load(entry.name, entry.path, entry.is_pinned))

    async def _load(self, name: str, path: str, pinned: bool) -> None:
        """Load an adapter in place of one with its name, if there is one.

        Front ends agree on names in the folder, so an older adapter of this name belongs to a dead front end.
        """
        if self._loaded.get(name) == (path, pinned):
            return
        if name in self._loaded:
            await self._unload(name)
        await asyncio.to_thread(self._executor.load_adapter, name, path, pinned=pinned)
        self._loaded[name] = path, pinned
        self._has_changed()

    async def _unload(self, name: str) -> None:
        self._loaded.pop(name, None)
        await asyncio.to_thread(self._executor.unload_adapter, name)
        self._has_changed()

    async def _report_failure(self, name: str, change: Coroutine[None, None, None]) -> None:
        try:
            await change
        except Exception as error:  # the engine is unharmed
            log.error("adapter %s: %s", name, error)
