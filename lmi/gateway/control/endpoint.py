"""The life of an endpoint: created, updated blue/green, rolled back, deleted, and brought back
after the gateway was killed.
"""

import logging
import shutil
from typing import Any

import msgspec

from lmi.gateway.aws_endpoint import AwsEndpoint
from lmi.gateway.control.component import ComponentLife
from lmi.gateway.control.definition import Definitions
from lmi.gateway.control.fleet import Fleet
from lmi.gateway.control.group import Capacity, GroupContainer, InstanceGroup
from lmi.gateway.control.instance import InstanceFailed
from lmi.gateway.control.life import ResourceLife
from lmi.gateway.control.resources import (
    CREATING,
    IN_SERVICE,
    ROLLING_BACK,
    SYSTEM_UPDATING,
    UPDATING,
    Deployment,
    EndpointResource,
    VariantSize,
    answer_roots,
)
from lmi.gateway.control.store import ResourceTable
from lmi.gateway.control.strategy import Strategy, strategy_of
from lmi.gateway.errors import ACCOUNT, AwsError, invalid as invalid_invocation

NEEDS_COMPONENT = (
    "Inference Component Name header is required for endpoints to which you plan to deploy "
    "inference components. Please include Inference Component Name header or consider using "
    "SageMaker models."
)

log = logging.getLogger(__name__)


