"""Endpoints: which container stands behind a name, and what its /ping has said so far."""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from lmi.gateway.container import Container, ContainerFault, OutOfTime, Unreachable
from lmi.gateway.exchange import ACCOUNT, ENDPOINT_NAME, AwsError, cut, invalid, model_error, unavailable

ANY = ""  # in place of an endpoint's name
TIMED_OUT = "Your invocation timed out while waiting for a response from container primary."
PING_TIMEOUT_S = 2.0  # as on the platform
OUT_OF_SERVICE_S = 10.0
MAX_PING_BYTES, MAX_REASON_CHARS = 64 << 10, 1024
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
            return "Failed", cut(text, MAX_REASON_CHARS)
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
class AwsEndpoint:
    name: str
    container: Container
    health: Health
    created_s: float = field(default_factory=time.time)  # since 1970

    def arn(self, region: str) -> str:
        return f"arn:aws:sagemaker:{region}:{ACCOUNT}:endpoint/{self.name}"

    def error(self, fault: ContainerFault, region: str) -> AwsError:
        """Return what a client gets where the container gave no whole response."""
        if isinstance(fault, Unreachable):
            return unavailable(f"The container at {self.container.url} is not there: {fault}")
        return model_error(0, TIMED_OUT if isinstance(fault, OutOfTime) else str(fault), self.name, region)


class Endpoints:
    """All endpoints and their inference components. A container without a name serves every name that no other has.

    `components` has the adapter, "" for none, by endpoint and component. Without any, every component is taken.
    """

    def __init__(self, urls: Mapping[str, str], components: Mapping[tuple[str, str], str]) -> None:
        key = os.environ.get("LMI_API_KEY", "").partition(",")[0].strip()
        containers = {url: Container(url, key) for url in urls.values()}
        self._behind = {url: (container, Health(container)) for url, container in containers.items()}
        self._other_url = urls.get(ANY)
        self._known = {name: AwsEndpoint(name, *self._behind[url]) for name, url in urls.items() if name != ANY}
        self._components = components

    def find(self, name: str) -> AwsEndpoint:
        """Return the endpoint. Raises AwsError for a name that cannot be one or that no container has."""
        if found := self._known.get(name):
            return found
        ENDPOINT_NAME.check(name)
        if self._other_url is None:
            raise invalid(f"Endpoint {name} of account {ACCOUNT} not found.")
        endpoint = AwsEndpoint(name, *self._behind[self._other_url])
        if len(self._known) < MAX_NAMES:
            self._known[name] = endpoint
        return endpoint

    def all(self) -> list[AwsEndpoint]:
        """Return those with a container of their own, and those that clients have named so far."""
        return list(self._known.values())

    def adapter(self, endpoint: str, component: str | None) -> str:
        """Return the adapter of a component, or "". Raises AwsError for a component that is not there."""
        if component is None or not self._components:
            return ""
        for name in (endpoint, ANY):
            if (name, component) in self._components:
                return self._components[name, component]
        raise invalid(f"Inference Component {component} of endpoint {endpoint} not found.")
