"""One exchange with a client of AWS's API: its request, and its answer with the headers of that API and no others."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable
from dataclasses import dataclass

import orjson

from lmi.gateway.container import Header
from lmi.gateway.errors import AwsError, invalid
from lmi.gateway.members import PREFIX, TO_CONTAINER, AwsMember, read
from lmi.http.exchange import ENDPOINT_NAME, Exchange

VARIANT = "AllTraffic"
REGION = re.compile(r"Credential=[^/,]+/\d{8}/([a-z0-9-]+)/")


class AwsExchange(Exchange):
    def _choose_id(self) -> str:
        return str(uuid.uuid4())

    async def start(self, status: int, media_type: str, headers: Iterable[Header] = ()) -> None:
        """Send the head, without a content type if `media_type` is ""."""
        fields = [("content-type", media_type), ("x-amzn-RequestId", self.request_id), *headers]
        raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in fields if value]
        self.status = status
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def send_whole(self, status: int, media_type: str, body: bytes, headers: Iterable[Header] = ()) -> None:
        """Send a whole response with its length."""
        await self.start(status, media_type, [("content-length", str(len(body))), *headers])
        await self.end(body)

    async def send_error(self, error: AwsError) -> None:
        """Send an error. A POST of `/` is AWS JSON 1.1, whose clients read its class in the body."""
        self.error_label = error.kind
        body = error.members | ({"__type": error.kind} if (self.method, self.path) == ("POST", "/") else {})
        await self.send_whole(error.status, "application/json", orjson.dumps(body), [("x-amzn-ErrorType", error.kind)])


@dataclass(frozen=True)
class AwsRequest:
    """A request of AWS's API: who asks what of which endpoint. `names` are those in its path."""

    exchange: AwsExchange
    names: dict[str, str]
    body: bytes

    @property
    def region(self) -> str:
        """The region that the client signed for, else "local"."""
        found = REGION.search(self.exchange.headers.get("authorization", ""))
        return found[1] if found else "local"

    def values(self, members: tuple[AwsMember, ...]) -> dict[str, str]:
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
