"""Endpoints: which container stands behind a name, what its /ping has said so far, and what clients
ask of both.

DescribeEndpoint and ListEndpoints are for waiters and people. An endpoint never changes after it
was first heard of.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol, TypeVar

import msgspec
from msgspec import Meta

from lmi.errors import shorten
from lmi.gateway.container import Container, ContainerFault, OutOfTime, Unreachable
from lmi.gateway.errors import (
    ACCOUNT,
    AwsError,
    cut,
    invalid,
    model_error,
    unavailable,
    unknown_operation,
)
from lmi.gateway.exchange import VARIANT
from lmi.gateway.members import ENDPOINT_NAME
from lmi.gateway.request_prefix import RequestPrefix
from lmi.gateway.routing_target import Destination, RoutingTarget
from lmi.gateway.stores import AnswerRoots

# It stands in place of an endpoint's name.
ANY = ""
TIMED_OUT = "Your invocation timed out while waiting for a response from container primary."
# As on the platform.
PING_TIMEOUT_S = 2.0
MAX_PING_BYTES = 64 << 10
# Of a container that is waited for.
POLL_S = 1.0
MAX_REASON_CHARS = 1024
# As many of the names that clients choose are remembered.
MAX_NAMES = 1000

Members = dict[str, Any]
Input = TypeVar("Input")


class CalledContainer(Protocol):
    """What requests to an endpoint call: one container, or one of several."""

    url: str

    async def check_was_ready(self) -> None:
        """Raise AwsError if it cannot be called yet."""

    async def status(self) -> tuple[str, str]:
        """Return AWS's EndpointStatus, and why it failed."""

    def lease(self, prefix: RequestPrefix | None = None) -> AbstractContextManager[Container]:
        """Return the container for one call, which is not ended in the block. How the request
        begins may choose among several. Raises Unreachable if there is none.
        """


class WatchedContainer(Container):
    """A container whose /ping is asked only when somebody wants to know.

    Its endpoint is out of service `out_of_service_s` after it was first found gone.
    """

    out_of_service_s = 10.0
    _was_ready = False
    _lost_since_s: float | None = None

    async def check_was_ready(self) -> None:
        """Raise AwsError if /ping has never been 200."""
        if self._was_ready:
            return

        status, text = await self._ping()
        if status != 200:
            why = f"its /ping says {status}: {text}" if status else text
            raise unavailable(f"The container at {self.url} is not ready: {why}")

    async def status(self) -> tuple[str, str]:
        """Return AWS's EndpointStatus, and why it failed."""
        status, text = await self._ping()
        if status == 500:
            return "Failed", cut(text, MAX_REASON_CHARS)

        if not self._was_ready:
            return "Creating", ""

        lost_s = 0.0
        if self._lost_since_s is not None:
            lost_s = time.monotonic() - self._lost_since_s

        return "OutOfService" if lost_s >= self.out_of_service_s else "InService", ""

    def lease(self, prefix: RequestPrefix | None = None) -> AbstractContextManager[Container]:
        """Return this container, which nobody here ends."""
        return nullcontext(self)

    async def _ping(self) -> tuple[int, str]:
        """Return the status of /ping and its body, or 0 and the reason."""
        try:
            async with self.call("GET", "/ping", timeout_s=PING_TIMEOUT_S) as answer:
                body = await answer.read(MAX_PING_BYTES)
        except ContainerFault as fault:
            self._lost_since_s = self._lost_since_s or time.monotonic()
            return 0, str(fault)

        self._lost_since_s = None
        self._was_ready = self._was_ready or answer.status == 200
        return answer.status, body.decode(errors="replace").strip()


@dataclass(frozen=True)
class AwsEndpoint:
    """An endpoint: a name, and the container behind it."""

    name: str
    container: CalledContainer
    # In seconds since 1970.
    created_s: float = field(default_factory=time.time)
    # The one that the container is of.
    variant: str = VARIANT
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
        """Return what a client gets where the container gave no whole response."""
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
        """Return the endpoint that a request with these headers means. Raises AwsError."""

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


class Described(msgspec.Struct):
    """The input of DescribeEndpoint."""

    EndpointName: str


class Listed(msgspec.Struct):
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

    def takes(self, endpoint: Members) -> bool:
        """Whether an endpoint is one of those that the input asks for."""
        created_s = endpoint["CreationTime"]
        modified_s = endpoint["LastModifiedTime"]
        return (
            self.NameContains in endpoint["EndpointName"]
            and self.StatusEquals in ("", endpoint["EndpointStatus"])
            and self.CreationTimeAfter < created_s < self.CreationTimeBefore
            and self.LastModifiedTimeAfter < modified_s < self.LastModifiedTimeBefore
        )


