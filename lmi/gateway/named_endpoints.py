"""The endpoints that flags name. They are there from the start and never change.

Of the control plane they have DescribeEndpoint and ListEndpoints, for waiters and people.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from lmi.errors import shorten
from lmi.gateway.aws_endpoint import AwsEndpoint, CalledContainer, EndpointState, Members
from lmi.gateway.errors import ACCOUNT, AwsError, invalid, unknown_operation
from lmi.gateway.exchange import VARIANT
from lmi.gateway.members import ENDPOINT_NAME
from lmi.gateway.routing_target import Destination, RoutingTarget
from lmi.gateway.watched_container import WatchedContainer

# It stands in place of an endpoint's name: for every name that no other endpoint has.
ANY = ""
# The time between two looks at a container that is waited for.
POLL_S = 1.0
# As many of the names that clients choose are remembered.
MAX_NAMES = 1000

Input = TypeVar("Input")


class DescribeInput(msgspec.Struct):
    """The input of DescribeEndpoint."""

    EndpointName: str


class ListInput(msgspec.Struct):
    """The input of ListEndpoints. Times are seconds since 1970."""

    SortBy: Literal["Name", "CreationTime", "Status"] = "CreationTime"
    SortOrder: Literal["Ascending", "Descending"] = "Descending"
    NextToken: Annotated[str, Meta(pattern="^[0-9]{1,9}$")] = "0"
    MaxResults: Annotated[int, Meta(ge=1, le=100)] = 10
    NameContains: str = ""
    StatusEquals: str = ""
    CreationTimeAfter: float = 0.0
    CreationTimeBefore: float = float("inf")
    LastModifiedTimeAfter: float = 0.0
    LastModifiedTimeBefore: float = float("inf")

    def page(self, summaries: Iterable[Members]) -> Members:
        """Return the answer: the part of all summaries that is asked for."""
        matching = [summary for summary in summaries if self._matches(summary)]
        sort_key = SORT_KEYS[self.SortBy]
        is_descending = self.SortOrder == "Descending"
        matching.sort(key=lambda summary: summary[sort_key], reverse=is_descending)

        begin = int(self.NextToken)
        end = begin + self.MaxResults
        answer: Members = {"Endpoints": matching[begin:end]}
        if end < len(matching):
            answer["NextToken"] = str(end)

        return answer

    def _matches(self, summary: Members) -> bool:
        created_s = summary["CreationTime"]
        modified_s = summary["LastModifiedTime"]
        return (
            self.NameContains in summary["EndpointName"]
            and self.StatusEquals in ("", summary["EndpointStatus"])
            and self.CreationTimeAfter < created_s < self.CreationTimeBefore
            and self.LastModifiedTimeAfter < modified_s < self.LastModifiedTimeBefore
        )


SORT_KEYS = {
    "Name": "EndpointName",
    "CreationTime": "CreationTime",
    "Status": "EndpointStatus",
}


class NamedEndpoints:
    """The endpoints that flags name, and their inference components."""

    def __init__(self, urls: Mapping[str, str], components: Mapping[tuple[str, str], str]) -> None:
        """`urls` has the container of each endpoint by its name, or of ANY.

        `components` has the adapter, "" for none, by endpoint and component. Without any, every
        component is taken.
        """
        keys = os.environ.get("LMI_API_KEY", "")
        key = keys.partition(",")[0].strip()
        containers: dict[str, WatchedContainer] = {}
        self._endpoints: dict[str, AwsEndpoint] = {}
        for name, url in urls.items():
            if url not in containers:
                containers[url] = WatchedContainer(url, key)

            self._endpoints[name] = AwsEndpoint(name, containers[url])

        self._any = self._endpoints.pop(ANY, None)
        self._components = components

    async def start(self) -> None:
        """Do nothing: the containers run already."""

    async def close(self) -> None:
        """Do nothing: the containers go on."""

    # What requests ask for.

    def find(self, name: str, values: Mapping[str, str]) -> AwsEndpoint:
        """Return the endpoint that a request with these headers means. Raises AwsError for an
        endpoint or a variant that is not there.
        """
        endpoint = self._named(name)
        if values.get("TargetVariant", VARIANT) != VARIANT:
            raise invalid(f"Variant {values['TargetVariant']} of endpoint {name} not found.")

        return endpoint

    def routing_target(self, router: str, target: str) -> RoutingTarget:
        """Raise AwsError: clients create inference routers, and flags name none."""
        raise unknown_operation()

    def destinations(self, arns: Iterable[str], region: str) -> list[Destination]:
        """Return none: what has destinations was accepted by a gateway with a control plane."""
        return []

    async def wait_until_back(self, name: str) -> None:
        """Return when an endpoint has been ready once, or if there is none."""
        with suppress(AwsError):
            container = self._named(name).container
            while not await _was_ready(container):
                await asyncio.sleep(POLL_S)

    def adapter(self, endpoint: str, component: str | None) -> str:
        """Return the adapter of a component, or "". Raises AwsError for a component that is not
        there.
        """
        if component is None or not self._components:
            return ""

        for name in (endpoint, ANY):
            if (name, component) in self._components:
                return self._components[name, component]

        raise invalid(f"Inference Component {component} of endpoint {endpoint} not found.")

    def _named(self, name: str) -> AwsEndpoint:
        """Return the endpoint. Raises AwsError for a name that cannot be one or that no container
        has.
        """
        if name in self._endpoints:
            return self._endpoints[name]

        ENDPOINT_NAME.check(name)
        if self._any is None:
            raise invalid(f"Endpoint {name} of account {ACCOUNT} not found.")

        endpoint = AwsEndpoint(name, self._any.container)
        if len(self._endpoints) < MAX_NAMES:
            self._endpoints[name] = endpoint

        return endpoint

    # Operations of the control plane.

    async def answer(self, target: str, body: bytes, region: str) -> Members:
        """Return the answer of the operation that X-Amz-Target names. Raises AwsError."""
        if target not in OPERATIONS:
            raise AwsError(
                "UnknownOperationException", 400, f"The gateway has no operation {shorten(target)}."
            )

        return await OPERATIONS[target](self, body, region)

    async def describe(self, body: bytes, region: str) -> Members:
        """Answer DescribeEndpoint."""
        name = _decode(body, DescribeInput).EndpointName
        try:
            endpoint = self._named(name)
        except AwsError:
            raise _invalid(f"Could not find endpoint {shorten(name)}.") from None

        state = await endpoint.container.state()
        variant = {
            "VariantName": VARIANT,
            "CurrentWeight": 1.0,
            "DesiredWeight": 1.0,
            "CurrentInstanceCount": 1,
            "DesiredInstanceCount": 1,
        }
        description = endpoint.summary(state.status, region)
        description["EndpointConfigName"] = endpoint.name
        description["ProductionVariants"] = [variant]
        if state.failure_reason:
            description["FailureReason"] = state.failure_reason

        return description

    async def list_endpoints(self, body: bytes, region: str) -> Members:
        """Answer ListEndpoints, with those that have a container of their own and those that
        clients have named so far.
        """
        query = _decode(body, ListInput)
        endpoints = list(self._endpoints.values())
        states = await _states({endpoint.container for endpoint in endpoints})

        summaries = []
        for endpoint in endpoints:
            state = states[endpoint.container]
            summaries.append(endpoint.summary(state.status, region))

        return query.page(summaries)


OPERATIONS: dict[str, Callable[[NamedEndpoints, bytes, str], Awaitable[Members]]] = {
    "SageMaker.DescribeEndpoint": NamedEndpoints.describe,
    "SageMaker.ListEndpoints": NamedEndpoints.list_endpoints,
}


async def _was_ready(container: CalledContainer) -> bool:
    try:
        await container.check_was_ready()
    except AwsError:
        return False

    return True


async def _states(containers: Iterable[CalledContainer]) -> dict[CalledContainer, EndpointState]:
    """Return the states of containers, which are asked all at once."""
    ordered = list(containers)
    states = await asyncio.gather(*(container.state() for container in ordered))
    return dict(zip(ordered, states, strict=True))


def _decode(body: bytes, kind: type[Input]) -> Input:
    """Return the input of an operation. Raises AwsError."""
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _invalid(str(error)) from None


def _invalid(message: str) -> AwsError:
    """The request is wrong, in the class that the control plane has for it."""
    return AwsError("ValidationException", 400, message)
