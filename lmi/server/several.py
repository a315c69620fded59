"""Several models in one front end. They come and go while it runs.

Every front end reads a model's entry in the folder of desired state at each request for it, so all agree at once on
which models there are. A model that is missing in a front end is loaded there a moment after it is ready, or earlier if
a request needs it. `model_registry.py` writes the entries.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lmi.errors import LmiError, Overloaded, StartError, Unavailable, UnknownModel, shorten, without_paths
from lmi.http.exchange import Exchange
from lmi.runtime import ServerRuntime
from lmi.server.front_end import FrontEnd
from lmi.server.model_choice import must_name, name_in_body, name_outside_of_body, with_adapter
from lmi.server.models import UNKNOWN, ModelLoader, Models, load_service
from lmi.server.service import Service
from lmi.settings.config import Config, EngineConfig
from lmi.settings.model_urls import local_path
from lmi.shared.desired_state import Model, State, is_abandoned
from lmi.shared.state import Block, Phase

LOOK_S = 0.02  # between two looks at a model that loads or ends
CLOSE_S = 40.0  # for requests of a model that is unloaded; the supervisor ends those that are left after 30 s

log = logging.getLogger(__name__)


class SeveralModels(Models):
    """The models of this front end, which come and go."""

    is_several = True

    def __init__(self, front_end: FrontEnd, runtime: ServerRuntime) -> None:
        super().__init__(front_end)
        self.runtime = runtime
        self.folder = runtime.models()
        self._loads: dict[str, asyncio.Task[Service]] = {}  # that run in this front end, by the model's folder
        self._closings: set[asyncio.Task[None]] = set()

    @property
    def config(self) -> Config:
        """The settings that any model may have."""
        return Config(server=self.front_end.config, model=UNKNOWN, engine=EngineConfig())

    async def pick(self, exchange: Exchange) -> Service:
        """Return the model that a request is for.

        Raises UnknownModel, InvalidRequest if it names none, Unavailable, or Overloaded if the model's queue is full.
        """
        service = await self._usable(await self._name(exchange))
        if exchange.method == "POST":
            self._check_room(service)
        return service

    async def _name(self, exchange: Exchange) -> str:
        name = name_outside_of_body(exchange)
        if name is not None:
            return name
        entries = self.folder.entries()
        if len(entries) == 1:
            return entries[0].name  # its schema knows the names that a body may have for it
        name = await self._name_inside(exchange)
        if name is not None:
            return name
        loaded = [entry.name for entry in entries if self.status(entry)[0] is State.READY]
        if len(loaded) != 1:
            raise must_name(loaded)
        return loaded[0]

    async def _name_inside(self, exchange: Exchange) -> str | None:
        """Return the model that a body names, by its own name or that of an adapter."""
        name = await name_in_body(exchange, self.front_end)
        if name is None or self.folder.read(name) is not None:
            return name
        service = with_adapter(await self.listed(), name)
        return name if service is None else service.config.model.name

    async def _usable(self, name: str) -> Service:
        """Return a model that can be used. Its entry is read once more just before the request counts."""
        entry = self._entry(name)
        try:
            service = await self.here(entry) if entry.state is State.READY else None
        except StartError as error:
            raise Unavailable(f"the model {name!r} cannot be used: {error}") from None
        entry = self._entry(name)
        state, reason = self.status(entry)
        if service is None or service.folder != entry.folder or state is not State.READY:
            raise Unavailable(f"the model {name!r} is {state.upper()}{f': {reason}' if reason else ''}")
        return service

    def _entry(self, name: str) -> Model:
        entry = self.folder.read(name)
        if entry is None or is_abandoned(entry):
            loaded = ", ".join(repr(entry.name) for entry in self.folder.entries()) or "none"
            raise UnknownModel(f"no model {shorten(name)} is served here, loaded: {loaded}")
        return entry

    def _check_room(self, service: Service) -> None:
        """Raise Overloaded if a model has all the requests that it may have, so that no model fills another's queue."""
        limit = self.front_end.config.job_queue_size + sum(e.max_num_sequences for e in service.block.engines)
        records = zip(service.block.frontends, self.front_end.block.frontends, strict=True)
        num_taken = sum(record.num_in_flight for record, front_end in records if record.pid == front_end.pid)
        if num_taken >= limit:
            what = f"{num_taken} of {limit} requests for the model {service.config.model.name!r} are in flight already"
            raise Overloaded(f"{what} (job_queue_size and the running batch)")

    @contextmanager
    def using(self, service: Service) -> Iterator[None]:
        """Count a request, for which the supervisor waits when its model is unloaded."""
        record = service.record
        record.num_in_flight += 1
        try:
            yield
        finally:
            record.num_in_flight -= 1

    def status(self, entry: Model) -> tuple[State, str]:
        """Return the state that a model is in, and the reason. Its processes may have failed since it was READY."""
        with suppress(OSError, StartError):
            record = self.block(entry).supervisor
            if record.phase == Phase.FAILED:
                return State.FAILED, said_of(record.reason, entry.url)
        return entry.state, entry.reason

    def block(self, entry: Model) -> Block:
        """Return the shared block of a model. Raises OSError or StartError if it is gone."""
        service = self.services.get(entry.name)
        if service is not None and service.folder == entry.folder:
            return service.block
        return self.runtime.model(entry).attach()

    async def listed(self) -> list[Service]:
        await self.refresh()
        ready = [entry.name for entry in self.folder.entries() if entry.state is State.READY]
        return [self.services[name] for name in ready if name in self.services]

    async def listed_for_engines(self) -> list[Service]:
        return await self.listed()

    # What is here.

    async def refresh(self) -> None:
        """Load the models that are ready, and let go of those that are gone."""
        entries = {entry.name: entry for entry in self.folder.entries() if entry.state is State.READY}
        for service in list(self.services.values()):
            if not self._is_wanted(service):
                self.let_go(service)
        for entry in entries.values():
            with suppress(LmiError, OSError):  # `pick` reports it to those who ask for the model
                await self.here(entry)

    def load(self) -> None:
        """Load the models that are ready. One that cannot be used here does not keep the front end from its start."""
        for entry in self.folder.entries():
            if entry.state is State.READY:
                try:
                    self.add(load_service(self.runtime, entry, self.front_end))
                except (StartError, OSError) as error:
                    log.error("model %s cannot be used here: %s", entry.name, error)

    async def here(self, entry: Model) -> Service:
        """Return a model as this front end serves it, which loads it if it is missing. Raises StartError."""
        service = self.services.get(entry.name)
        if service is not None and service.folder == entry.folder:
            return service
        task = self._loads.get(entry.folder)
        if task is None:
            task = self._loads[entry.folder] = asyncio.create_task(self._load(entry))
            task.add_done_callback(lambda task: self._loads.pop(entry.folder, None))
        return await asyncio.shield(task)

    async def _load(self, entry: Model) -> Service:
        try:
            service = await asyncio.to_thread(load_service, self.runtime, entry, self.front_end)
        except OSError:
            raise UnknownModel(f"the model {entry.name!r} has just been unloaded") from None
        await service.start()
        if (older := self.services.get(entry.name)) is not None:
            self.let_go(older)
        self.add(service)
        gc.freeze()
        if not self._is_wanted(service):
            self.let_go(service)
        return service

    def _is_wanted(self, service: Service) -> bool:
        entry = self.folder.read(service.config.model.name)
        return entry is not None and entry.folder == service.folder and entry.state is not State.FAILED

    def let_go(self, service: Service) -> None:
        """Take no more requests for a model, and close its connections when the last request has ended."""
        name = service.config.model.name
        if self.services.get(name) is service:
            self.remove(name)
        task = asyncio.create_task(self._close_when_idle(service))
        self._closings.add(task)
        task.add_done_callback(self._closings.discard)

    async def _close_when_idle(self, service: Service) -> None:
        await until(lambda: not service.record.num_in_flight, CLOSE_S)
        await service.close()


class SeveralLoader(ModelLoader):
    """Brings the models of one front end in line with the folder of desired state while they come and go."""

    def __init__(self, runtime: ServerRuntime, models: SeveralModels) -> None:
        super().__init__(runtime, models)
        self._several = models

    def load(self) -> None:
        self._several.load()

    async def _follow(self) -> None:
        await self._several.refresh()


async def until(is_so: Callable[[], bool], timeout_s: float) -> bool:
    """Wait until something is so. Returns whether it is."""
    deadline_s = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > deadline_s:
            return False
        await asyncio.sleep(LOOK_S)
    return True


def said_of(reason: str, url: str) -> str:
    """Return a reason for a client, which knows the model's folder by its url."""
    try:
        folder = str(Path(local_path(url)).resolve())
    except (OSError, ValueError):  # it is no path
        return reason
    return without_paths(reason, {folder: url})
