"""Changes the adapters of the running server from a front end: it writes the folder, and the engines follow.

`keeper.py` is the engines' side. An adapter is on every running engine, or on none, and an engine that starts
later loads it too.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec

from lmi import errors
from lmi.adapters.folder import Adapter
from lmi.engine.client import EngineConnection, Engines, Outcomes
from lmi.engine.messages import LOOK
from lmi.errors import LmiError, cause_line, from_info, without_paths
from lmi.ipc import frame
from lmi.shared.desired_state import Folder, State, is_abandoned

log = logging.getLogger(__name__)


class NotRegistered(LmiError, label="unknown_adapter", status=404):
    """A route names an adapter that is not registered."""


class NameTaken(LmiError, label="name_taken", status=409):
    """The name of a new adapter belongs to something else, or another call changes the adapter now."""


class AdapterUnusable(LmiError, label="adapter_unusable", status=424):
    """An engine cannot load the adapter: its rank, its modules or its shapes do not fit."""


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
        new = msgspec.structs.replace(entry, state=State.PENDING, stamp=time.monotonic_ns())
        try:
            if not self._folder.add(new, self._max_adapters):
                raise NameTaken(f"Adapter {said or entry.name} is registered already")
        except errors.OutOfMemory:
            raise errors.OutOfMemory(f"{self._max_adapters} adapters are registered, which is max_adapters") from None
        try:
            await self._load(new)
            self._folder.replace(msgspec.structs.replace(new, state=State.READY))
        except BaseException as error:
            self._folder.remove(entry.name)
            if isinstance(error, LmiError) and not isinstance(error, errors.DeadlineExceeded):
                await self._forget(entry.name)
            raise
        log.info("adapter %s is registered", entry.name)

    async def update(self, entry: Adapter, said: str = "") -> None:
        """Give a registered adapter new settings on every engine, or on none. Raises what `register` raises."""
        old = self._changeable(entry.name, said)
        new = msgspec.structs.replace(entry, stamp=time.monotonic_ns())
        if not self._folder.swap(old, new):
            raise NameTaken(f"Adapter {said or entry.name} is being changed")
        try:
            await self._load(new)
        except LmiError:
            if self._folder.swap(new, old):
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

    async def _load(self, entry: Adapter) -> None:
        """Wait until every engine has tried the entry, unless another takes its place. Raises the first reason."""

        def is_tried(outcomes: Outcomes) -> bool:
            found, outcome = self._folder.read(entry.name), outcomes.get(entry.name)
            is_replaced = found is None or found.stamp != entry.stamp
            return is_replaced or (outcome is not None and outcome.stamp == entry.stamp)

        try:
            outcomes = [found.get(entry.name) for found in await self._follow(is_tried)]
            tried = (outcome for outcome in outcomes if outcome is not None and outcome.stamp == entry.stamp)
            if reasons := [outcome.error for outcome in tried if outcome.error is not None]:
                raise from_info(reasons[0])
        except errors.ModelUnusable as error:
            raise AdapterUnusable(without_paths(str(error), {entry.path: entry.src})) from None
        except TimeoutError:
            reason = f"the adapter was not loaded within model_loading_timeout ({self._timeout_s:g} s)"
            raise errors.DeadlineExceeded(reason) from None

    async def _forget(self, name: str) -> None:
        """Wait until no engine has an adapter whose entry is gone."""
        with suppress(errors.Unavailable, TimeoutError):
            await self._follow(lambda outcomes: name not in outcomes or self._folder.read(name) is not None)

    def failure(self, name: str) -> str | None:
        """Return why an engine could not load a registered adapter, or None."""
        outcomes = (one.outcomes[name] for one in self._engines.serving().values() if name in one.outcomes)
        return next((cause_line(from_info(found.error)) for found in outcomes if found.error is not None), None)

    async def _follow(self, is_done: Callable[[Outcomes], bool]) -> list[Outcomes]:
        """Let every engine look at the folder, and wait until all have done what is wanted.

        Raises Unavailable if no engine serves, and EngineLost when the others have done it.
        """
        serving = [engine for engine in self._engines.open.values() if engine.info is not None]  # also silent ones
        if not serving:
            raise self._engines.unavailable()
        async with asyncio.timeout(self._timeout_s):
            found = await asyncio.gather(*(_follow(engine, is_done) for engine in serving), return_exceptions=True)
        outcomes = [one for one in found if not isinstance(one, BaseException)]
        if len(outcomes) < len(found):
            raise next(one for one in found if isinstance(one, BaseException))
        return outcomes


async def _follow(engine: EngineConnection, is_done: Callable[[Outcomes], bool]) -> Outcomes:
    engine.write(frame(LOOK))
    while not engine.closed.done():
        if is_done(engine.outcomes):
            return engine.outcomes
        await engine.news.wait()
    raise errors.EngineLost("the engine was lost while it changed its adapters")
