"""One exchange with a client of AWS's API: what its request says in headers, and the answer."""

import re
import uuid
from collections.abc import Iterable, Mapping

import orjson

from lmi.errors import ClientGone
from lmi.gateway.errors import AwsError
from lmi.gateway.members import COMPONENT_NAME, MEMBERS, PREFIX, TO_CONTAINER
from lmi.http.body import BodyMemory
from lmi.http.exchange import ENDPOINT_NAME as ENDPOINT_HEADER, Exchange, Header

# The only variant of each endpoint that is not of the control plane.
VARIANT = "AllTraffic"
# What operations of inference routers call errors that those of endpoints have too.
ROUTER_KINDS = {
    "ServiceUnavailable": "ServiceUnavailableException",
    "ValidationError": "ValidationException",
}
# The same of streams in both directions.
STREAM_KINDS = {
    "InternalFailure": "InternalServerError",
    "ServiceUnavailable": "ServiceUnavailableError",
    "ValidationError": "InputValidationError",
}
# The region in the head of a signature.
REGION = re.compile(r"Credential=[^/,]+/\d{8}/([a-z0-9-]+)/")


class AwsExchange(Exchange):
    """A request of AWS's API, and its answer. An operation finds the names in its path, and its
    body in `payload`.
    """

    names: Mapping[str, str] = {}
    payload = b""
    # The one that answers.
    variant = VARIANT
    # Whether all pieces of the body were read.
    _is_read = False

    def _choose_id(self) -> str:
        return str(uuid.uuid4())

    @property
    def is_routed(self) -> bool:
        """Whether the path names an inference router."""
        return "router" in self.names

    @property
    def is_http2(self) -> bool:
        """Whether the request came over HTTP/2, which AWS has for streams in both directions."""
        return bool(self.scope["http_version"] == "2")

    @property
    def region(self) -> str:
        """The region that the client signed for, else "local"."""
        match = REGION.search(self.headers.get("authorization", ""))
        return match[1] if match else "local"

    def values(self, operation: str) -> dict[str, str]:
        """Return the sent headers of an operation by member. Raises AwsError for a value against
        its rule.
        """
        values = {}
        for member in MEMBERS[operation]:
            if member.header in self.headers:
                values[member.name] = member.check(self.headers[member.header])

        component = self.names.get("component")
        if component:
            values[COMPONENT_NAME.name] = COMPONENT_NAME.check(component)

        return values

    def read_in_pieces(self, memory: BodyMemory) -> None:
        """Begin to read the body in pieces, of which `hold` counts in `memory` what is kept. Raises
        UnsupportedEncoding.
        """
        self._check_is_plain()
        self._memory = memory

    async def piece(self) -> bytes:
        """Return what has come of the body, b"" at its end. Raises ClientGone."""
        while not self._is_read:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone("the client left before its request was complete")

            self._is_read = not message.get("more_body", False)
            if message["body"]:
                return bytes(message["body"])

        return b""

    def headers_for_container(
        self, values: dict[str, str], endpoint: str, adapter: str = ""
    ) -> list[Header]:
        """Return what a container gets of a request: the members that are for it, and the adapter
        of its component.

        It gets the name of its endpoint too, which some clients send as the name of the model. It
        is "" where another is chosen later.
        """
        headers = []
        for member, header in TO_CONTAINER.items():
            if member in values:
                headers.append((header, values[member]))

        if endpoint:
            headers.append((ENDPOINT_HEADER, endpoint))

        if adapter:
            alias = values[COMPONENT_NAME.name]
            headers += [(PREFIX + "Adapter-Identifier", adapter), (PREFIX + "Adapter-Alias", alias)]

        return headers

    async def _start(
        self, status: int, media_type: str, headers: Iterable[Header], length: int | None = None
    ) -> None:
        """Send the head of the answer, without headers that have no value."""
        fields = [("content-type", media_type), ("x-amzn-RequestId", self.request_id)]
        if length is not None:
            fields.append(("content-length", str(length)))

        raw = []
        for name, value in [*fields, *headers]:
            if value:
                raw.append((name.lower().encode(), value.encode("latin-1")))

        self.status = status
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    def kind_of(self, error: AwsError) -> str:
        """Return the class of an error as the operation calls it."""
        kinds = {}
        if self.is_routed:
            kinds = ROUTER_KINDS
        elif self.is_http2:
            kinds = STREAM_KINDS

        return kinds.get(error.kind, error.kind)

    async def send_error(self, error: AwsError) -> None:
        """Send an error. A POST of `/` is AWS JSON 1.1, whose clients read its class in
        the body.
        """
        kind = self.kind_of(error)
        self.error_label = kind
        members = error.members
        if (self.method, self.path) == ("POST", "/"):
            members["__type"] = kind

        headers = [("x-amzn-ErrorType", kind)]
        await self.send_whole(error.status, "application/json", orjson.dumps(members), headers)
