"""A container that somebody else runs: the gateway learns of its state by its /ping."""

import time
from contextlib import AbstractContextManager, nullcontext

from lmi.gateway.aws_endpoint import EndpointState
from lmi.gateway.container import Container, ContainerFault
from lmi.gateway.errors import cut, unavailable
from lmi.gateway.request_prefix import RequestPrefix

# As on the platform.
PING_TIMEOUT_S = 2.0
MAX_PING_BYTES = 64 << 10
MAX_REASON_CHARS = 1024


class WatchedContainer(Container):
    """A container whose /ping is asked when somebody wants to know its state.

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

    async def state(self) -> EndpointState:
        """Return the state of an endpoint with this container."""
        status, text = await self._ping()
        if status == 500:
            return EndpointState("Failed", cut(text, MAX_REASON_CHARS))

        if not self._was_ready:
            return EndpointState("Creating")

        lost_s = 0.0
        if self._lost_since_s is not None:
            lost_s = time.monotonic() - self._lost_since_s

        return EndpointState("OutOfService" if lost_s >= self.out_of_service_s else "InService")

    def lease(self, prefix: RequestPrefix | None = None) -> AbstractContextManager[Container]:
        """Return this container, which the gateway does not end."""
        return nullcontext(self)

    async def _ping(self) -> tuple[int, str]:
        """Return the status of /ping and its body, or 0 and why there is no answer."""
        try:
            async with self.call("GET", "/ping", timeout_s=PING_TIMEOUT_S) as answer:
                body = await answer.read(MAX_PING_BYTES)
        except ContainerFault as fault:
            self._lost_since_s = self._lost_since_s or time.monotonic()
            return 0, str(fault)

        self._lost_since_s = None
        self._was_ready = self._was_ready or answer.status == 200
        return answer.status, body.decode(errors="replace").strip()
