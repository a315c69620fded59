"""The state of the control plane: one file, which is written whole at each change."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from lmi.errors import BadConfiguration, cause_line
from lmi.gateway.control.resources import (
    COMPONENT,
    CONFIG,
    ENDPOINT,
    MODEL,
    ComponentResource,
    EndpointResource,
    Resource,
    ResourceKind,
)
from lmi.gateway.errors import AwsError
from lmi.gateway.state_folder import lock_folder
from lmi.shared.files import write_whole

# Of each kind.
MAX_RESOURCES = 1000

log = logging.getLogger(__name__)
R = TypeVar("R", bound=Resource)


class ResourceTable(Generic[R]):
    """The resources of one kind, by name. A change is on the disk when its call returns."""

    def __init__(self, kind: ResourceKind, by_name: dict[str, R], save: Callable[[], None]) -> None:
        self.kind = kind
        self._by_name = by_name
        self._save = save

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
        """Keep a resource in the place of the one that has its name."""
        self._change(resource.name, resource)

    def remove(self, name: str) -> None:
        """Forget a resource."""
        self._change(name, None)

    def _change(self, name: str, resource: R | None) -> None:
        """Keep a change if it can be written, else nothing. Raises AwsError."""
        former = self._by_name.pop(name, None)
        if resource is not None:
            self._by_name[name] = resource

        try:
            self._save()
        except OSError as error:
            self._by_name.pop(name, None)
            if former is not None:
                self._by_name[name] = former

            log.error("the state of the control plane cannot be written: %s", cause_line(error))
            raise AwsError("InternalFailure", 500, "The change could not be written.") from error


class _State(msgspec.Struct):
    models: dict[str, Resource] = {}
    configs: dict[str, Resource] = {}
    endpoints: dict[str, EndpointResource] = {}
    components: dict[str, ComponentResource] = {}


class ControlState:
    """All resources, in `folder/state.json`. One gateway at a time has the folder.

    Raises BadConfiguration if another has it, or its file cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = folder / "state.json"
        self._lock = lock_folder(folder, "--control-dir")
        try:
            state = _State()
            if self._file.exists():
                state = msgspec.json.decode(self._file.read_bytes(), type=_State)
        except (OSError, msgspec.MsgspecError) as error:
            raise BadConfiguration(f"--control-dir {folder}: {cause_line(error)}") from None

        self._state = state
        self.models = ResourceTable(MODEL, state.models, self._save)
        self.configs = ResourceTable(CONFIG, state.configs, self._save)
        self.endpoints = ResourceTable(ENDPOINT, state.endpoints, self._save)
        self.components = ResourceTable(COMPONENT, state.components, self._save)

    def all_tables(self) -> tuple[ResourceTable[Any], ...]:
        """Return the resources of each kind."""
        return (self.models, self.configs, self.endpoints, self.components)

    def _save(self) -> None:
        write_whole(self._file, msgspec.json.encode(self._state))
