"""Operations of resources for which nothing runs: models, and configurations of endpoints."""

from collections.abc import Callable
from dataclasses import dataclass

from lmi.gateway.control.listing import page
from lmi.gateway.control.plane import Plane
from lmi.gateway.control.resources import Resource, ResourceKind, common
from lmi.gateway.control.service_model import Members
from lmi.gateway.control.store import ControlState, ResourceTable


@dataclass(frozen=True)
class PlainResources:
    """The operations of one kind. Each raises AwsError for a name that is unknown, or taken."""

    kind: ResourceKind
    table_of: Callable[[ControlState], ResourceTable[Resource]]

    def create(self, plane: Plane, members: Members, region: str) -> Members:
        """Keep a new resource, whose members the caller has checked."""
        resource = Resource(**common(self.kind, members, region))
        self.table_of(plane.store).add(resource)
        return resource.described(self.kind)

    def describe(self, plane: Plane, members: Members, region: str) -> Members:
        return self._find(plane, members, region).described(self.kind)

    def list_all(self, plane: Plane, members: Members, region: str) -> Members:
        table = self.table_of(plane.store)
        return page(self.kind, table, members, lambda resource: resource.described(self.kind))

    def delete(self, plane: Plane, members: Members, region: str) -> Members:
        resource = self._find(plane, members, region)
        self.table_of(plane.store).remove(resource.name)
        return {}

    def _find(self, plane: Plane, members: Members, region: str) -> Resource:
        name = members[self.kind.name_member]
        return self.table_of(plane.store).find(name, region)