SORT_KEYS = {"Name": "EndpointName", "CreationTime": "CreationTime", "Status": "EndpointStatus"}


class Endpoints:
    """All endpoints and their inference components. A container without a name serves every name
    that no other has.

    `components` has the adapter, "" for none, by endpoint and component. Without any, every
    component is taken.
    """

    def __init__(self, urls: Mapping[str, str], components: Mapping[tuple[str, str], str]) -> None:
        keys = os.environ.get("LMI_API_KEY", "")
        key = keys.partition(",")[0].strip()
        containers: dict[str, WatchedContainer] = {}
        self._endpoints: dict[str, AwsEndpoint] = {}
        for name, url in urls.items():
            if url not in containers:
                containers[url] = WatchedContainer(url, key)

            self._endpoints[name] = AwsEndpoint(name, containers[url])

        # It stands for every other name.
        self._any = self._endpoints.pop(ANY, None)
        self._components = components

    async def start(self) -> None:
        """Containers that flags name are there already."""

    async def close(self) -> None:
        """Containers that flags name stay."""

    def find(self, name: str, values: Mapping[str, str]) -> AwsEndpoint:
        """Return the endpoint that a request with these headers means. Raises AwsError for an
        endpoint or a variant that is not there.
        """
        endpoint = self._named(name)
        if values.get("TargetVariant", VARIANT) != VARIANT:
            raise invalid(f"Variant {values['TargetVariant']} of endpoint {name} not found.")

        return endpoint

    def routing_target(self, router: str, target: str) -> RoutingTarget:
        """Raises AwsError: clients create inference routers, and flags name none."""
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

    async def answer(self, target: str, body: bytes, region: str) -> Members:
        """Return the answer of the operation that X-Amz-Target names. Raises AwsError."""
        if target not in OPERATIONS:
            raise AwsError(
                "UnknownOperationException", 400, f"The gateway has no operation {shorten(target)}."
            )

        return await OPERATIONS[target](self, body, region)

    async def describe(self, body: bytes, region: str) -> Members:
        """Answer DescribeEndpoint."""
        name = _decode(body, Described).EndpointName
        try:
            endpoint = self._named(name)
        except AwsError:
            raise _invalid(f"Could not find endpoint {shorten(name)}.") from None

        status, reason = await endpoint.container.status()
        variant = {
            "VariantName": VARIANT,
            "CurrentWeight": 1.0,
            "DesiredWeight": 1.0,
            "CurrentInstanceCount": 1,
            "DesiredInstanceCount": 1,
        }
        description = endpoint.summary(status, region)
        description["EndpointConfigName"] = endpoint.name
        description["ProductionVariants"] = [variant]
        if reason:
            description["FailureReason"] = reason

        return description

    async def list_endpoints(self, body: bytes, region: str) -> Members:
        """Return those with a container of their own, and those that clients have named so far."""
        query = _decode(body, Listed)
        endpoints = list(self._endpoints.values())
        statuses = await _statuses({endpoint.container for endpoint in endpoints})

        summaries = []
        for endpoint in endpoints:
            summary = endpoint.summary(statuses[endpoint.container], region)
            if query.takes(summary):
                summaries.append(summary)

        sort_key = SORT_KEYS[query.SortBy]
        is_descending = query.SortOrder == "Descending"
        summaries.sort(key=lambda summary: summary[sort_key], reverse=is_descending)

        begin = int(query.NextToken)
        end = begin + query.MaxResults
        answer: Members = {"Endpoints": summaries[begin:end]}
        if end < len(summaries):
            answer["NextToken"] = str(end)

        return answer


OPERATIONS: dict[str, Callable[[Endpoints, bytes, str], Awaitable[Members]]] = {
    "SageMaker.DescribeEndpoint": Endpoints.describe,
    "SageMaker.ListEndpoints": Endpoints.list_endpoints,
}


async def _was_ready(container: CalledContainer) -> bool:
    try:
        await container.check_was_ready()
    except AwsError:
        return False

    return True


async def _statuses(containers: Iterable[CalledContainer]) -> dict[CalledContainer, str]:
    """Return AWS's EndpointStatus of each container."""
    ordered = list(containers)
    answers = await asyncio.gather(*(container.status() for container in ordered))
    return {container: status for container, (status, _) in zip(ordered, answers, strict=True)}


def _decode(body: bytes, kind: type[Input]) -> Input:
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _invalid(str(error)) from None


def _invalid(message: str) -> AwsError:
    return AwsError("ValidationException", 400, message)
