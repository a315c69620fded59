"""Which model a request means, where several come and go.

A path may name it. Else the query's `model_name` does, else `model_name=` in Custom-Attributes,
else the `model` of a body in OpenAI's form, which may be the name of an adapter. A request without
any of them means the only loaded model.
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
    """Models that come and go. Each request reads its model's entry, so all front ends agree at
    once.
    """

    keeps_only_one = False

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
