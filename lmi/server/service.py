"""One model as a front end serves it, with its engines, pipeline and user code, and which one is
here.

A front end loads its model as soon as that has come. `lmi/models/choice.py` has several.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, Self

from msgspec import Struct
from starlette.exceptions import HTTPException

from lmi.adapters.files import adapters_of
from lmi.adapters.registry import AdapterRegistry
from lmi.apis.base.api import AnyApi
from lmi.engine.client import Engines
from lmi.engine.prefixes import PrefixEngines, PrefixTable
from lmi.errors import InvalidParameter, Overloaded, Unavailable, UnknownModel, shorten
from lmi.http.exchange import Exchange
from lmi.ipc import Connections
from lmi.pipeline import Pipeline
from lmi.runtime import Runtime
from lmi.server.front_end import FrontEnd, describe, explain
from lmi.server.hooks import RequestHooks
from lmi.sessions.folder import Sessions
from lmi.settings.config import Config, ModelConfig
from lmi.shared.state import Block, FrontEndRecord, Phase
from lmi.supervisor.restarts import LONGEST_DELAY_S
from lmi.text.tokenizer import Tokenizer
from lmi.types import GenerationRequest
from lmi.user_code.calls import UserCodeWorkers, ends
from lmi.user_code.hooks import FormatterHooks

if TYPE_CHECKING:
    from lmi.user_code.standards.calls import AppConnections

WATCH_S = 0.1
UNKNOWN = ModelConfig(path="", name="model")

log = logging.getLogger(__name__)


class Service(Struct):
    config: Config
    # The records of the model's processes.
    block: Block
    front_end: FrontEnd
    # Both are None if user code answers the requests.
    engines: Engines | None = None
    pipeline: Pipeline | None = None
    # None if the model has no user code.
    user_code: UserCodeWorkers | None = None
    # None if sessions are switched off.
    sessions: Sessions | None = None
    # None if the model has no engines.
    adapters: AdapterRegistry | None = None
    # The name of the folder of the model's processes.
    folder: str = ""
    # The model's code for AWS's standards, which requests pass through. None without such code.
    standards: AppConnections | None = None

    @classmethod
    def load(cls, runtime: Runtime, front_end: FrontEnd) -> Self:
        """Load the tokenizer of a model. Raises StartError for a model that a front end
        cannot use.
        """
        config = runtime.config
        block = runtime.attach()
        service = cls(config, block, front_end, folder=runtime.path.name)
        if config.user_code is not None:
            sockets, records = zip(*ends(runtime.path, block), strict=True)
            if config.user_code.standards_folder:
                from lmi.user_code.standards.calls import AppConnections

                service.standards = AppConnections(sockets, records)
            else:
                service.user_code = UserCodeWorkers(sockets, records)

        if not config.is_user_code:
            service._load_pipeline(runtime)

        service.sessions = Sessions.of(runtime)
        return service

    def _load_pipeline(self, runtime: Runtime) -> None:
        """Load what a model with engines needs: their connections, its tokenizer, its adapters."""
        config = self.config
        records = self.block.engines
        sockets = [runtime.engine_socket(slot) for slot in range(len(records))]
        shares_prompts = config.engine.enable_prefix_caching is not False
        memory = self.front_end.body_memory

        engines: Engines
        if shares_prompts and len(sockets) > 1:
            table = None
            if self.front_end.config.frontend_workers > 1:
                table = PrefixTable.shared(runtime.path / "prefixes")

            engines = PrefixEngines(sockets, records, self.record, table, memory)
        else:
            engines = Engines(sockets, records, self.record, memory)

        self.engines = engines
        tokenizer = Tokenizer.load(config.model.path)
        self.pipeline = Pipeline(tokenizer, engines, config.model, shares_prompts=shares_prompts)
        self.adapters = AdapterRegistry(
            engines,
            adapters_of(runtime),
            config.server.max_adapters,
            config.engine.model_loading_timeout_s,
        )

    async def start(self) -> None:
        """Connect to the model's processes, now and whenever one starts again."""
        for connections in self._connections:
            await connections.start()

    async def close(self) -> None:
        for connections in self._connections:
            await connections.close()

    @property
    def _connections(self) -> list[Connections[Any]]:
        connections = (self.engines, self.user_code, self.standards)
        return [connection for connection in connections if connection is not None]

    @property
    def record(self) -> FrontEndRecord:
        """What this front end counts of this model."""
        return self.block.frontends[self.front_end.slot]

    @property
    def model(self) -> ModelConfig:
        return self.config.model

    @property
    def num_running_sequences(self) -> int:
        """The most sequences that run at once in all engines. A process of user code runs one
        request at once.
        """
        if self.config.is_user_code:
            return len(self.block.engines)

        return sum(engine.max_num_sequences for engine in self.block.engines)

    @property
    def gives_embeddings(self) -> bool:
        """Whether this is an embedding model, as far as an engine has said so."""
        if self.engines is None:
            return False

        for connection in self.engines.open.values():
            info = connection.info
            if info is not None and info.capabilities.embeddings is not None:
                return True

        return False

    @property
    def max_in_flight(self) -> int:
        """The most sequences of this model that may run and wait."""
        num_running = sum(engine.max_num_sequences for engine in self.block.engines)
        return self.front_end.config.job_queue_size + num_running

    @property
    def served_names(self) -> str:
        """All names that requests may give, for the error of one that gives another."""
        adapters = () if self.engines is None else self.engines.adapters
        names = ", ".join(map(repr, (self.model.name, *self.model.aliases, *adapters)))
        return f"{names} (option.served_model_name sets the model's names)"

    def check_model(self, name: str, version: str | None = None) -> None:
        """Raise UnknownModel for a name or version that is not served here."""
        model = self.config.model
        if name not in model.names:
            raise UnknownModel(f"no model {shorten(name)} is served here, only {self.served_names}")

        if version is not None and version != model.version:
            raise UnknownModel(
                f"no version {shorten(version)} of the model is served here, only {model.version!r}"
            )

    def check_room(self, num_sequences: int = 1) -> None:
        """Raise Draining while the server drains, and Overloaded if the model's queue
        has no room.
        """
        self.front_end.check_serves()
        limit = self.max_in_flight

        num_in_flight = 0
        front_ends = self.front_end.block.frontends
        for record, front_end in zip(self.block.frontends, front_ends, strict=True):
            # Else the front end that counted here has died, and its successor has not claimed the
            # record yet.
            if record.pid == front_end.pid:
                num_in_flight += record.num_sequences

        if num_in_flight + num_sequences > limit:
            raise Overloaded(
                f"{num_in_flight} of {limit} sequences for the model {self.config.model.name!r} "
                f"are in flight already (job_queue_size and the running batch)"
            )

    @contextmanager
    def admitted(self, num_sequences: int = 1) -> Iterator[None]:
        """Hold a place for each sequence of a request. Raises Overloaded or Draining if not all
        find room.
        """
        self.check_room(num_sequences)
        server_record = self.front_end.record
        model_record = self.record

        server_record.num_in_flight += 1
        server_record.num_sequences += num_sequences
        model_record.num_sequences += num_sequences
        try:
            yield
        finally:
            server_record.num_in_flight -= 1
            server_record.num_sequences -= num_sequences
            model_record.num_sequences -= num_sequences

    def check_sequences(self, requests: Sequence[GenerationRequest]) -> None:
        """Raise InvalidParameter if one body asks for more sequences than it may, or than the queue
        can ever hold.
        """
        limit = self.config.server.max_request_sequences
        reason = "max_request_sequences"
        max_in_flight = self.max_in_flight
        # While an engine is not alive, it is not known yet how many sequences it runs.
        if max_in_flight < limit and all(engine.is_alive for engine in self.block.engines):
            limit = max_in_flight
            reason = "job_queue_size and the running batch"

        num_prompts = len(requests)
        if num_prompts > limit:
            raise InvalidParameter(
                "inputs", f"at most {limit} prompts ({reason})", f"{num_prompts} prompts"
            )

        num_places = max(request.num_places for request in requests)
        if num_prompts * num_places > limit:
            scope = f" for each of {num_prompts} prompts" if num_prompts > 1 else ""
            limit_each = limit // num_prompts
            rule = f"at most {limit_each}{scope}, as best_of ({limit} sequences, {reason})"

            name = "num_return_sequences"
            if any(request.is_beam_search for request in requests):
                name = "beam_width"

            raise InvalidParameter(name, rule, num_places)

    def hooks_for(self, exchange: Exchange, api: AnyApi, *, is_admitted: bool) -> RequestHooks:
        """Return what the model's own code changes of a request to a path of this API.

        With `is_admitted` the caller holds a place in the queue for the request.
        """
        if self.user_code is None or not api.takes_user_code:
            return RequestHooks()

        admit = nullcontext if is_admitted else self.admitted
        return FormatterHooks(exchange, self.config, self.user_code, admit, self.adapters)


