"""Which of several models a request means.

A path may name it. Else the query's `model_name` does, else `model_name=` in Custom-Attributes, else the `model` of a
body in OpenAI's form, which may be the name of an adapter. A request without any of them means the only loaded model.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from lmi.apis.base.readers import BodyOutline
from lmi.apis.openai.api import OPENAI_CHAT
from lmi.apis.openai.schema import UNNAMED
from lmi.apis.table import BY_FIELD
from lmi.errors import InvalidRequest, Overloaded, StartError, Unavailable, UnknownModel, shorten, without_paths
from lmi.http.exchange import Exchange
from lmi.server.front_end import FrontEnd
from lmi.server.models import UNKNOWN, Models
from lmi.server.service import Service
from lmi.settings.config import Config, EngineConfig
from lmi.settings.kinds import local_path
from lmi.shared.desired_state import Model, State, is_abandoned
from lmi.shared.state import Block, Phase

NAME = "model_name"
OPENAI_PATHS = OPENAI_CHAT.prefixes


class SeveralModels(Models):
    """Models that come and go. Each request reads its model's entry, so all front ends agree at once."""

    keeps_one = False

    @property
    def config(self) -> Config:
        return Config(server=self.front_end.config, model=UNKNOWN, engine=EngineConfig())

    async def pick(self, exchange: Exchange) -> Service:
        """Return the model that a request is for.

        Raises UnknownModel, InvalidRequest if it names none, or Unavailable.
        """
        return await self._usable(await self._name(exchange))

    async def _name(self, exchange: Exchange) -> str:
        if "model" in exchange.scope["path_params"]:
            return str(exchange.scope["path_params"]["model"])
        if name := exchange.query.get(NAME) or exchange.attribute(NAME):
            return name
        entries = self.folder.entries()
        if len(entries) == 1:
            return entries[0].name  # its schema knows the names that a body may have for it
        name = await self._name_inside(exchange)
        if name is not None:
            return name
        loaded = [entry.name for entry in entries if self.status(entry)[0] is State.READY]
        if len(loaded) != 1:
            names = ", ".join(map(repr, sorted(loaded)))
            raise InvalidRequest(
                f"the request must name its model ({NAME} in the query or in Custom-Attributes, or a path below "
                f"/models/NAME): {f'loaded are {names}' if names else 'none is loaded'}"
            )
        return loaded[0]

    async def _name_inside(self, exchange: Exchange) -> str | None:
        """Return the model that a body names, by its own name or that of an adapter."""
        if exchange.method == "POST":
            self._check_room()  # before the body: a full server reads nothing
        name = await name_in_body(exchange, self.front_end)
        if name is not None and self.folder.read(name) is None:
            for service in await self.listed():
                if service.adapters and service.adapters.has(name):
                    return service.config.model.name
        return name

    def _check_room(self) -> None:
        """Raise Unavailable while draining, and Overloaded if the queues of all models together are full."""
        self.front_end.check_serves()
        limit = sum(service.max_in_flight for service in self.services.values())
        limit = max(limit, self.front_end.config.job_queue_size)
        num_taken = sum(record.num_sequences for record in self.front_end.block.frontends)
        if num_taken >= limit:
            what = f"{num_taken} of {limit} sequences are in flight already, there is no room for 1 more"
            raise Overloaded(f"{what} (job_queue_size and the running batch)")

    async def _usable(self, name: str) -> Service:
        """Return a model that can be used. Its entry is read once more just before the request counts."""
        entry = self._entry(name)
        try:
            service = await self.here(entry) if entry.state is State.READY else None
        except StartError as error:
            raise Unavailable(f"the model {name!r} cannot be used: {said_of(str(error), entry.url)}") from None
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
        """Return every model that is ready, by name."""
        await self.refresh()
        ready = [entry.name for entry in self.folder.entries() if entry.state is State.READY]
        return [self.services[name] for name in ready if name in self.services]


async def name_in_body(exchange: Exchange, front_end: FrontEnd) -> str | None:
    """Return the `model` of a body in OpenAI's form, or None. The route reads the body again."""
    if exchange.method != "POST":
        return None
    body = await exchange.peek(front_end.config.max_request_size, front_end.body_memory)
    fields = BodyOutline.of(body)
    if fields is None:
        return None
    by_field = not fields.has("inputs") and any(map(fields.has, BY_FIELD))
    is_openai = exchange.path.startswith(OPENAI_PATHS) or by_field
    name = fields.value("model") if is_openai else None
    return None if not isinstance(name, str) or name in ("", "model", *UNNAMED) else name


def said_of(reason: str, url: str) -> str:
    """Return a reason for a client, which knows the model's folder by its url."""
    try:
        folder = str(Path(local_path(url)).resolve())
    except (OSError, ValueError):  # it is no path
        return reason
    return without_paths(reason, {folder: url})
