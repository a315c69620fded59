"""An accepted async invocation, and the answer that it leaves."""

import time
import uuid

import msgspec

from lmi.gateway.container import ContainerResponse
from lmi.gateway.errors import AwsError, model_error
from lmi.http.exchange import ENDPOINT_NAME, MAX_HEADER_BYTES, Header, num_bytes

# It is AWS's default.
TIMEOUT_S = 900


class AsyncAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What an invocation leaves: a file or an object at `url`."""

    url: str
    data: bytes
    media_type: str


def _new_key() -> str:
    return f"{time.time_ns():020}-{uuid.uuid4().hex}"


class AsyncJob(msgspec.Struct, frozen=True, kw_only=True):
    """An accepted invocation of an endpoint. Its input is `body`, or what lies at `location`.

    It must begin before `expires_s`, in seconds since 1970, and may then take `timeout_s`. It
    leaves one of two URLs: `output` with its answer, or `failure` with its error.

    What came by an inference router has the ARNs of its `destinations`, of which one becomes the
    endpoint when it begins. `region` is then the router's.
    """

    endpoint: str
    region: str
    inference_id: str
    headers: list[Header]
    body: bytes = b""
    location: str = ""
    output: str
    failure: str
    expires_s: float
    timeout_s: float = TIMEOUT_S
    destinations: list[str] = []
    # What it leaves, once that is known.
    answer: AsyncAnswer | None = None
    # Its name in the queue, in the order of the invocations.
    key: str = msgspec.field(default_factory=_new_key)

    def error(self, reason: str, status: int = 0) -> AwsError:
        """Return the error of a container that answered with `status` and `reason`, or
        with none.
        """
        return model_error(status, reason, self.endpoint, self.region)

    def sent_to(self, endpoint: str) -> "AsyncJob":
        """Return the job with the endpoint that its router has chosen."""
        headers = [*self.headers, (ENDPOINT_NAME, endpoint)]
        return msgspec.structs.replace(self, endpoint=endpoint, headers=headers)

    def succeeded(self, response: ContainerResponse, body: bytes) -> "AsyncJob":
        """Return the job with its answer. Raises AwsError for one that fails in production too."""
        if response.status >= 300:
            raise self.error(body.decode(errors="replace"), response.status)

        if not response.header("content-length"):
            raise self.error("The response did not specify the required Content-Length header.")

        num_header_bytes = num_bytes(response.headers)
        if num_header_bytes > MAX_HEADER_BYTES:
            raise self.error(
                f"The headers of the response have {num_header_bytes} bytes together, more than "
                f"{MAX_HEADER_BYTES}."
            )

        media_type = response.header("content-type") or "application/octet-stream"
        return self._with(AsyncAnswer(url=self.output, data=body, media_type=media_type))

    def failed(self, error: AwsError) -> "AsyncJob":
        """Return the job with an error as its answer."""
        data = msgspec.json.encode(error.members)
        return self._with(AsyncAnswer(url=self.failure, data=data, media_type="application/json"))

    def _with(self, answer: AsyncAnswer) -> "AsyncJob":
        # Its input is needed no more.
        return msgspec.structs.replace(self, answer=answer, body=b"")
