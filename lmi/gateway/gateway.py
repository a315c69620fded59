"""The gateway: what all requests share, one request, and its way to a container."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from lmi.gateway.container import Header
from lmi.gateway.endpoints import Components, Endpoint, Endpoints
from lmi.gateway.errors import invalid
from lmi.gateway.exchange import AwsExchange
from lmi.gateway.members import PREFIX, TO_CONTAINER, Member, read
from lmi.gateway.settings import Settings
from lmi.http.body import BodyMemory
from lmi.http.exchange import ENDPOINT_NAME

VARIANT = "AllTraffic"
MAX_BODY_MEMORY = 1 << 30
REGION = re.compile(r"Credential=[^/,]+/\d{8}/([a-z0-9-]+)/")


class Targets(Protocol):
    """The models of multi-model endpoints."""

    def are_of(self, endpoint: Endpoint) -> bool:
        """Whether the endpoint is a multi-model endpoint."""

    def lease(self, endpoint: Endpoint, target_model: str, region: str) -> AbstractAsyncContextManager[str]:
        """Load the model, and keep it until the block ends. Yields the path to invoke it. Raises AwsError."""


class Accepted(NamedTuple):
    """An async invocation that was accepted, and the URLs of the file that it leaves: one of the two."""

    inference_id: str
    output: str
    failure: str


class AsyncInvocations(Protocol):
    """The invocations that run after their clients were answered."""

    def accept(self, request: Request, endpoint: Endpoint) -> Accepted:
        """Put an invocation into the queue. Raises AwsError."""


class Worker(Protocol):
    """What runs beside the requests, from before the first until after the last."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...


class Gateway:
    """What all requests share. `targets`, `async_invocations` and `workers` are set before the first request."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.endpoints = Endpoints(settings.endpoints)
        self.components = Components(settings.components)
        self.num_body_bytes = 0  # of all requests that are open
        self.body_memory = BodyMemory(self, max(MAX_BODY_MEMORY, 4 * settings.max_body_bytes))
        self.targets: Targets | None = None
        self.async_invocations: AsyncInvocations | None = None
        self.workers: list[Worker] = []


@dataclass(frozen=True)
class Request:
    """A request of AWS's API: who asks what of which endpoint. `names` are those in its path."""

    exchange: AwsExchange
    names: dict[str, str]
    body: bytes

    @property
    def region(self) -> str:
        """The region that the client signed for, else "local"."""
        found = REGION.search(self.exchange.headers.get("authorization", ""))
        return found[1] if found else "local"

    def values(self, members: tuple[Member, ...]) -> dict[str, str]:
        """Return the headers of an operation by member. Raises AwsError for a value against its rule."""
        values = read(members, self.exchange.headers)
        if values.get("TargetVariant", VARIANT) != VARIANT:
            raise invalid(f"Variant {values['TargetVariant']} of endpoint {self.names['endpoint']} not found.")
        return values


def headers_for_container(
    values: dict[str, str], endpoint: str, component: str | None = None, adapter: str = ""
) -> list[Header]:
    """Return what a container gets of a request: the members that are for it, and the adapter of its component.

    It gets the name of its endpoint too, which some clients send as the name of the model.
    """
    headers = [(header, values[member]) for member, header in TO_CONTAINER.items() if member in values]
    headers.append((ENDPOINT_NAME, endpoint))
    if component and adapter:
        headers += [(PREFIX + "Adapter-Identifier", adapter), (PREFIX + "Adapter-Alias", component)]
    return headers


@asynccontextmanager
async def path_to_model(
    gateway: Gateway, endpoint: Endpoint, values: dict[str, str], region: str
) -> AsyncIterator[str]:
    """Yield the container's path for a call, while the model that it names stays loaded."""
    target = values.get("TargetModel")
    if target is None:
        if gateway.targets is not None and gateway.targets.are_of(endpoint):
            raise invalid(f"Endpoint {endpoint.name} is a multi-model endpoint: TargetModel must name a model of it.")
        yield "/invocations"
    elif gateway.targets is None:
        raise invalid(f"Endpoint {endpoint.name} is not a multi-model endpoint: the gateway has no --models.")
    else:
        async with gateway.targets.lease(endpoint, target, region) as path:
            yield path
