"""The models of one front end where several come and go, and which one a request means.

A path may name it. Else the query's `model_name` does, else `model_name=` in Custom-Attributes,
else the `model` of a body in OpenAI's form, which may be the name of an adapter. A request without
any of them means the only loaded model.
"""

import asyncio
import gc
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from lmi.apis.base.body import BodyOutline
from lmi.apis.openai.api import OPENAI_CHAT
from lmi.apis.openai.schema import UNNAMED
from lmi.apis.table import BY_FIELD
from lmi.errors import (
    InvalidRequest,
    Overloaded,
    StartError,
    Unavailable,
    UnknownModel,
    shorten,
    without_paths,
)
from lmi.http.exchange import Exchange
from lmi.models.folder import Model, ModelFolder
from lmi.server.front_end import FrontEnd
from lmi.server.service import UNKNOWN, WATCH_S, Models, Service, until_done
from lmi.settings.config import Config, EngineConfig
from lmi.settings.kinds import local_path
from lmi.shared.desired_state import State, Version, is_abandoned
from lmi.shared.state import Block, Phase

NAME = "model_name"
OPENAI_PATHS = OPENAI_CHAT.prefixes
# The time between two looks at a model that loads or ends.
LOOK_S = 0.02
# For requests of a model that is unloaded; the supervisor ends those that are left after 30 s.
CLOSE_S = 40.0

CANNOT_START = "the model's processes cannot be started, see the log"

log = logging.getLogger(__name__)


class Status(NamedTuple):
    """The state that a model is in, and why it is FAILED."""

    state: State
    reason: str


class SeveralModels(Models):
    """Models that come and go. Each request reads its model's entry, so all front ends agree at
    once.
    """

    keeps_only_one = False

    def __init__(self, front_end: FrontEnd) -> None:
        super().__init__(front_end)
        self.folder = ModelFolder(self.runtime)

        # The loads that run in this front end, by the model's folder.
        self._loads: dict[str, asyncio.Task[Service]] = {}
        # Those that `follow` wants, which go on or are done, and the version that it saw last.
        self._followed: dict[str, asyncio.Task[None]] = {}
        self._followed_version: Version | None = None

        self._closings: set[asyncio.Task[None]] = set()

    @property
    def config(self) -> Config:
        return Config(server=self.front_end.config, model=UNKNOWN, engine=EngineConfig())

    async def pick(self, exchange: Exchange) -> Service:
        """Return the model that a request is for. Raises UnknownModel, InvalidRequest if none is
        named, Unavailable.
        """
        return await self._usable(await self._name(exchange))

    async def _name(self, exchange: Exchange) -> str:
        if "model" in exchange.scope["path_params"]:
            return str(exchange.scope["path_params"]["model"])

        name = exchange.query.get(NAME) or exchange.attribute(NAME)
        if name:
            return name

        entries = self.folder.entries()
        if len(entries) == 1:
            # Its schema knows the names that a body may have for it.
            return entries[0].name

        name = await self._name_by_body(exchange)
        if name is not None:
            return name

        ready = [entry.name for entry in entries if self.status(entry).state is State.READY]
        if len(ready) == 1:
            return ready[0]

        names = ", ".join(map(repr, sorted(ready)))
        loaded = f"loaded are {names}" if names else "none is loaded"
        raise InvalidRequest(
            f"the request must name its model ({NAME} in the query or in Custom-Attributes, or a "
            f"path below /models/NAME): {loaded}"
        )

    async def _name_by_body(self, exchange: Exchange) -> str | None:
        """Return the model that a body names, by its own name, its folder, or the name of an
        adapter. One that nobody has is returned as it is.
        """
        if exchange.method == "POST":
            # Before the body: a full server reads nothing.
            self._check_room()

        name = await name_in_body(exchange, self.front_end)
        if name is None or self.folder.read(name) is not None:
            return name

        for service in await self.listed():
            is_adapter = service.adapters is not None and service.adapters.has(name)
            if is_adapter or service.config.model.answers_to(name):
                return service.config.model.name

        return name

    def _check_room(self) -> None:
        """Raise Draining while the server drains, and Overloaded if the queues of all models
        together are full.
        """
        self.front_end.check_serves()
        limit = sum(service.max_in_flight for service in self.services.values())
        limit = max(limit, self.front_end.config.job_queue_size)
        num_taken = sum(record.num_sequences for record in self.front_end.block.frontends)
        if num_taken >= limit:
            raise Overloaded(
                f"{num_taken} of {limit} sequences are in flight already, there is no room for "
                "1 more (job_queue_size and the running batch)"
            )

    async def _usable(self, name: str) -> Service:
        """Return a model that can be used. Its entry is read once more just before the request
        counts.
        """
        entry = self._entry(name)
        service: Service | None = None
        if entry.state is State.READY:
            try:
                service = await self.here(entry)
            except StartError as error:
                reason = reason_for_client(str(error), entry.url)
                raise Unavailable(f"the model {name!r} cannot be used: {reason}") from None

        entry = self._entry(name)
        status = self.status(entry)
        is_here = service is not None and service.folder == entry.folder
        if service is None or not is_here or status.state is not State.READY:
            because = f": {status.reason}" if status.reason else ""
            raise Unavailable(f"the model {name!r} is {status.state.upper()}{because}")

        return service

    def _entry(self, name: str) -> Model:
        """Return the entry of a model. Raises UnknownModel, which names those that are loaded."""
        entry = self.folder.read(name)
        if entry is None or is_abandoned(entry):
            names = [repr(entry.name) for entry in self.folder.entries()]
            loaded = ", ".join(names) or "none"
            raise UnknownModel(f"no model {shorten(name)} is served here, loaded: {loaded}")

        return entry

    def status(self, entry: Model) -> Status:
        """Return the state that a model is in, and the reason. Its processes may have failed since
        it was READY.
        """
        with suppress(OSError, StartError):
            record = self.block(entry).supervisor
            if record.phase == Phase.FAILED:
                return Status(State.FAILED, reason_for_client(record.reason, entry.url))

        return Status(entry.state, entry.reason)

    def block(self, entry: Model) -> Block:
        """Return the shared block of a model. Raises OSError or StartError if it is gone."""
        service = self.services.get(entry.name)
        if service is not None and service.folder == entry.folder:
            return service.block

        return self.folder.runtime_of(entry).attach()

    async def listed(self) -> list[Service]:
        """Return every model that is ready and can be used here, by name."""
        self.let_go()
        loads = [self.here(entry) for entry in ready_entries(self.folder.entries())]
        services = await asyncio.gather(*loads, return_exceptions=True)
        return [service for service in services if isinstance(service, Service)]

    # What is here.

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


async def name_in_body(exchange: Exchange, front_end: FrontEnd) -> str | None:
    """Return the `model` of a body in OpenAI's form, or None. The route reads the body again."""
    if exchange.method != "POST":
        return None

    body = await exchange.peek(front_end.config.max_request_size, front_end.body_memory)
    outline = BodyOutline.of(body)
    if outline is None:
        return None

    has_openai_field = not outline.has("inputs") and any(map(outline.has, BY_FIELD))
    if not exchange.path.startswith(OPENAI_PATHS) and not has_openai_field:
        return None

    name = outline.value("model")
    if not isinstance(name, str) or name in ("", "model", *UNNAMED):
        return None

    return name


def reason_for_client(reason: str, url: str) -> str:
    """Return a reason for a client, which knows the model's folder by its url."""
    try:
        folder = str(Path(local_path(url)).resolve())
    except (OSError, ValueError):
        # It is no path.
        return reason

    return without_paths(reason, {folder: url})
