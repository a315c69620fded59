"""Changes the adapters of the running server from a front end: it writes the folder, and the
engines follow.

`keeper.py` is the engines' side. An adapter is on every running engine, or on none, and an engine
that starts later loads it too.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress

from msgspec import Struct
from msgspec.structs import replace

from lmi import errors
from lmi.adapters.files import Adapter
from lmi.engine.client import EngineConnection, Engines, Outcomes
from lmi.engine.messages import LOOK
from lmi.errors import LmiError, cause_line, from_info, without_paths
from lmi.ipc import frame
from lmi.shared.desired_state import Folder, State, is_abandoned

log = logging.getLogger(__name__)


class NotRegistered(LmiError, label="unknown_adapter", status=404):
    """A route names an adapter that is not registered."""


class NameTaken(LmiError, label="name_taken", status=409):
    """The name of a new adapter belongs to something else, or another call changes the
    adapter now.
    """


class AdapterUnusable(LmiError, label="adapter_unusable", status=424):
    """An engine cannot load the adapter: its rank, its modules or its shapes do not fit."""


class AdapterRegistry(Struct):
    """The adapters of one model, as one front end changes them. The front ends agree through the
    folder.

    `label` is the name of an adapter in messages for a person. A change that takes longer than
    `timeout_s` is given up.
    """

    engines: Engines
    folder: Folder[Adapter]
    max_adapters: int | None = None
    timeout_s: float | None = None

    async def register(self, entry: Adapter, label: str = "") -> None:
        """Load an adapter on every engine. If one cannot load it, none has it.

        Raises NameTaken, InvalidParameter for the name, AdapterUnusable with the engine's reason,
        OutOfMemory if there is no room, Unavailable if no engine is ready or one is lost meanwhile,
        DeadlineExceeded.
        """
        new = replace(entry, state=State.PENDING, stamp=time.monotonic_ns())

        def make(old: Adapter | None) -> Adapter:
            check_free(old, label or entry.name)
            if self.max_adapters is not None and len(self.folder.entries()) >= self.max_adapters:
                raise errors.OutOfMemory(
                    f"{self.max_adapters} adapters are registered, which is max_adapters"
                )

            return new

        self.folder.change(entry.name, make)
        try:
            await self._load(new)
            self.folder.replace(replace(new, state=State.READY))
        except BaseException as error:
            self.folder.remove(entry.name)
            if isinstance(error, LmiError) and not isinstance(error, errors.DeadlineExceeded):
                await self._forget(entry.name)

            raise

        log.info("adapter %s is registered", entry.name)

    async def update(self, entry: Adapter, label: str = "") -> None:
        """Give a registered adapter new settings on every engine, or on none. Raises what
        `register` raises.
        """
        old = self._changeable(entry.name, label)
        new = replace(entry, stamp=time.monotonic_ns())
        if not self.folder.swap(old, new):
            raise NameTaken(f"Adapter {label or entry.name} is being changed")

        try:
            await self._load(new)
        except LmiError:
            if self.folder.swap(new, old):
                with suppress(LmiError):
                    await self._load(old)

            raise

        log.info("adapter %s is updated", entry.name)

    async def unregister(self, name: str, label: str = "") -> None:
        """Unload an adapter from every engine. Requests that run with it finish. Raises
        NotRegistered.
        """
        self._changeable(name, label)
        if not self.folder.remove(name):
            raise NotRegistered(f"Adapter {label or name} is not registered")

        await self._forget(name)
        log.info("adapter %s is unregistered", name)

    def entries(self) -> list[Adapter]:
        """Return the registered adapters, sorted by name."""
        return [entry for entry in self.folder.entries() if entry.state is State.READY]

    def has(self, name: str) -> bool:
        """Return whether an adapter is registered, also if an engine could not load it again."""
        entry = self.folder.read(name)
        return entry is not None and entry.state is not State.PENDING

    def find(self, name: str, label: str = "") -> Adapter:
        """Return a registered adapter. Raises NotRegistered."""
        entry = self.folder.read(name)
        if entry is None or entry.state is State.PENDING:
            raise NotRegistered(f"Adapter {label or name} is not registered")

        return entry

    def _changeable(self, name: str, label: str) -> Adapter:
        """Return a registered adapter. Raises NotRegistered, or NameTaken for one that is being
        registered now.
        """
        entry = self.folder.read(name)
        if entry is not None and entry.state is State.PENDING and not is_abandoned(entry):
            raise NameTaken(f"Adapter {label or name} is being registered")

        return self.find(name, label)

    def failure(self, name: str) -> str | None:
        """Return why an engine could not load a registered adapter, or None."""
        return next(map(cause_line, self._failures(name)), None)

    def why_unusable(self, entry: Adapter, label: str) -> LmiError:
        """Return the error of a request for a registered adapter that no engine has.

        Where an engine may still come that has it, the client may ask again. An engine that has
        failed to load it does not try again by itself, so where all have, it gets the reason of the
        load.
        """
        failures = self._failures(entry.name)
        reason = cause_line(failures[0]) if failures else "no engine that has it is ready"
        reason = without_paths(reason, {entry.path: entry.src})
        message = f"Adapter {label} cannot be used: {reason}"

        may_come = len(failures) < len(self.engines.records)
        if may_come or isinstance(failures[0], errors.Unavailable):
            return errors.Unavailable(message)

        if isinstance(failures[0], errors.OutOfMemory):
            return errors.OutOfMemory(message)

        return AdapterUnusable(message)

    def _failures(self, name: str) -> list[LmiError]:
        """Return the errors of the engines that serve and could not load an adapter."""
        outcomes = [engine.outcomes.get(name) for engine in self.engines.serving().values()]
        return [
            from_info(outcome.error)
            for outcome in outcomes
            if outcome is not None and outcome.error is not None
        ]

    async def _load(self, entry: Adapter) -> None:
        """Wait until every engine has tried the entry, unless another takes its place. Raises the
        first reason.
        """

        def is_tried(outcomes: Outcomes) -> bool:
            current = self.folder.read(entry.name)
            if current is None or current.stamp != entry.stamp:
                return True

            outcome = outcomes.get(entry.name)
            return outcome is not None and outcome.stamp == entry.stamp

        try:
            for outcomes in await self._follow(is_tried):
                outcome = outcomes.get(entry.name)
                is_of_entry = outcome is not None and outcome.stamp == entry.stamp
                if outcome is not None and is_of_entry and outcome.error is not None:
                    raise from_info(outcome.error)
        except errors.ModelUnusable as error:
            raise AdapterUnusable(without_paths(str(error), {entry.path: entry.src})) from None
        except TimeoutError:
            raise errors.DeadlineExceeded(
                f"the adapter was not loaded within model_loading_timeout ({self.timeout_s:g} s)"
            ) from None

    async def _forget(self, name: str) -> None:
        """Wait until no engine has an adapter whose entry is gone."""

        def is_gone(outcomes: Outcomes) -> bool:
            return name not in outcomes or self.folder.read(name) is not None

        with suppress(errors.Unavailable, TimeoutError):
            await self._follow(is_gone)

    async def _follow(self, is_done: Callable[[Outcomes], bool]) -> list[Outcomes]:
        """Let every engine look at the folder, and wait until all have done what is wanted.

        Raises Unavailable if no engine serves, and EngineLost when the others have done it.
        """
        # Engines that are silent too.
        engines = [engine for engine in self.engines.open.values() if engine.info is not None]
        if not engines:
            raise self.engines.unavailable()

        follows = (_follow(engine, is_done) for engine in engines)
        async with asyncio.timeout(self.timeout_s):
            results = await asyncio.gather(*follows, return_exceptions=True)

        outcomes = list[Outcomes]()
        for result in results:
            if isinstance(result, BaseException):
                raise result

            outcomes.append(result)

        return outcomes


def check_free(entry: Adapter | None, label: str) -> None:
    """Raise NameTaken if `entry` has the name of a new adapter."""
    if entry is not None and not is_abandoned(entry):
        raise NameTaken(f"Adapter {label} is registered already")


async def _follow(engine: EngineConnection, is_done: Callable[[Outcomes], bool]) -> Outcomes:
    engine.write(frame(LOOK))
    while not engine.closed.done():
        if is_done(engine.outcomes):
            return engine.outcomes

        await engine.news.wait()

    raise errors.EngineLost("the engine was lost while it changed its adapters")
