"""Loads and unloads the adapters of an engine, as the folder of desired state says.

Front ends write this folder (`registry.py`). The engine looks at it with each of its beats, and at
once when a front end asks for it. Every front end is told what became of each entry.
"""

import asyncio
import logging
import math
import time
from collections.abc import Iterable
from contextlib import suppress

from lmi.adapters.files import Adapter
from lmi.engine.messages import AdapterOutcome, refusal
from lmi.engine.server import Dispatcher
from lmi.errors import ErrorInfo, LmiError, ModelUnusable, cause_line, from_info
from lmi.executor import Executor
from lmi.shared.desired_state import Folder, State, Version, is_abandoned

log = logging.getLogger(__name__)


class AdapterKeeper:
    """The adapters of one executor. They are changed one at a time, on another thread, because
    large files may be read.
    """

    def __init__(
        self,
        executor: Executor,
        folder: Folder[Adapter],
        dispatcher: Dispatcher,
        timeout_s: float = math.inf,
    ) -> None:
        """The dispatcher says when to look, and tells front ends of outcomes. A load may hold up
        the steps for `timeout_s`.
        """
        # What became of each entry, by the adapter's name.
        self.outcomes: dict[str, AdapterOutcome] = {}
        self._executor = executor
        self._folder = folder
        self._dispatcher = dispatcher
        dispatcher.look = self.look
        dispatcher.may_rest = self._may_rest

        self._timeout_s = timeout_s
        # When the load that goes on now was first seen.
        self._load_seen_s: float | None = None
        # The version of the folder that was followed last, None if a part of it could not be read.
        self._version: Version | None = frozenset()
        # The entries of that version which their writers had not finished.
        self._pending: list[Adapter] = []
        # The entries whose adapters the executor has.
        self._loaded: dict[str, Adapter] = {}
        self._following: asyncio.Task[None] | None = None

    def look(self) -> None:
        """Follow the folder in a task. A task that follows it already sees every change before it
        ends.
        """
        if self._following is None or self._following.done():
            self._following = asyncio.get_running_loop().create_task(self.follow())

    def _may_rest(self) -> bool:
        """Whether a load holds up the steps, and has not taken longer than it may."""
        if not self._executor.is_loading_adapter:
            self._load_seen_s = None
            return False

        now = time.monotonic()
        self._load_seen_s = self._load_seen_s or now
        return now - self._load_seen_s < self._timeout_s

    async def load_first(self) -> None:
        """Load the adapters of a server that starts. Raises ModelUnusable if one beside the model
        fails.
        """
        await self.follow()
        for entry in self._folder.entries():
            outcome = self.outcomes.get(entry.name)
            if entry.is_static and outcome is not None and outcome.error is not None:
                raise ModelUnusable(f"adapter {entry.name}: {cause_line(from_info(outcome.error))}")

    async def follow(self) -> None:
        """Load and unload adapters until the engine has those that the folder lists."""
        while self._folder.version() != self._version or any(map(is_abandoned, self._pending)):
            snapshot = self._folder.snapshot()
            self._version = snapshot.version
            await self._apply(snapshot.entries)
            if snapshot.version is None:
                # The next beat looks again.
                return

    async def _apply(self, entries: Iterable[Adapter]) -> None:
        """Unload the adapters that are not among the entries, and load new and changed ones.

        A load that failed is tried again with every change of the folder.
        """
        self._pending = [entry for entry in entries if entry.state is State.PENDING]
        wanted = self._wanted(entries)
        for name in self.outcomes.keys() - wanted.keys():
            await self._unload(name)
            del self.outcomes[name]
            self._announce()

        for name, entry in wanted.items():
            if self.outcomes.get(name) != AdapterOutcome(entry.stamp):
                error = await self._bring_in(entry)
                self.outcomes[name] = AdapterOutcome(entry.stamp, error)
                self._announce()

    def _wanted(self, entries: Iterable[Adapter]) -> dict[str, Adapter]:
        """Return the entries by their names, without those beside the model if the engine has no
        adapters.
        """
        has_lora = self._executor.capabilities.lora
        return {entry.name: entry for entry in entries if has_lora or not entry.is_static}

    def _announce(self) -> None:
        self._dispatcher.announce(self.outcomes.copy())

    async def _bring_in(self, entry: Adapter) -> ErrorInfo | None:
        """Load an adapter, or change one that is loaded. Returns the error for clients if that
        fails.

        The executor neither unpins a loaded adapter nor reads it from another folder. Such a one is
        unloaded first, and loaded as it was if the change fails.
        """
        old = self._loaded.get(entry.name)
        if old is not None and old.stamp == entry.stamp:
            # The entry was changed, the change failed, and its writer took it back.
            return None

        is_unpinned = old is not None and old.is_pinned and not entry.is_pinned
        is_replaced = old is not None and (old.path != entry.path or is_unpinned)
        if is_replaced:
            await self._unload(entry.name)
            self._announce()

        try:
            await self._load(entry)
        except Exception as error:
            is_expected = isinstance(error, LmiError | ValueError | RuntimeError)
            log.error("adapter %s: %s", entry.name, error, exc_info=not is_expected)
            if old is not None and is_replaced:
                with suppress(Exception):
                    await self._load(old)

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
