"""Keeps an engine's adapters as messages of front ends and the runtime folder say.

A front end that loads an adapter sends it to every engine and then marks its entry in the folder READY. An engine that
starts later or was not reached loads it from the folder. Adapters beside the model are in the folder from the start.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from lmi.engine.messages import AdapterSettings, LoadAdapter, UnloadAdapter
from lmi.errors import ModelUnusable, UnknownAdapter, cause_line
from lmi.executor import Executor
from lmi.shared.desired_state import Adapter, Folder, State, Version, is_abandoned

log = logging.getLogger(__name__)


class AdapterKeeper:
    """Changes the adapters of one executor. Use it on one event loop.

    The executor's calls may read large files, so they run on another thread.
    """

    def __init__(self, executor: Executor, folder: Folder[Adapter] | None, has_changed: Callable[[], None]) -> None:
        self.failed: dict[str, str] = {}  # the reasons, by name, of registered adapters that could not be loaded here
        self._executor = executor
        self._folder = folder if executor.capabilities.lora else None
        self._has_changed = has_changed
        self._lock = asyncio.Lock()  # one change at a time
        self._version: Version | None = frozenset()  # of the folder, as it was last read; None: look again
        self._pending: list[Adapter] = []  # the entries that front ends worked on then
        self._loaded: dict[str, AdapterSettings] = {}

    async def change(self, message: LoadAdapter | UnloadAdapter) -> None:
        """Load or unload an adapter. An adapter whose entry is removed while it loads is unloaded again.

        Raises the errors of the executor.
        """
        async with self._lock:
            self._version = None
            if isinstance(message, LoadAdapter):
                await self._load(message.name, message.settings)
            elif self._folder is None or self._folder.read(message.name) is None:  # else it is registered again
                await self._unload(message.name)

    async def load_first(self) -> None:
        """Load the registered adapters in a server that starts. Raises ModelUnusable if one beside the model fails."""
        await self.reconcile()
        for entry in self._folder.entries() if self._folder is not None else ():
            if entry.is_static and entry.name in self.failed:
                raise ModelUnusable(f"adapter {entry.name}: {self.failed[entry.name]}")

    async def reconcile(self) -> None:
        """Load the adapters that the folder has and unload those that it no longer has.

        A PENDING entry is left to the front end that works on it. A change that fails is logged and tried again when
        the folder changes.
        """
        if self._folder is None or self._lock.locked():
            return
        version = self._folder.version()
        if version == self._version and not any(map(is_abandoned, self._pending)):
            return
        async with self._lock:
            self._version = version
            await self._follow(self._folder.entries())

    async def _follow(self, entries: list[Adapter]) -> None:
        ready = {entry.name: entry for entry in entries if entry.state is State.READY}
        self._pending = [entry for entry in entries if entry.state is State.PENDING]
        self.failed = {name: reason for name, reason in self.failed.items() if name in ready}
        for name in self._loaded.keys() - {entry.name for entry in entries}:
            await self._unload_quietly(name)
        for name, entry in ready.items():
            await self._load_quietly(name, settings_of(entry))

    async def _load(self, name: str, settings: AdapterSettings) -> None:
        """Load an adapter or change its settings.

        Front ends agree on names in the folder, so an adapter of this name with another path belongs to a dead one.
        """
        known = self._loaded.get(name)
        if known == settings:
            self.failed.pop(name, None)
            return
        if known is not None and (known.path != settings.path or known.is_pinned > settings.is_pinned):
            await self._unload(name)
        await asyncio.to_thread(
            self._executor.load_adapter, name, settings.path, pinned=settings.is_pinned, preload=settings.preload
        )
        self._loaded[name] = settings
        self.failed.pop(name, None)
        self._has_changed()

    async def _unload(self, name: str) -> None:
        self._loaded.pop(name, None)
        await asyncio.to_thread(self._executor.unload_adapter, name)
        self._has_changed()

    async def _load_quietly(self, name: str, settings: AdapterSettings) -> None:
        """Load an adapter, or note why it cannot be loaded. The engine is unharmed."""
        try:
            await self._load(name, settings)
        except Exception as error:
            log.error("adapter %s: %s", name, error)
            self.failed[name] = cause_line(error)
            self._has_changed()

    async def _unload_quietly(self, name: str) -> None:
        try:
            await self._unload(name)
        except UnknownAdapter:
            log.debug("adapter %s was unloaded already", name)
        except Exception as error:
            log.error("adapter %s: %s", name, error)


def settings_of(entry: Adapter) -> AdapterSettings:
    return AdapterSettings(entry.path, entry.is_pinned, entry.preload)
