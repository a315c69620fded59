"""Endpoints: which container stands behind a name, what its /ping has said so far, and what clients
ask of both.

DescribeEndpoint and ListEndpoints are for waiters and people. An endpoint never changes after it
was first heard of.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from lmi.errors import shorten
from lmi.gateway.container import Container, ContainerFault, OutOfTime, Unreachable
from lmi.gateway.exchange import (
    ACCOUNT,
    ENDPOINT_NAME,
    VARIANT,
    AwsError,
    cut,
    invalid,
    model_error,
    unavailable,
)

ANY = ""  # in place of an endpoint's name
TIMED_OUT = "Your invocation timed out while waiting for a response from container primary."
PING_TIMEOUT_S = 2.0  # as on the platform
MAX_PING_BYTES = 64 << 10
MAX_REASON_CHARS = 1024
MAX_NAMES = 1000  # that are remembered of those that the clients choose

Members = dict[str, Any]
Input = TypeVar("Input")


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
            said = f"its /ping says {status}: {text}" if status else text
            raise unavailable(f"The container at {self.url} is not ready: {said}")

    async def status(self) -> tuple[str, str]:
        """Return AWS's EndpointStatus, and why it failed."""
        status, text = await self._ping()
        if status == 500:
            return "Failed", cut(text, MAX_REASON_CHARS)

        if not self._was_ready:
            return "Creating", ""

        lost_s = 0.0 if self._lost_since_s is None else time.monotonic() - self._lost_since_s
        return "OutOfService" if lost_s >= self.out_of_service_s else "InService", ""

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
    name: str
    container: WatchedContainer
    created_s: float = field(default_factory=time.time)  # since 1970

    def summary(self, status: str, region: str) -> Members:
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

        return model_error(
            0, TIMED_OUT if isinstance(fault, OutOfTime) else str(fault), self.name, region
        )


class Described(msgspec.Struct):
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
        return (
            self.NameContains in endpoint["EndpointName"]
            and self.StatusEquals in ("", endpoint["EndpointStatus"])
            and self.CreationTimeAfter < endpoint["CreationTime"] < self.CreationTimeBefore
            and self.LastModifiedTimeAfter
            < endpoint["LastModifiedTime"]
            < self.LastModifiedTimeBefore
        )


SORT_KEYS = {"Name": "EndpointName", "CreationTime": "CreationTime", "Status": "EndpointStatus"}


class Endpoints:
    """All endpoints and their inference components. A container without a name serves every name
    that no other has.

    `components` has the adapter, "" for none, by endpoint and component. Without any, every
    component is taken.
    """

    def __init__(self, urls: Mapping[str, str], components: Mapping[tuple[str, str], str]) -> None:
        key = os.environ.get("LMI_API_KEY", "").partition(",")[0].strip()
        containers = {url: WatchedContainer(url, key) for url in urls.values()}
        self._known = {name: AwsEndpoint(name, containers[url]) for name, url in urls.items()}
        self._other = self._known.pop(ANY, None)  # whose name stands for every other
        self._components = components

    def find(self, name: str) -> AwsEndpoint:
        """Return the endpoint. Raises AwsError for a name that cannot be one or that no container
        has.
        """
        if found := self._known.get(name):
            return found

        ENDPOINT_NAME.check(name)
        if self._other is None:
            raise invalid(f"Endpoint {name} of account {ACCOUNT} not found.")

        endpoint = AwsEndpoint(name, self._other.container)
        if len(self._known) < MAX_NAMES:
            self._known[name] = endpoint

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

    async def describe(self, body: bytes, region: str) -> Members:
        name = _decode(body, Described).EndpointName
        try:
            endpoint = self.find(name)
        except AwsError:
            raise _invalid(f"Could not find endpoint {shorten(name)}.") from None

        status, reason = await endpoint.container.status()
        variant = {"VariantName": VARIANT, "CurrentWeight": 1.0, "DesiredWeight": 1.0}
        variant |= {"CurrentInstanceCount": 1, "DesiredInstanceCount": 1}
        details = {"EndpointConfigName": endpoint.name, "ProductionVariants": [variant]}
        why = {"FailureReason": reason} if reason else {}
        return endpoint.summary(status, region) | details | why

    async def list_endpoints(self, body: bytes, region: str) -> Members:
        """Return those with a container of their own, and those that clients have named so far."""
        asked = _decode(body, Listed)
        endpoints = list(self._known.values())
        containers = list({endpoint.container for endpoint in endpoints})
        statuses = dict(
            zip(
                containers,
                await asyncio.gather(*(each.status() for each in containers)),
                strict=True,
            )
        )
        found = [
            endpoint.summary(statuses[endpoint.container][0], region) for endpoint in endpoints
        ]
        chosen = [endpoint for endpoint in found if asked.takes(endpoint)]
        chosen.sort(
            key=lambda endpoint: endpoint[SORT_KEYS[asked.SortBy]],
            reverse=asked.SortOrder == "Descending",
        )
        begin = int(asked.NextToken)
        end = begin + asked.MaxResults
        return {"Endpoints": chosen[begin:end]} | (
            {"NextToken": str(end)} if end < len(chosen) else {}
        )


OPERATIONS: dict[str, Callable[[Endpoints, bytes, str], Awaitable[Members]]] = {
    "SageMaker.DescribeEndpoint": Endpoints.describe,
    "SageMaker.ListEndpoints": Endpoints.list_endpoints,
}


def _decode(body: bytes, kind: type[Input]) -> Input:
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _invalid(str(error)) from None


def _invalid(message: str) -> AwsError:
    return AwsError("ValidationException", 400, message)
