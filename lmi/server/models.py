"""The models of one front end: it loads those that the folder of desired state has, and follows every change.

`lmi/models/choice.py` has what several models need beside.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import ClassVar

from starlette.exceptions import HTTPException

from lmi.errors import StartError, Unavailable, UnknownModel
from lmi.http.exchange import Exchange
from lmi.server.front_end import FrontEnd, describe, explain
from lmi.server.service import Service
from lmi.settings.config import Config, ModelConfig
from lmi.shared.desired_state import Model, State
from lmi.shared.state import Phase
from lmi.supervisor.restarts import LONGEST_DELAY_S

WATCH_S = 0.1
LOOK_S = 0.02  # between two looks at a model that loads or ends
CLOSE_S = 40.0  # for requests of a model that is unloaded; the supervisor ends those that are left after 30 s
UNKNOWN = ModelConfig(path="", name="model")

log = logging.getLogger(__name__)


class Models:
    """The model of this front end, which the server was started for. `SeveralModels` come and go."""

    keeps_one: ClassVar[bool] = True  # one model, whose failure ends the server

    def __init__(self, front_end: FrontEnd) -> None:
        self.front_end = front_end
        self.runtime = front_end.runtime
        self.folder = self.runtime.models()
        self.services: dict[str, Service] = {}  # by the model's name
        self._loads: dict[str, asyncio.Task[Service]] = {}  # that run in this front end, by the model's folder
        self._closings: set[asyncio.Task[None]] = set()

    # Which a request is for.

    @property
    def only(self) -> Service | None:
        """The model that requests mean if they name none."""
        return next(iter(self.services.values()), None) if len(self.services) == 1 else None

    @property
    def usual(self) -> ModelConfig:
        """The settings that decide the form of an error before its model is known."""
        return UNKNOWN if self.only is None else self.only.config.model

    @property
    def config(self) -> Config:
        """The settings that any model here may have. Raises Unavailable while the model is not here."""
        return self.the_only().config

    def the_only(self) -> Service:
        """Return the model of a server that keeps one. Raises Unavailable while it is not here."""
        if self.only is None:
            raise Unavailable(f"the model is loading: {self.front_end.block.supervisor.stage or 'start'}")
        return self.only

    async def pick(self, exchange: Exchange) -> Service:
        """Return the model that a request is for. Raises Unavailable while it is not here."""
        return self.the_only()

    @contextmanager
    def using(self, service: Service) -> Iterator[None]:
        """Count a request, for which the unloading of its model waits."""
        service.record.num_in_flight += 1
        try:
            yield
        finally:
            service.record.num_in_flight -= 1

    async def listed(self) -> list[Service]:
        """Return every model, by name. Raises Unavailable while the one of a server that keeps one is not here."""
        return [self.the_only()]

    async def listed_for_engines(self) -> list[Service]:
        """Return every model for a route that the one model does not have if it is user code: HTTPException then."""
        services = await self.listed()
        if self.keeps_one and services[0].config.is_user_code:
            raise HTTPException(404)
        return services

    # What is here.

    def add(self, service: Service) -> None:
        """Serve a model. Its record of this front end says so to the supervisor."""
        service.record.claim()
        self.services[service.config.model.name] = service

    def load(self) -> None:
        """Load the models that are ready. Only one that the server was started for keeps a front end from its start.

        Raises what keeps this front end from using that one.
        """
        for entry in self.folder.entries():
            if entry.state is State.READY:
                try:
                    self.add(self._read(entry))
                except (StartError, OSError) as error:
                    if self.keeps_one:
                        raise
                    log.error("model %s cannot be used here: %s", entry.name, error)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep the models connected with their processes, and follow those that come and go."""
        for service in self.services.values():
            await service.start()
        gc.freeze()  # loaded objects stay; without this each full collection would walk through them
        watch = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            watch.cancel()
        for service in list(self.services.values()):
            await service.close()

    async def _watch(self) -> None:
        """Follow every change of the folder, also one since `load`. What fails is tried again, each time later."""
        seen, delay_s = None, WATCH_S
        while True:
            try:
                if (version := self.folder.version()) != seen:
                    if failures := await self.refresh():
                        raise failures[0]
                    seen, delay_s = version, WATCH_S
            except Exception as error:
                delay_s = min(2 * delay_s, LONGEST_DELAY_S)
                if self.keeps_one and self.front_end.block.supervisor.phase == Phase.LOADING:
                    os._exit(explain(self.runtime, error))  # as after `load`
                log.error("a model cannot be used here: %s; next try in %g s", describe(error), delay_s)
            await asyncio.sleep(delay_s)

    async def refresh(self) -> list[Exception]:
        """Load the models that are ready, and let go of those that are gone. Returns why others cannot be used here."""
        for service in list(self.services.values()):
            if not self._is_wanted(service):
                self._let_go(service)
        failures: list[Exception] = []
        for entry in self.folder.entries():
            if entry.state is State.READY:
                try:
                    await self.here(entry)
                except UnknownModel:  # it was unloaded a moment ago
                    pass
                except Exception as error:  # `pick` reports it to those who ask for the model
                    failures.append(error)
        return failures

    async def here(self, entry: Model) -> Service:
        """Return a model as this front end serves it, which loads it if it is missing.

        Raises StartError, or UnknownModel if it was unloaded a moment ago.
        """
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
            service = await asyncio.to_thread(self._read, entry)
        except OSError:
            if self.keeps_one:
                raise
            raise UnknownModel(f"the model {entry.name!r} has just been unloaded") from None
        await service.start()
        if (older := self.services.get(entry.name)) is not None:
            self._let_go(older)
        self.add(service)
        gc.freeze()
        if not self._is_wanted(service):
            self._let_go(service)
        return service

    def _read(self, entry: Model) -> Service:
        """Load a model's tokenizer. Raises StartError, or OSError if the model has just been removed."""
        return Service.load(self.runtime.model(entry), self.front_end)

    def _is_wanted(self, service: Service) -> bool:
        entry = self.folder.read(service.config.model.name)
        is_there = entry is not None and entry.folder == service.folder and entry.state is not State.FAILED
        return is_there or self.keeps_one

    def _let_go(self, service: Service) -> None:
        """Take no more requests for a model, and close its connections when the last request has ended."""
        name = service.config.model.name
        if self.services.get(name) is service:
            del self.services[name]
        task = asyncio.create_task(self._close_when_idle(service))
        self._closings.add(task)
        task.add_done_callback(self._closings.discard)

    async def _close_when_idle(self, service: Service) -> None:
        await until(lambda: not service.record.num_in_flight, CLOSE_S)
        await service.close()


async def until(is_so: Callable[[], bool], timeout_s: float) -> bool:
    """Wait until something is so. Returns whether it is."""
    deadline_s = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > deadline_s:
            return False
        await asyncio.sleep(LOOK_S)
    return True
