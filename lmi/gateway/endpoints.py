"""Endpoints: which container stands behind a name, and what its /ping has said so far."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from lmi.gateway.container import Container, ContainerFault
from lmi.gateway.errors import ACCOUNT, AwsError, no_endpoint, unavailable
from lmi.gateway.members import ENDPOINT_NAME
from lmi.gateway.settings import ANY

PING_TIMEOUT_S = 2.0  # as on the platform
OUT_OF_SERVICE_S = 10.0
MAX_PING_BYTES = 64 << 10
MAX_NAMES = 1000  # that are remembered of those that the clients choose


class Health:
    """What a container's /ping says. It is asked only when somebody wants to know.

    An endpoint is out of service `out_of_service_s` after its container was first found gone.
    """

    def __init__(self, container: Container, out_of_service_s: float = OUT_OF_SERVICE_S) -> None:
        self._container = container
        self._out_of_service_s = out_of_service_s
        self._was_ready = False
        self._lost_since_s: float | None = None

    async def check_was_ready(self) -> None:
        """Raise AwsError if /ping has never been 200."""
        if self._was_ready:
            return
        status, text = await self._ping()
        if status != 200:
            said = f"its /ping says {status}: {text}" if status else text
            raise unavailable(f"The container at {self._container.url} is not ready: {said}")

    async def status(self) -> tuple[str, str]:
        """Return AWS's EndpointStatus, and why it failed."""
        status, text = await self._ping()
        if status == 500:
            return "Failed", text
        if not self._was_ready:
            return "Creating", ""
        lost_s = 0.0 if self._lost_since_s is None else time.monotonic() - self._lost_since_s
        return "OutOfService" if lost_s >= self._out_of_service_s else "InService", ""

    async def _ping(self) -> tuple[int, str]:
        """Return the status of /ping and its body, or 0 and the reason."""
        try:
            async with self._container.call("GET", "/ping", timeout_s=PING_TIMEOUT_S) as answer:
                body = await answer.read(MAX_PING_BYTES)
        except ContainerFault as fault:
            self._lost_since_s = self._lost_since_s or time.monotonic()
            return 0, str(fault)
        self._lost_since_s = None
        self._was_ready = self._was_ready or answer.status == 200
        return answer.status, body.decode(errors="replace").strip()


@dataclass(frozen=True)
class Endpoint:
    name: str
    container: Container
    health: Health
    created_s: float = field(default_factory=time.time)  # since 1970

    def arn(self, region: str) -> str:
        return f"arn:aws:sagemaker:{region}:{ACCOUNT}:endpoint/{self.name}"


class Endpoints:
    """All endpoints. A container without a name serves every name that no other has."""

    def __init__(self, urls: Mapping[str, str]) -> None:
        containers = {url: Container(url) for url in urls.values()}
        self._behind = {url: (container, Health(container)) for url, container in containers.items()}
        self._other_url = urls.get(ANY)
        self._known = {name: Endpoint(name, *self._behind[url]) for name, url in urls.items() if name != ANY}

    def find(self, name: str) -> Endpoint:
        """Return the endpoint. Raises AwsError for a name that cannot be one or that no container has."""
        if found := self._known.get(name):
            return found
        ENDPOINT_NAME.check(name)
        if self._other_url is None:
            raise no_endpoint(name)
        endpoint = Endpoint(name, *self._behind[self._other_url])
        if len(self._known) < MAX_NAMES:
            self._known[name] = endpoint
        return endpoint

    def all(self) -> list[Endpoint]:
        """Return those with a container of their own, and those that clients have named so far."""
        return list(self._known.values())


class Components:
    """Inference components and the adapters behind them. Without any, every component is taken and means nothing."""

    def __init__(self, adapters: Mapping[tuple[str, str], str]) -> None:
        self._adapters = adapters

    def adapter(self, endpoint: str, component: str | None) -> str:
        """Return the adapter of a component, or "". Raises AwsError for a component that is not there."""
        if component is None or not self._adapters:
            return ""
        for key in ((endpoint, component), (ANY, component)):
            if key in self._adapters:
                return self._adapters[key]
        raise AwsError("ValidationError", 400, f"Inference Component {component} of endpoint {endpoint} not found.")