class Models:
    """The model of this front end, which the server was started for. `SeveralModels`
    come and go.
    """

    # Whether the server has one model, whose failure ends it.
    keeps_only_one: ClassVar[bool] = True

    def __init__(self, front_end: FrontEnd) -> None:
        self.front_end = front_end
        self.runtime = front_end.runtime
        # By the name of the model.
        self.services: dict[str, Service] = {}

    # Which a request is for.

    @property
    def only(self) -> Service | None:
        """The model that requests mean if they name none."""
        services = list(self.services.values())
        return services[0] if len(services) == 1 else None

    @property
    def only_model(self) -> ModelConfig:
        """The settings that decide the form of an error before its model is known."""
        only = self.only
        return UNKNOWN if only is None else only.config.model

    @property
    def config(self) -> Config:
        """The settings that any model here may have. Raises Unavailable while the model is not
        here.
        """
        return self.require_only().config

    def require_only(self) -> Service:
        """Return the model of a server that keeps one. Raises Unavailable while it is not here."""
        only = self.only
        if only is None:
            stage = self.front_end.block.supervisor.stage or "start"
            raise Unavailable(f"the model is loading: {stage}")

        return only

    async def pick(self, exchange: Exchange) -> Service:
        """Return the model that a request is for. Raises Unavailable while it is not here."""
        return self.require_only()

    @contextmanager
    def using(self, service: Service) -> Iterator[None]:
        """Count a request, for which the unloading of its model waits."""
        service.record.num_in_flight += 1
        try:
            yield
        finally:
            service.record.num_in_flight -= 1

    async def listed(self) -> list[Service]:
        """Return every model, by name. Raises Unavailable while the one of a server that keeps one
        is not here.
        """
        return [self.require_only()]

    async def listed_for_engines(self) -> list[Service]:
        """Return every model for a route that the one model does not have if it is user code:
        HTTPException then.
        """
        services = await self.listed()
        if self.keeps_only_one and services[0].config.is_user_code:
            raise HTTPException(404)

        return services

    # What is here.

    def add(self, service: Service) -> None:
        """Serve a model. Its record of this front end says so to the supervisor."""
        service.record.claim()
        self.services[service.config.model.name] = service

    def load(self) -> None:
        """Load the model, if it is here. Raises what keeps this front end from using it."""
        runtime = self.runtime.shown_model()
        if runtime is not None:
            self.add(Service.load(runtime, self.front_end))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep the models connected with their processes, and follow those that come and go."""
        for service in self.services.values():
            await service.start()

        watch = asyncio.create_task(self.follow())
        try:
            yield
        finally:
            watch.cancel()
            for service in list(self.services.values()):
                await service.close()

    async def follow(self) -> None:
        """Load the model as soon as it comes, unless it is here. What fails is tried again, each
        time later.
        """
        if self.only is None:
            await until_done(self._load_late)

    async def _load_late(self) -> None:
        try:
            runtime = self.runtime.shown_model()
            while runtime is None:
                await asyncio.sleep(WATCH_S)
                runtime = self.runtime.shown_model()

            service = await asyncio.to_thread(Service.load, runtime, self.front_end)
            await service.start()
        except Exception as error:
            if self.front_end.block.supervisor.phase == Phase.LOADING:
                # The process ends as it does when `load` fails.
                os._exit(explain(self.runtime, error))

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
