"""An endpoint as a request sees it, and the table in which a request finds it.

There are two tables: `named_endpoints.py` has the endpoints that flags name, and `control/http.py`
those that clients create.
"""

import time
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from lmi.gateway.container import Container, ContainerFault, OutOfTime, Unreachable
from lmi.gateway.errors import ACCOUNT, AwsError, model_error, unavailable
from lmi.gateway.exchange import VARIANT
from lmi.gateway.request_prefix import RequestPrefix
from lmi.gateway.routing_target import Destination, RoutingTarget
from lmi.gateway.stores import AnswerRoots

TIMED_OUT = "Your invocation timed out while waiting for a response from container primary."

Members = dict[str, Any]
"""An answer of the control plane, by the names of AWS's API."""


class EndpointState(NamedTuple):
    """AWS's EndpointStatus, and why the endpoint has failed, if it has."""

    status: str
    failure_reason: str = ""


class CalledContainer(Protocol):
    """What requests to an endpoint call: one container, or one of several."""

    url: str

    async def check_was_ready(self) -> None:
        """Raise AwsError if it cannot be called yet."""

    async def state(self) -> EndpointState:
        """Return the state of an endpoint with this container."""

    def lease(self, prefix: RequestPrefix | None = None) -> AbstractContextManager[Container]:
        """Return the container for one call. It is not ended within the block.

        Where there are several, the beginning of the request may choose one. Raises Unreachable if
        there is none.
        """


@dataclass(frozen=True)
class AwsEndpoint:
    """A name, and the container behind it."""

    name: str
    container: CalledContainer
    # In seconds since 1970.
    created_s: float = field(default_factory=time.time)
    # The one that the container is of.
    variant: str = VARIANT
    # Where the answers of its asynchronous requests go.
    answers: AnswerRoots = AnswerRoots()

    def summary(self, status: str, region: str) -> Members:
        """Return the endpoint as ListEndpoints tells of it."""
        return {
            "EndpointName": self.name,
            "EndpointArn": f"arn:aws:sagemaker:{region}:{ACCOUNT}:endpoint/{self.name}",
            "CreationTime": self.created_s,
            "LastModifiedTime": self.created_s,
            "EndpointStatus": status,
        }

    def error(self, fault: ContainerFault, region: str) -> AwsError:
        """Return what a client gets if the container gave no whole response."""
        if isinstance(fault, Unreachable):
            return unavailable(f"The container at {self.container.url} is not there: {fault}")

        reason = TIMED_OUT if isinstance(fault, OutOfTime) else str(fault)
        return model_error(0, reason, self.name, region)


class EndpointTable(Protocol):
    """All endpoints of a gateway: those that flags name, or those that clients create."""

    async def start(self) -> None:
        """Begin what has its own tasks."""

    async def close(self) -> None:
        """End what has its own tasks."""

    def find(self, name: str, values: Mapping[str, str]) -> AwsEndpoint:
        """Return the endpoint that a request means. `values` are those of its headers, by the names
        of AWS's members. Raises AwsError.
        """

    def routing_target(self, router: str, target: str) -> RoutingTarget:
        """Return the target of an inference router that a request names. Raises AwsError."""

    def destinations(self, arns: Iterable[str], region: str) -> list[Destination]:
        """Return the destinations of an asynchronous request to a router of this region."""

    async def wait_until_back(self, name: str) -> None:
        """Return when an endpoint that a former gateway has had serves, or will not."""

    def adapter(self, endpoint: str, component: str | None) -> str:
        """Return the adapter of a component, or "". Raises AwsError."""

    async def answer(self, target: str, body: bytes, region: str) -> Members:
        """Return the answer of the operation that X-Amz-Target names. Raises AwsError."""
