"""The state of the control plane: one file, which is written whole at each change."""

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from lmi.errors import BadConfiguration, cause_line
from lmi.gateway.control.resources import (
    COMPONENT,
    CONFIG,
    ENDPOINT,
    MODEL,
    ROUTER,
    ComponentResource,
    EndpointResource,
    Resource,
    ResourceKind,
    RouterResource,
)
from lmi.gateway.errors import AwsError
from lmi.gateway.state_folder import lock_folder
from lmi.shared.files import write_whole

# Of each kind.
MAX_RESOURCES = 1000
# Until a state that could not be written is tried again.
RETRY_S = 1.0

log = logging.getLogger(__name__)
R = TypeVar("R", bound=Resource)


class _State(msgspec.Struct):
    models: dict[str, Resource] = {}
    configs: dict[str, Resource] = {}
    endpoints: dict[str, EndpointResource] = {}
    components: dict[str, ComponentResource] = {}
    routers: dict[str, RouterResource] = {}


class StateFile:
    """All resources, and the file that they are in."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._retry: asyncio.TimerHandle | None = None
        self.state = _State()
        if path.exists():
            self.state = msgspec.json.decode(path.read_bytes(), type=_State)

    def write(self) -> None:
        """Write all resources. Raises OSError, and the file stays as it was."""
        write_whole(self._path, msgspec.json.encode(self.state))

    def write_soon(self) -> None:
        """Write all resources now, or as soon as there is room."""
        was_waiting = self._retry is not None
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None

        try:
            self.write()
        except OSError as error:
            if not was_waiting:
                log.error("the state of the control plane waits for room: %s", cause_line(error))

            self._retry = asyncio.get_running_loop().call_later(RETRY_S, self.write_soon)


class ResourceTable(Generic[R]):
    """The resources of one kind, by name.

    What a client asks for is on the disk when its call returns, or refused. What the gateway itself
    finds, as that a container serves, counts at once, and is written as soon as there is room.
    """

    def __init__(self, kind: ResourceKind, by_name: dict[str, R], file: StateFile) -> None:
        self.kind = kind
        self._by_name = by_name
        self._file = file

    def __iter__(self) -> Iterator[R]:
        return iter(list(self._by_name.values()))

    def get(self, name: str) -> R | None:
        return self._by_name.get(name)

    def find(self, name: str, region: str) -> R:
        """Return a resource. Raises AwsError if there is none of this name."""
        resource = self._by_name.get(name)
        if resource is None:
            raise self.kind.missing(name, region)

        return resource

    def add(self, resource: R) -> None:
        """Keep a new resource. Raises AwsError if its name is taken or there is no room."""
        self.check_free(resource)
        if len(self._by_name) >= MAX_RESOURCES:
            message = f"This gateway keeps {MAX_RESOURCES} of each kind of resource."
            raise AwsError("ResourceLimitExceeded", 400, message)

        self._change(resource.name, resource)

    def check_free(self, resource: R) -> None:
        """Raise AwsError if the name of a new resource is taken."""
        namesake = self._by_name.get(resource.name)
        if namesake is not None:
            raise self.kind.taken(namesake.arn)

    def put(self, resource: R) -> None:
        """Keep a resource in the place of the one that has its name. Raises AwsError."""
        self._change(resource.name, resource)

    def put_soon(self, resource: R) -> None:
        """Keep what the gateway has found of a resource."""
        self._by_name[resource.name] = resource
        self._file.write_soon()

    def remove(self, name: str) -> None:
        """Forget a resource. Raises AwsError."""
        self._change(name, None)

    def remove_soon(self, name: str) -> None:
        """Forget a resource that the gateway has ended."""
        self._by_name.pop(name, None)
        self._file.write_soon()

    def _change(self, name: str, resource: R | None) -> None:
        """Keep a change if it can be written, else nothing. Raises AwsError."""
        former = self._by_name.pop(name, None)
        if resource is not None:
            self._by_name[name] = resource

        try:
            self._file.write()
        except OSError as error:
            self._by_name.pop(name, None)
            if former is not None:
                self._by_name[name] = former

            log.error("the state of the control plane cannot be written: %s", cause_line(error))
            raise AwsError("InternalFailure", 500, "The change could not be written.") from error


class ControlState:
    """All resources, in `folder/state.json`. One gateway at a time has the folder.

    Raises BadConfiguration if another has it, or its file cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = lock_folder(folder, "--control-dir")
        try:
            file = StateFile(folder / "state.json")
        except (OSError, msgspec.MsgspecError) as error:
            raise BadConfiguration(f"--control-dir {folder}: {cause_line(error)}") from None

        state = file.state
        self.models = ResourceTable(MODEL, state.models, file)
        self.configs = ResourceTable(CONFIG, state.configs, file)
        self.endpoints = ResourceTable(ENDPOINT, state.endpoints, file)
        self.components = ResourceTable(COMPONENT, state.components, file)
        self.routers = ResourceTable(ROUTER, state.routers, file)

    def all_tables(self) -> tuple[ResourceTable[Any], ...]:
        """Return the resources of each kind."""
        return (self.models, self.configs, self.endpoints, self.components, self.routers)
