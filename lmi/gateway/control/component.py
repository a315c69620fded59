"""The life of an inference component: copies of a container on an endpoint, or an adapter in the
copies of another component.
"""

import logging
from collections.abc import Callable

import msgspec

from lmi.gateway.control.definition import Definitions
from lmi.gateway.control.fleet import not_healthy, startup_timeout_s
from lmi.gateway.control.group import Capacity, InstanceGroup
from lmi.gateway.control.instance import InstanceFailed
from lmi.gateway.control.life import ResourceLife
from lmi.gateway.control.resources import (
    CREATING,
    IN_SERVICE,
    UPDATING,
    ComponentResource,
)
from lmi.gateway.control.store import ResourceTable
from lmi.gateway.errors import AwsError, invalid as invalid_invocation
from lmi.gateway.model_store import LoadFailed
from lmi.gateway.threads import run_in_thread

log = logging.getLogger(__name__)


class ComponentLife(ResourceLife[ComponentResource]):
    """One component. `find_life` returns the life of another, which an adapter is based on."""

    def __init__(
        self,
        name: str,
        table: ResourceTable[ComponentResource],
        definitions: Definitions,
        capacity: Capacity,
        find_life: Callable[[str], "ComponentLife"],
    ) -> None:
        super().__init__(name, table, definitions)
        self._capacity = capacity
        self._find_life = find_life
        self._group: InstanceGroup | None = None

    # What clients ask for. Each returns at once, and the change goes on.

    def create(self, resource: ComponentResource) -> None:
        """Begin to create the component. Raises AwsError, and nothing is kept then."""
        self._table.check_free(resource)
        group = self._new_group(resource)
        try:
            self._table.add(msgspec.structs.replace(resource, status=CREATING))
        except AwsError:
            _release(group)
            raise

        self._begin(self._start(group))

    def update(self, resource: ComponentResource) -> None:
        """Begin to put new copies in the place of the present ones. Raises AwsError."""
        self._check_may_change()
        group = self._new_group(resource)
        try:
            self._accept(UPDATING)
        except AwsError:
            _release(group)
            raise

        self._begin(self._replace(group, resource))

    def resize(self, num_copies: int) -> None:
        """Begin to start or end copies. Raises AwsError."""
        self._check_may_change()
        group = self.group()
        group.reserve(num_copies)
        try:
            self._accept(UPDATING)
        except AwsError:
            group.reserve(self.resource.num_copies)
            raise

        self._begin(self._resize(group, num_copies))

    def _resume(self, status: str) -> None:
        self._note(CREATING if status == CREATING else UPDATING)
        self._begin(self._restore())

    async def close(self) -> None:
        """End its containers, and leave its resource as it is."""
        await super().close()
        if self._group is not None:
            await self._group.stop()

    # What requests ask for.

    def group(self) -> InstanceGroup:
        """Return the copies that answer requests. Raises AwsError if there are none yet."""
        resource = self.resource
        if resource.base:
            return self._find_life(resource.base).group()

        if self._group is None:
            raise invalid_invocation(f"Inference Component {self.name} is not in service.")

        return self._group

    @property
    def num_ready(self) -> int:
        """How many copies serve."""
        return self._group.num_ready if self._group else 0

    # The changes.

    async def _start(self, group: InstanceGroup | None) -> None:
        if group is None:
            await self._add_adapter()
        else:
            await self._settle(group)
            self._group = group

        self._note(IN_SERVICE)

    async def _restore(self) -> None:
        await self._start(self._new_group(self.resource))

    async def _replace(self, group: InstanceGroup | None, resource: ComponentResource) -> None:
        if group is None:
            await self._remove_adapter()
            self._keep(resource)
            await self._add_adapter()
        else:
            try:
                await self._settle(group)
            except InstanceFailed as failure:
                log.warning("inference component %s stays as it was: %s", self.name, failure)
                self._note(IN_SERVICE, str(failure))
                return

            former = self._group
            self._group = group
            self._keep(resource)
            if former is not None:
                await former.stop()

        self._note(IN_SERVICE)

    async def _resize(self, group: InstanceGroup, num_copies: int) -> None:
        try:
            await group.settle()
        except InstanceFailed as failure:
            log.warning("inference component %s stays as it was: %s", self.name, failure)
            group.reserve(self.resource.num_copies)
            self._note(IN_SERVICE, self._not_healthy(failure))
            return

        self._note(IN_SERVICE, num_copies=num_copies)

    async def _end(self) -> None:
        if self.resource.base:
            await self._remove_adapter()
        elif self._group is not None:
            await self._group.stop()
            self._group = None

    async def _settle(self, group: InstanceGroup) -> None:
        """Start the copies. Raises InstanceFailed, and none is left then."""
        try:
            await group.settle()
        except InstanceFailed as failure:
            await group.stop()
            raise InstanceFailed(self._not_healthy(failure)) from failure
        except BaseException:
            await group.stop()
            raise

    async def _add_adapter(self) -> None:
        base = self._find_life(self.resource.base)
        # It may be on its way back itself.
        await base.wait_settled()
        source = self._definitions.place(self.resource.container["ArtifactUrl"])
        try:
            folder = await run_in_thread(self._definitions.fetch_adapter, source)
        except (AwsError, LoadFailed) as error:
            raise InstanceFailed(str(error)) from error

        await base.group().add_adapter(self.name, folder)

    async def _remove_adapter(self) -> None:
        group = self._find_life(self.resource.base)._group
        if group is not None:
            await group.remove_adapter(self.name)

    # What they share.

    def _new_group(self, resource: ComponentResource) -> InstanceGroup | None:
        """Return the copies of a component, or None for an adapter. Raises AwsError."""
        if resource.base:
            return None

        specification = resource.members["Specification"]
        return InstanceGroup(
            self._definitions,
            self._capacity,
            resource.container,
            resource.num_copies,
            f"{resource.members['EndpointName']}/{self.name}",
            startup_timeout_s(specification.get("StartupParameters") or {}),
        )

    def _keep(self, resource: ComponentResource) -> None:
        """Keep what an update has changed."""
        self._note(
            UPDATING,
            members=resource.members,
            container=resource.container,
            num_copies=resource.num_copies,
        )

    def _not_healthy(self, failure: InstanceFailed) -> str:
        return not_healthy(f"inference component {self.name}", str(failure))


def _release(group: InstanceGroup | None) -> None:
    """Give back the room of copies that were never started."""
    if group is not None:
        group.reserve(0)
