"""The model of one front end, which loads it as soon as it is here. `lmi/models/choice.py` has several."""

import asyncio
import gc
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import ClassVar

from starlette.exceptions import HTTPException

from lmi.errors import Unavailable
from lmi.http.exchange import Exchange
from lmi.server.front_end import FrontEnd, describe, explain
from lmi.server.service import Service
from lmi.settings.config import Config, ModelConfig
from lmi.shared.state import Phase
from lmi.supervisor.restarts import LONGEST_DELAY_S

WATCH_S = 0.1
UNKNOWN = ModelConfig(path="", name="model")

log = logging.getLogger(__name__)


class Models:
    """The model of this front end, which the server was started for. `SeveralModels` come and go."""

    keeps_one: ClassVar[bool] = True  # one model, whose failure ends the server

    def __init__(self, front_end: FrontEnd) -> None:
        self.front_end = front_end
        self.runtime = front_end.runtime
        self.services: dict[str, Service] = {}  # by the model's name

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
        """Load the model, if it is here. Raises what keeps this front end from using it."""
        if (runtime := self.runtime.shown_model()) is not None:
            self.add(Service.load(runtime, self.front_end))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep the models connected with their processes, and follow those that come and go."""
        for service in self.services.values():
            await service.start()
        gc.freeze()  # loaded objects stay; without this each full collection would walk through them
        watch = asyncio.create_task(self.follow())
        try:
            yield
        finally:
            watch.cancel()
        for service in list(self.services.values()):
            await service.close()

    async def follow(self) -> None:
        """Load the model as soon as it comes, unless it is here. What fails is tried again, each time later."""
        if self.only is None:
            await until_done(self._load_late)

    async def _load_late(self) -> None:
        try:
            while (runtime := self.runtime.shown_model()) is None:
                await asyncio.sleep(WATCH_S)
            service = await asyncio.to_thread(Service.load, runtime, self.front_end)
            await service.start()
        except Exception as error:
            if self.front_end.block.supervisor.phase == Phase.LOADING:
                os._exit(explain(self.runtime, error))  # as after `load`
            raise
        self.add(service)
        gc.freeze()


async def until_done(work: Callable[[], Awaitable[object]]) -> None:
    """Do what makes a model usable here. What fails is tried again, each time later."""
    delay_s = WATCH_S
    while True:
        try:
            await work()
            return
        except Exception as error:
            delay_s = min(2 * delay_s, LONGEST_DELAY_S)
            log.error("a model cannot be used here: %s; next try in %g s", describe(error), delay_s)
            await asyncio.sleep(delay_s)
