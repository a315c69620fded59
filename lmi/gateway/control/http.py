"""The door of the control plane: what the gateway's requests ask of it."""

from collections.abc import Iterable, Mapping
from contextlib import suppress

from lmi.errors import shorten
from lmi.gateway.aws_endpoint import AwsEndpoint
from lmi.gateway.control import destinations, routers
from lmi.gateway.control.operations import OPERATIONS
from lmi.gateway.control.plane import Plane
from lmi.gateway.control.service_model import TARGET_PREFIX, Members, ServiceModel
from lmi.gateway.errors import AwsError
from lmi.gateway.members import ENDPOINT_NAME, ROUTER_NAME
from lmi.gateway.routing_target import Destination, RoutingTarget

# The longest name of a region that is believed.
MAX_REGION_CHARS = 32


class ControlledEndpoints:
    """The endpoints that clients create, in the place of those that flags name."""

    def __init__(self, plane: Plane) -> None:
        self._plane = plane
        self._model = ServiceModel()

    async def start(self) -> None:
        """Begin to bring back what a former gateway had."""
        self._plane.start()

    async def close(self) -> None:
        """End all containers."""
        await self._plane.close()

    def find(self, name: str, values: Mapping[str, str]) -> AwsEndpoint:
        """Return the endpoint that a request with these headers means. Raises AwsError."""
        ENDPOINT_NAME.check(name)
        life = self._plane.invoked(name)
        component = values.get("InferenceComponentName")
        if component is None:
            return life.find(values.get("TargetVariant"))

        return life.find_component(self._plane.invoked_component(name, component))

    def routing_target(self, router: str, target: str) -> RoutingTarget:
        """Return the target of an inference router that a request names. Raises AwsError."""
        return routers.invoked_target(self._plane, ROUTER_NAME.check(router), target)

    def destinations(self, arns: Iterable[str], region: str) -> list[Destination]:
        """Return the destinations of an asynchronous request to a router of this region."""
        return [destinations.find(self._plane, arn, region, is_async=True) for arn in arns]

    async def wait_until_back(self, name: str) -> None:
        """Return when an endpoint that a former gateway has had is settled, or if there is none."""
        with suppress(AwsError):
            await self._plane.invoked(name).wait_settled()

    def adapter(self, endpoint: str, component: str | None) -> str:
        """Return the adapter of a component, or "". Raises AwsError."""
        if component is None:
            return ""

        resource = self._plane.invoked_component(endpoint, component).resource
        return resource.name if resource.base else ""

    async def answer(self, target: str, body: bytes, region: str) -> Members:
        """Return the answer of the operation that X-Amz-Target names. Raises AwsError."""
        operation = target.removeprefix(TARGET_PREFIX)
        if not target.startswith(TARGET_PREFIX) or operation not in OPERATIONS:
            raise AwsError(
                "UnknownOperationException", 400, f"The gateway has no operation {shorten(target)}."
            )

        members = self._model.read(operation, body)
        answer = OPERATIONS[operation](self._plane, members, region[:MAX_REGION_CHARS])
        return self._model.answer(operation, answer)
