"""Changes the adapters of the running server from a front end.

It loads an adapter on every running engine, or on none, and writes it to the runtime folder, from which an engine that
starts later loads it (`adapter_keeper.py`).
"""

from __future__ import annotations

import os

import msgspec

from lmi.engine.client import Engines
from lmi.errors import InvalidParameter, Unavailable
from lmi.shared.desired_state import Adapter, Folder, State


class AdapterRegistry:
    """The adapters of the server, as one front end changes them. The front ends agree through the folder."""

    def __init__(self, engines: Engines, folder: Folder[Adapter]) -> None:
        self._engines = engines
        self._folder = folder

    async def load(self, name: str, path: str, *, pinned: bool = False) -> None:
        """Load an adapter on every engine. If one cannot load it, none has it, and this raises that engine's LmiError.

        Raises InvalidParameter if the name is registered.
        """
        entry = Adapter(name=name, path=path, is_pinned=pinned, state=State.PENDING)
        if not self._folder.add(entry):
            raise InvalidParameter("name", "the name of an adapter that is not registered", name)
        try:
            await self._engines.load_adapter(name, path, pinned=pinned)
        except BaseException:
            self._folder.remove(name)
            raise
        self._folder.replace(msgspec.structs.replace(entry, state=State.READY))

    async def unload(self, name: str) -> None:
        """Unload an adapter from every engine. Requests that run with it finish. Raises UnknownAdapter."""
        entry = self._folder.read(name)
        if entry is not None:  # an engine that starts now must not load it
            self._folder.replace(msgspec.structs.replace(entry, state=State.PENDING, writer=os.getpid()))
        try:
            await self._engines.unload_adapter(name)
        except Unavailable:  # an engine that starts again follows the folder
            if entry is None:
                raise
        finally:
            self._folder.remove(name)

    def entries(self) -> list[Adapter]:
        return [entry for entry in self._folder.entries() if entry.state is State.READY]
