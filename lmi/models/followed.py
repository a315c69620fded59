"""The models that a front end serves where several come and go: it follows the folder in which
their entries stand.

A model loads here when its entry is ready, or when a request needs it first. One whose entry is
gone ends here with its last request.
"""

import asyncio
import gc
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from lmi.errors import Unavailable, UnknownModel
from lmi.models.folder import Model, ModelFolder
from lmi.server.front_end import FrontEnd
from lmi.server.service import WATCH_S, Models, Service, until_done
from lmi.shared.desired_state import State, Version

# The time between two looks at a model that loads or ends.
LOOK_S = 0.02
# For requests of a model that is unloaded; the supervisor ends those that are left after 30 s.
CLOSE_S = 40.0

CANNOT_START = "the model's processes cannot be started, see the log"

log = logging.getLogger(__name__)


class FollowedModels(Models):
    """The models that are here, as the entries of their folder want it."""

    def __init__(self, front_end: FrontEnd) -> None:
        super().__init__(front_end)
        self.folder = ModelFolder(self.runtime)

        # The loads that run in this front end, by the model's folder.
        self._loads: dict[str, asyncio.Task[Service]] = {}
        # Those that `follow` wants, which go on or are done, and the version that it saw last.
        self._followed: dict[str, asyncio.Task[None]] = {}
        self._followed_version: Version | None = None

        self._closings: set[asyncio.Task[None]] = set()

    async def listed(self) -> list[Service]:
        """Return every model that is ready and can be used here, by name."""
        self.let_go()
        loads = [self.here(entry) for entry in ready_entries(self.folder.entries())]
        services = await asyncio.gather(*loads, return_exceptions=True)
        return [service for service in services if isinstance(service, Service)]

    async def follow(self) -> None:
        """Follow every change of the folder. A model that is ready loads in a task of its own, so
        that none waits.
        """
        try:
            while True:
                await until_done(self._follow_once)
                await asyncio.sleep(WATCH_S)
        finally:
            for task in self._followed.values():
                task.cancel()

    async def _follow_once(self) -> None:
        """Begin and end loads, if the folder has changed since the last look."""
        version = self._followed_version
        if version is not None and self.folder.version() == version:
            return

        snapshot = self.folder.snapshot()
        self.let_go()

        ready_by_folder = {entry.folder: entry for entry in ready_entries(snapshot.entries)}
        for folder in self._followed.keys() - ready_by_folder.keys():
            self._followed.pop(folder).cancel()

        for folder in ready_by_folder.keys() - self._followed.keys():
            load = partial(self._load_if_known, ready_by_folder[folder])
            self._followed[folder] = asyncio.create_task(until_done(load))

        self._followed_version = snapshot.version

    async def _load_if_known(self, entry: Model) -> None:
        # If it is unknown, it was unloaded a moment ago.
        with suppress(UnknownModel):
            await self.here(entry)

    def let_go(self) -> None:
        """Let go of the models that are gone."""
        for service in list(self.services.values()):
            if not self._is_wanted(service):
                self._retire(service)

    async def here(self, entry: Model) -> Service:
        """Return a model as this front end serves it, which loads it if it is missing.

        Raises StartError, UnknownModel if it was unloaded a moment ago, or Unavailable if its files
        are gone.
        """
        service = self.services.get(entry.name)
        if service is not None and service.folder == entry.folder:
            return service

        task = self._loads.get(entry.folder)
        if task is None:
            task = asyncio.create_task(self._load(entry))
            self._loads[entry.folder] = task
            task.add_done_callback(lambda task: self._loads.pop(entry.folder, None))

        return await asyncio.shield(task)

    async def _load(self, entry: Model) -> Service:
        def load() -> Service:
            return Service.load(self.folder.runtime_of(entry), self.front_end)

        try:
            service = await asyncio.to_thread(load)
        except OSError as error:
            log.info("model %s: %s", entry.name, error)
            if self.folder.holds(entry):
                raise Unavailable(CANNOT_START) from None

            raise UnknownModel(f"the model {entry.name!r} has just been unloaded") from None

        await service.start()
        older = self.services.get(entry.name)
        if older is not None:
            self._retire(older)

        self.add(service)
        gc.freeze()
        if not self._is_wanted(service):
            self._retire(service)

        return service

    def _is_wanted(self, service: Service) -> bool:
        """Return whether a model that is here has an entry of the same load."""
        entry = self.folder.read(service.config.model.name)
        if entry is None or entry.folder != service.folder:
            return False

        return entry.state is not State.FAILED

    def _retire(self, service: Service) -> None:
        """Take no more requests for a model, and close its connections when the last request has
        ended.
        """
        name = service.config.model.name
        if self.services.get(name) is service:
            del self.services[name]

        task = asyncio.create_task(self._close_when_idle(service))
        self._closings.add(task)
        task.add_done_callback(self._closings.discard)

    async def _close_when_idle(self, service: Service) -> None:
        await until(lambda: not service.record.num_in_flight, CLOSE_S)
        await service.close()


def ready_entries(entries: Sequence[Model]) -> list[Model]:
    return [entry for entry in entries if entry.state is State.READY]


async def until(holds: Callable[[], bool], timeout_s: float) -> bool:
    """Wait until something holds. Returns whether it does."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while not holds():
                await asyncio.sleep(LOOK_S)

    return holds()