class EndpointLife(ResourceLife[EndpointResource]):
    """One endpoint and the fleet that serves it. One change at a time is under way."""

    def __init__(
        self,
        name: str,
        table: ResourceTable[EndpointResource],
        definitions: Definitions,
        capacity: Capacity,
    ) -> None:
        super().__init__(name, table, definitions)
        self._capacity = capacity
        self._fleet: Fleet | None = None

    # What clients ask for. Each returns at once, and the change goes on.

    def create(self, resource: EndpointResource) -> None:
        """Begin to create the endpoint. Raises AwsError, and nothing is kept then."""
        self._table.check_free(resource)
        fleet = self._new_fleet(resource.deployment)
        try:
            self._table.add(msgspec.structs.replace(resource, status=CREATING))
        except AwsError:
            fleet.release()
            raise

        shutil.rmtree(self._definitions.folder / "logs" / self.name, ignore_errors=True)
        self._begin(self._start(fleet))

    def update(self, deployment: Deployment, deployment_config: dict[str, Any] | None) -> None:
        """Begin to put another deployment in the place of the present one. Raises AwsError."""
        self._check_may_change()
        fleet = self._new_fleet(deployment)
        try:
            self._accept(UPDATING, next=deployment, last_deployment_config=deployment_config)
        except AwsError:
            fleet.release()
            raise

        self._begin(self._replace(fleet, deployment))

    def resize(self, sizes: dict[str, VariantSize]) -> None:
        """Begin to give the variants other weights and numbers of instances. Raises AwsError."""
        self._check_may_change()
        assert self._fleet is not None
        self._fleet.reserve(sizes)
        deployment = msgspec.structs.replace(self.resource.deployment, sizes=sizes)
        try:
            self._accept(UPDATING, next=deployment)
        except AwsError:
            self._fleet.reserve(self.resource.deployment.sizes)
            raise

        self._begin(self._resize(self._fleet, deployment))

    def _resume(self, status: str) -> None:
        self._begin(self._bring_back(status))

    async def close(self) -> None:
        """End its containers, and leave its resource as it is."""
        await super().close()
        if self._fleet is not None:
            await self._fleet.stop()

    # What requests ask for.

    def find(self, variant: str | None) -> AwsEndpoint:
        """Return the endpoint with a variant, of this name or by chance. Raises AwsError."""
        fleet = self.serving()
        if variant is not None and variant not in fleet.groups:
            raise invalid_invocation(f"Variant {variant} of endpoint {self.name} not found.")

        variant_name = variant or fleet.choose()
        if variant_name is None:
            raise invalid_invocation(NEEDS_COMPONENT)

        container = GroupContainer(
            f"variant {variant_name} of endpoint {self.name}",
            lambda: self._group(variant_name),
            self.resource.status,
            self._strategy(variant_name),
        )
        return AwsEndpoint(
            self.name,
            container,
            self.resource.created_s,
            variant_name,
            answer_roots(self.resource.deployment.config),
        )

    def find_component(self, component: ComponentLife) -> AwsEndpoint:
        """Return the endpoint with one of its components. Raises AwsError."""
        self.serving()
        component.group()
        variant = component.resource.members["VariantName"]
        container = GroupContainer(
            f"component {component.name} of endpoint {self.name}",
            component.group,
            component.resource.status,
            self._strategy(variant),
        )
        return AwsEndpoint(self.name, container, self.resource.created_s, variant)

    def serving(self) -> Fleet:
        """Return the fleet that serves now. Raises AwsError if the endpoint is not in service."""
        if self._fleet is None:
            raise invalid_invocation(f"Endpoint {self.name} of account {ACCOUNT} not found.")

        return self._fleet

    @property
    def num_answering(self) -> int:
        """How many instances answer requests that name no variant."""
        if self._fleet is None:
            return 0

        num_instances = 0
        for name, group in self._fleet.groups.items():
            if self._fleet.sizes[name].weight > 0:
                num_instances += group.num_ready

        return num_instances

    def num_ready(self, variant: str) -> int:
        """Return how many instances of a variant serve."""
        group = self._fleet.groups.get(variant) if self._fleet else None
        return group.num_ready if group else 0

    def _strategy(self, variant: str) -> Strategy:
        """Return how a variant chooses among its instances, or copies of components in them."""
        return strategy_of(self.serving().variants.get(variant, {}))

    def _group(self, variant: str) -> InstanceGroup:
        """Return the group of a variant, or of another where an update has taken it away."""
        groups = self.serving().groups
        return groups.get(variant) or next(iter(groups.values()))

    # The changes.

    async def _start(self, fleet: Fleet) -> None:
        await fleet.start()
        self._fleet = fleet
        self._note(IN_SERVICE)

    async def _replace(self, fleet: Fleet, deployment: Deployment) -> None:
        """Start the new fleet beside the former one, which ends when nobody needs it."""
        try:
            await fleet.start()
        except InstanceFailed as failure:
            self._roll_back(failure)
            return

        former = self._fleet
        self._fleet = fleet
        self._note(UPDATING, deployment=deployment, next=None)
        if former is not None:
            await former.stop()

        self._note(IN_SERVICE)

    async def _resize(self, fleet: Fleet, deployment: Deployment) -> None:
        try:
            await fleet.resize(deployment.sizes)
        except InstanceFailed as failure:
            self._note(ROLLING_BACK, failure_reason=str(failure))
            fleet.reserve(self.resource.deployment.sizes)
            await fleet.resize(self.resource.deployment.sizes)
            self._roll_back(failure)
            return

        self._note(IN_SERVICE, deployment=deployment, next=None)

    def _roll_back(self, failure: InstanceFailed) -> None:
        log.warning("endpoint %s goes back to its former configuration: %s", self.name, failure)
        self._note(ROLLING_BACK, failure_reason=str(failure))
        self._note(IN_SERVICE, failure_reason=str(failure), next=None)

    async def _end(self) -> None:
        fleet = self._fleet
        self._fleet = None
        if fleet is not None:
            await fleet.stop()

    async def _bring_back(self, status: str) -> None:
        """Start what a former gateway ran, then go on with what it was about to do."""
        resource = self.resource
        fleet = self._new_fleet(resource.deployment)
        self._note(CREATING if status == CREATING else SYSTEM_UPDATING, resource.failure_reason)
        await fleet.start()
        self._fleet = fleet
        if resource.next is not None:
            next_fleet = self._new_fleet(resource.next)
            self._note(UPDATING)
            await self._replace(next_fleet, resource.next)
        else:
            self._note(IN_SERVICE, resource.failure_reason)

    # What they share.

    def _new_fleet(self, deployment: Deployment) -> Fleet:
        return Fleet(self.name, deployment, self._definitions, self._capacity)
