"""The models of one front end: which there are, which one a request is for, and their loading.

The folder of desired state says which models there should be. A front end loads those that are there when it starts
before it takes a connection, and then every model that comes.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from lmi.errors import Unavailable
from lmi.http.exchange import Exchange
from lmi.runtime import ServerRuntime
from lmi.server.front_end import FrontEnd
from lmi.server.service import Service
from lmi.server.sessions import kept_clean
from lmi.settings.config import ModelConfig
from lmi.shared.desired_state import Model

WATCH_S = 0.1
UNKNOWN = ModelConfig(path="", name="model")


class Models:
    def __init__(self, front_end: FrontEnd) -> None:
        self.front_end = front_end
        self.services: dict[str, Service] = {}  # by the model's name

    def add(self, service: Service) -> None:
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

    def pick(self, exchange: Exchange) -> Service:
        """Return the model that a request is for. Raises Unavailable while it is not here."""
        if self.only is None:
            raise Unavailable(f"the model is loading: {self.front_end.block.supervisor.stage or 'start'}")
        return self.only

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep the models connected with their processes."""
        for service in self.services.values():
            await service.start()
        gc.freeze()  # loaded objects stay; without this each full collection would walk through them
        async with kept_clean(self.services):
            yield
        for service in self.services.values():
            await service.close()


class ModelLoader:
    """Brings the models of one front end in line with the folder of desired state."""

    def __init__(self, runtime: ServerRuntime, models: Models) -> None:
        self._runtime, self._models = runtime, models
        self._folder = runtime.models()

    def load(self) -> None:
        """Load every model that is there. Raises StartError for one that a front end cannot use."""
        for entry in self._missing():
            self._models.add(self._load(entry))

    def _missing(self) -> list[Model]:
        return [entry for entry in self._folder.entries() if entry.name not in self._models.services]

    def _load(self, entry: Model) -> Service:
        return Service.load(self._runtime.model(entry), self._models.front_end)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep the models connected, and load those that come."""
        async with self._models.running():
            task = asyncio.create_task(self._watch())
            yield
            task.cancel()

    async def _watch(self) -> None:
        seen = self._folder.version()
        while True:
            await asyncio.sleep(WATCH_S)
            if (version := self._folder.version()) != seen:
                seen = version
                await self._follow()

    async def _follow(self) -> None:
        for entry in self._missing():
            service = await asyncio.to_thread(self._load, entry)
            await service.start()
            self._models.add(service)
        gc.freeze()
