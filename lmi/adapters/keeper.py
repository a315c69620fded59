"""Keeps an engine's adapters as the folder of desired state says, which front ends write.

The engine looks at the folder at each of its beats, and at once when a front end says so. What
became of each entry goes to every front end. Adapters beside the model are in the folder from the
start.
"""

import asyncio
import logging
import math
import time
from contextlib import suppress

from lmi.adapters.files import Adapter
from lmi.engine.messages import AdapterOutcome, refusal
from lmi.engine.server import Dispatcher
from lmi.errors import ErrorInfo, LmiError, ModelUnusable, cause_line, from_info
from lmi.executor import Executor
from lmi.shared.desired_state import Folder, State, Version, is_abandoned

log = logging.getLogger(__name__)


class AdapterKeeper:
    """Changes the adapters of one executor, one at a time, on another thread, because large files
    may be read.
    """

    def __init__(
        self,
        executor: Executor,
        folder: Folder[Adapter],
        dispatcher: Dispatcher,
        timeout_s: float = math.inf,
    ) -> None:
        """The dispatcher says when to look, and passes outcomes on. A load may hold up the steps
        for `timeout_s`.
        """
        # What became of the entries, by the adapter's name.
        self.outcomes: dict[str, AdapterOutcome] = {}
        self._executor = executor
        self._folder = folder
        self._dispatcher = dispatcher
        dispatcher.look = self.look
        dispatcher.may_rest = self._is_loading

        self._timeout_s = timeout_s
        # The time.monotonic() of the first look at the load that goes on now.
        self._load_s: float | None = None
        # That of the folder, as it was last read; None: not the whole of it.
        self._version: Version | None = frozenset()
        # The entries that front ends worked on then.
        self._pending: list[Adapter] = []
        self._loaded: dict[str, Adapter] = {}
        self._following: asyncio.Task[None] | None = None

    def look(self) -> None:
        """Follow the folder in a task. A task that follows it already sees every change before it
        ends.
        """
        if self._following is None or self._following.done():
            self._following = asyncio.get_running_loop().create_task(self.follow())

    def _is_loading(self) -> bool:
        """Whether the requests wait for an adapter. A load that takes too long no longer counts,
        and then they hang.
        """
        if not self._executor.is_loading_adapter:
            self._load_s = None
            return False

        now = time.monotonic()
        self._load_s = self._load_s or now
        return now - self._load_s < self._timeout_s

    async def load_first(self) -> None:
        """Load the registered adapters in a server that starts. Raises ModelUnusable if one beside
        the model fails.
        """
        await self.follow()
        for entry in self._folder.entries():
            outcome = self.outcomes.get(entry.name)
            if entry.is_static and outcome is not None and outcome.error is not None:
                raise ModelUnusable(f"adapter {entry.name}: {cause_line(from_info(outcome.error))}")

    async def follow(self) -> None:
        """Load the adapters that the folder has, and unload others. A load that failed is tried
        when it changes.
        """
        while self._folder.version() != self._version or any(map(is_abandoned, self._pending)):
            snapshot = self._folder.snapshot()
            self._version = snapshot.version
            await self._follow(snapshot.entries)
            if snapshot.version is None:
                # The next beat looks again.
                return

    async def _follow(self, entries: list[Adapter]) -> None:
        self._pending = [entry for entry in entries if entry.state is State.PENDING]
        has_lora = self._executor.capabilities.lora
        entries_here = {entry.name: entry for entry in entries if has_lora or not entry.is_static}
        for name in self.outcomes.keys() - entries_here.keys():
            await self._unload(name)
            del self.outcomes[name]
            self._announce()

        for entry in entries_here.values():
            if self.outcomes.get(entry.name) != AdapterOutcome(entry.stamp):
                self.outcomes[entry.name] = AdapterOutcome(entry.stamp, await self._try(entry))
                self._announce()

    def _announce(self) -> None:
        self._dispatcher.announce(self.outcomes.copy())

    async def _try(self, entry: Adapter) -> ErrorInfo | None:
        """Load an adapter, or change how a loaded one is kept. Returns why it cannot be done; the
        engine is unharmed.

        An adapter whose files another one of its name replaces is unloaded first, and comes back if
        the other fails.
        """
        loaded = self._loaded.get(entry.name)
        # With this stamp, a change of it was taken back.
        if loaded is not None and loaded.stamp == entry.stamp:
            return None

        is_replaced = loaded is not None and (
            loaded.path != entry.path or loaded.is_pinned > entry.is_pinned
        )
        if is_replaced:
            await self._unload(entry.name)
            self._announce()

        try:
            await self._load(entry)
        except Exception as error:
            is_expected = isinstance(error, LmiError | ValueError | RuntimeError)
            log.error("adapter %s: %s", entry.name, error, exc_info=not is_expected)
            if loaded is not None and is_replaced:
                with suppress(Exception):
                    await self._load(loaded)

            return refusal(error)

        return None

    async def _load(self, entry: Adapter) -> None:
        await asyncio.to_thread(
            self._executor.load_adapter,
            entry.name,
            entry.path,
            pinned=entry.is_pinned,
            preload=entry.preload,
        )
        self._loaded[entry.name] = entry

    async def _unload(self, name: str) -> None:
        if self._loaded.pop(name, None) is None:
            return

        try:
            await asyncio.to_thread(self._executor.unload_adapter, name)
        except Exception as error:
            log.error("adapter %s: %s", name, error)
