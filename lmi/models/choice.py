"""Chooses the model that a request means, where models are loaded and unloaded.

The first of these that a request has names its model:

1. a path below /models/NAME,
2. `model_name` in the query,
3. `model_name=` in Custom-Attributes,
4. `model` in a body of OpenAI's form: a name of the model, or of one of its adapters.

A request without any of them means the only model that is ready.
"""

from contextlib import suppress
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
from lmi.models.folder import Model
from lmi.models.followed import FollowedModels
from lmi.server.front_end import FrontEnd
from lmi.server.service import UNKNOWN, Service
from lmi.settings.config import Config, EngineConfig
from lmi.settings.kinds import local_path
from lmi.shared.desired_state import State, is_abandoned
from lmi.shared.state import Block, Phase

NAME = "model_name"
OPENAI_PATHS = OPENAI_CHAT.prefixes


class Status(NamedTuple):
    """The state that a model is in, and why it is FAILED."""

    state: State
    reason: str


class SeveralModels(FollowedModels):
    """The models of a server that loads and unloads them.

    Each request reads the entry of its model in the folder of models. So once a model is unloaded,
    no front end answers for it any more.
    """

    keeps_only_one = False

    @property
    def config(self) -> Config:
        """The settings of the server, where no model is meant."""
        return Config(server=self.front_end.config, model=UNKNOWN, engine=EngineConfig())

    async def pick(self, exchange: Exchange) -> Service:
        """Return the model that a request means.

        Raises InvalidRequest if it names none, UnknownModel, or Unavailable if the model is not
        ready.
        """
        return await self._usable(await self._name(exchange))

    async def _name(self, exchange: Exchange) -> str:
        """Return the name of the model that a request means. Raises InvalidRequest if it names
        none.
        """
        path_params = exchange.scope["path_params"]
        if "model" in path_params:
            return str(path_params["model"])

        name = exchange.query.get(NAME) or exchange.attribute(NAME)
        if name:
            return name

        entries = self.folder.entries()
        if len(entries) == 1:
            # The schema of the API checks which name the body has for it.
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
        """Return the name of the model that a body names, or None if it names none.

        The body may have the model's name, its folder, or the name of an adapter. A name that no
        model has is returned as it is.
        """
        if exchange.method == "POST":
            # A full server does not read the body.
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
        max_in_flight = sum(service.max_in_flight for service in self.services.values())
        max_in_flight = max(max_in_flight, self.front_end.config.job_queue_size)
        num_in_flight = sum(record.num_sequences for record in self.front_end.block.frontends)
        if num_in_flight >= max_in_flight:
            raise Overloaded(
                f"{num_in_flight} of {max_in_flight} sequences are in flight already, there is no "
                "room for 1 more (job_queue_size and the running batch)"
            )

    async def _usable(self, name: str) -> Service:
        """Return a model by its name. Raises UnknownModel, or Unavailable if it is not ready."""
        entry = self._entry(name)
        service: Service | None = None
        if entry.state is State.READY:
            try:
                service = await self.here(entry)
            except StartError as error:
                reason = reason_for_client(str(error), entry.url)
                raise Unavailable(f"the model {name!r} cannot be used: {reason}") from None

        # It may have been unloaded, or loaded anew, while this front end loaded it.
        entry = self._entry(name)
        status = self.status(entry)
        is_here = service is not None and service.folder == entry.folder
        if service is None or not is_here or status.state is not State.READY:
            because = f": {status.reason}" if status.reason else ""
            raise Unavailable(f"the model {name!r} is {status.state.upper()}{because}")

        return service

    def _entry(self, name: str) -> Model:
        """Return the entry of a model. Raises UnknownModel, whose text names the loaded ones."""
        entry = self.folder.read(name)
        if entry is None or is_abandoned(entry):
            names = [repr(entry.name) for entry in self.folder.entries()]
            loaded = ", ".join(names) or "none"
            raise UnknownModel(f"no model {shorten(name)} is served here, loaded: {loaded}")

        return entry

    def status(self, entry: Model) -> Status:
        """Return the state that a model is in.

        That is the state of its entry, unless its processes have failed since.
        """
        # The block is gone once the model is unloaded.
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


async def name_in_body(exchange: Exchange, front_end: FrontEnd) -> str | None:
    """Return the `model` of a body in OpenAI's form, or None if it names none.

    The body is kept for the route, which reads it whole.
    """
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
    """Return a reason for a client: it has the model's URL in place of its folder."""
    try:
        folder = str(Path(local_path(url)).resolve())
    except (OSError, ValueError):
        # The URL is no path.
        return reason

    return without_paths(reason, {folder: url})
