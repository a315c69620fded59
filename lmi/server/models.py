"""The models of one front end: which there are, which one a request is for, and their loading.

The folder of desired state says which models there should be. A front end loads those that are there when it starts
before it takes a connection, and then every model that comes. `several.py` has what is different with several models.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext

from starlette.exceptions import HTTPException

from lmi.errors import Unavailable
from lmi.http.exchange import Exchange
from lmi.runtime import ServerRuntime
from lmi.server.front_end import FrontEnd
from lmi.server.service import Service
from lmi.server.sessions import kept_clean
from lmi.server.start_failure import describe, explain
from lmi.settings.config import Config, ModelConfig
from lmi.shared.desired_state import Model
from lmi.shared.state import Phase
from lmi.supervisor.restarts import LONGEST_DELAY_S

WATCH_S = 0.1
UNKNOWN = ModelConfig(path="", name="model")

log = logging.getLogger(__name__)


class Models:
    """The one model of a server, once it is here."""

    is_several = False  # whether models come and go

    def __init__(self, front_end: FrontEnd) -> None:
        self.front_end = front_end
        self.services: dict[str, Service] = {}  # by the model's name

    def add(self, service: Service) -> None:
        """Serve a model. Its record of this front end says so to the supervisor."""
        service.record.claim()
        self.services[service.config.model.name] = service
        self.front_end.model_blocks[service.config.model.name] = service.block

    def remove(self, name: str) -> Service:
        del self.front_end.model_blocks[name]
        return self.services.pop(name)

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
        """The settings of the model. Raises Unavailable while it is not here."""
        return self.the_only().config

    async def pick(self, exchange: Exchange) -> Service:
        """Return the model that a request is for. Raises Unavailable while it is not here."""
        return self.the_only()

    def the_only(self) -> Service:
        if self.only is None:
            raise Unavailable(f"the model is loading: {self.front_end.block.supervisor.stage or 'start'}")
        return self.only

    def using(self, service: Service) -> AbstractContextManager[None]:
        """Count a request for a model while it runs, where models can be unloaded."""
        return nullcontext()

    async def refresh(self) -> None:
        """Load the models that can be used and are not here yet."""

    async def listed(self) -> list[Service]:
        """Return every model, by name. Raises Unavailable while the only one is not here."""
        return [self.the_only()]

    async def listed_for_engines(self) -> list[Service]:
        """Return every model for a route that a model of user code does not have. Raises HTTPException for that one."""
        if (service := self.the_only()).config.is_user_code:
            raise HTTPException(404)
        return [service]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep the models connected with their processes."""
        for service in self.services.values():
            await service.start()
        gc.freeze()  # loaded objects stay; without this each full collection would walk through them
        async with kept_clean(self.services):
            yield
        for service in list(self.services.values()):
            await service.close()


class ModelLoader:
    """Brings the models of one front end in line with the folder of desired state."""

    def __init__(self, runtime: ServerRuntime, models: Models) -> None:
        self._runtime, self._models = runtime, models
        self._folder = runtime.models()

    def load(self) -> None:
        """Load every model that is there. Raises StartError for one that a front end cannot use."""
        for entry in self._missing():
            self._models.add(load_service(self._runtime, entry, self._models.front_end))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep the models connected, and load those that come."""
        async with self._models.running():
            task = asyncio.create_task(self._watch())
            try:
                yield
            finally:
                task.cancel()

    async def _watch(self) -> None:
        """Follow every change of the folder, also one since `load`. What fails is tried again, each time later."""
        seen, delay_s = None, WATCH_S
        while True:
            if (version := self._folder.version()) != seen:
                try:
                    await self._follow()
                    seen, delay_s = version, WATCH_S
                except Exception as error:
                    delay_s = min(2 * delay_s, LONGEST_DELAY_S)
                    self._give_up(error, delay_s)
            await asyncio.sleep(delay_s)

    def _give_up(self, error: Exception, delay_s: float) -> None:
        """Log why a model cannot be used here. A server that starts with this model ends, as it does after `load`."""
        supervisor = self._models.front_end.block.supervisor
        if supervisor.phase == Phase.LOADING and not self._models.is_several:
            os._exit(explain(self._runtime, error))
        log.error("a model cannot be used here: %s; next try in %g s", describe(error), delay_s)

    async def _follow(self) -> None:
        for entry in self._missing():
            service = await asyncio.to_thread(load_service, self._runtime, entry, self._models.front_end)
            await service.start()
            self._models.add(service)
        gc.freeze()

    def _missing(self) -> list[Model]:
        return [entry for entry in self._folder.entries() if entry.name not in self._models.services]


def load_service(runtime: ServerRuntime, entry: Model, front_end: FrontEnd) -> Service:
    """Load a model into this front end. Raises StartError, or OSError if it has just been removed."""
    return Service.load(runtime.model(entry), front_end)
