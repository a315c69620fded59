"""Changes the adapters of the running server from a front end.

It loads an adapter on every running engine, or on none, and writes it to the runtime folder, from which an engine that
starts later loads it (`adapter_keeper.py`).
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

import msgspec

from lmi.engine.adapter_keeper import settings_of
from lmi.engine.client import Engines
from lmi.errors import (
    DeadlineExceeded,
    LmiError,
    ModelUnusable,
    OutOfMemory,
    Unavailable,
    UnknownAdapter,
    without_paths,
)
from lmi.shared.desired_state import Adapter, Folder, State, is_abandoned

log = logging.getLogger(__name__)


class NotRegistered(LmiError):
    """A route names an adapter that is not registered."""

    status = 404
    label = "unknown_adapter"


class NameTaken(LmiError):
    """The name of a new adapter belongs to something else, or another call changes the adapter now."""

    status = 409
    label = "name_taken"


class AdapterUnusable(LmiError):
    """An engine cannot load the adapter: its rank, its modules or its shapes do not fit."""

    status = 424
    label = "adapter_unusable"


class AdapterRegistry:
    """The adapters of one model, as one front end changes them. The front ends agree through the folder.

    `said` is the name of an adapter in messages for a person. A change that takes longer than `timeout_s` is given up.
    """

    def __init__(
        self,
        engines: Engines,
        folder: Folder[Adapter],
        max_adapters: int | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self._engines = engines
        self._folder = folder
        self._max_adapters = max_adapters
        self._timeout_s = timeout_s

    async def register(self, entry: Adapter, said: str = "") -> None:
        """Load an adapter on every engine. If one cannot load it, none has it.

        Raises NameTaken, InvalidParameter for the name, AdapterUnusable with the engine's reason, OutOfMemory if there
        is no room, Unavailable if no engine is ready or one is lost meanwhile, DeadlineExceeded.
        """
        if not self._add(msgspec.structs.replace(entry, state=State.PENDING)):
            raise NameTaken(f"Adapter {said or entry.name} is registered already")
        try:
            await self._load(entry)
            self._folder.replace(msgspec.structs.replace(entry, state=State.READY))
        except BaseException as error:
            self._folder.remove(entry.name)  # an engine that has it follows the folder
            if isinstance(error, LmiError) and not isinstance(error, DeadlineExceeded):
                await self._forget(entry.name)
            raise
        log.info("adapter %s is registered", entry.name)

    async def update(self, entry: Adapter, said: str = "") -> None:
        """Give a registered adapter new settings on every engine, or on none. Raises what `register` raises."""
        old = self._changeable(entry.name, said)
        if not self._folder.change(old, entry):  # first, because the engines follow the folder meanwhile
            raise NameTaken(f"Adapter {said or entry.name} is being changed")
        try:
            await self._load(entry)
        except LmiError:
            if self._folder.change(entry, old):
                with suppress(LmiError):
                    await self._load(old)
            raise
        log.info("adapter %s is updated", entry.name)

    async def unregister(self, name: str, said: str = "") -> None:
        """Unload an adapter from every engine. Requests that run with it finish. Raises NotRegistered."""
        self._changeable(name, said)
        if not self._folder.remove(name):
            raise NotRegistered(f"Adapter {said or name} is not registered")
        await self._forget(name)
        log.info("adapter %s is unregistered", name)

    def entries(self) -> list[Adapter]:
        """Return the registered adapters, sorted by name."""
        return [entry for entry in self._folder.entries() if entry.state is State.READY]

    def has(self, name: str) -> bool:
        """Return whether an adapter is registered, also if an engine could not load it again."""
        entry = self._folder.read(name)
        return entry is not None and entry.state is not State.PENDING

    def find(self, name: str, said: str = "") -> Adapter:
        """Return a registered adapter. Raises NotRegistered."""
        entry = self._folder.read(name)
        if entry is None or entry.state is State.PENDING:
            raise NotRegistered(f"Adapter {said or name} is not registered")
        return entry

    def check_free(self, name: str, said: str = "") -> None:
        """Raise NameTaken if another adapter has the name now. `register` decides."""
        entry = self._folder.read(name)
        if entry is not None and not is_abandoned(entry):
            raise NameTaken(f"Adapter {said or name} is registered already")

    def _changeable(self, name: str, said: str) -> Adapter:
        """Return a registered adapter. Raises NotRegistered, or NameTaken for one that is being registered now."""
        entry = self._folder.read(name)
        if entry is not None and entry.state is State.PENDING and not is_abandoned(entry):
            raise NameTaken(f"Adapter {said or name} is being registered")
        return self.find(name, said)

    def _add(self, entry: Adapter) -> bool:
        try:
            return self._folder.add(entry, self._max_adapters)
        except OutOfMemory:
            raise OutOfMemory(f"{self._max_adapters} adapters are registered, which is max_adapters") from None

    async def _load(self, entry: Adapter) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._engines.load_adapter(entry.name, settings_of(entry))
        except ModelUnusable as error:
            raise AdapterUnusable(without_paths(str(error), {entry.path: entry.src})) from None
        except TimeoutError:
            reason = f"the adapter was not loaded within model_loading_timeout ({self._timeout_s:g} s)"
            raise DeadlineExceeded(reason) from None

    async def _forget(self, name: str) -> None:
        """Unload an adapter without an entry. An engine that cannot be told follows the folder."""
        with suppress(Unavailable, UnknownAdapter, TimeoutError):
            async with asyncio.timeout(self._timeout_s):
                await self._engines.unload_adapter(name)
