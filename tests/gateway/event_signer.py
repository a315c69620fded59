"""Signs a request of events as AWS's clients do: botocore its head, and this its messages."""

from __future__ import annotations

import hashlib
import hmac
import struct
import time

from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from lmi.gateway.eventstream import frame
from tests.gateway.gateways import CREDENTIALS, REGION

EVENTS = "STREAMING-AWS4-HMAC-SHA256-EVENTS"
SECRET = CREDENTIALS["AWS_SECRET_ACCESS_KEY"]
# Of a frame, before its headers.
NUM_PRELUDE_BYTES = 12


class EventSigner:
    """The chain of signatures that begins with that of a head."""

    def __init__(self, signature: str) -> None:
        self._last = signature

    def sign(self, message: bytes, age_s: float = 0.0) -> bytes:
        """A message in a signed one. The empty one is the end."""
        time_ms = int((time.time() - age_s) * 1000)
        date = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(time_ms // 1000))
        header = b"\x05:date\x08" + struct.pack("!q", time_ms)
        scope = f"{date[:8]}/{REGION}/sagemaker/aws4_request"
        text = "\n".join(
            (
                "AWS4-HMAC-SHA256-PAYLOAD",
                date,
                scope,
                self._last,
                hashlib.sha256(header).hexdigest(),
                hashlib.sha256(message).hexdigest(),
            )
        )
        key = b"AWS4" + SECRET.encode()
        for word in (*scope.split("/"), text):
            key = hmac.new(key, word.encode(), hashlib.sha256).digest()

        self._last = key.hex()
        signature = b"\x10:chunk-signature\x06" + struct.pack("!H", len(key)) + key
        return frame(header + signature, message)

    @staticmethod
    def with_payload(signed: bytes, payload: bytes) -> bytes:
        """The headers of a message with another payload."""
        num_header_bytes = int.from_bytes(signed[4:8])
        return frame(signed[NUM_PRELUDE_BYTES : NUM_PRELUDE_BYTES + num_header_bytes], payload)


def signed_head(authority: str, path: str) -> tuple[dict[str, str], EventSigner]:
    """The headers of a request, and the signer of its events."""
    request = AWSRequest(
        "POST",
        f"https://{authority}{path}",
        {"host": authority, "X-Amz-Content-SHA256": EVENTS},
    )
    credentials = Credentials(CREDENTIALS["AWS_ACCESS_KEY_ID"], SECRET)
    SigV4Auth(credentials, "sagemaker", REGION).add_auth(request)
    headers = {name.lower(): value for name, value in request.headers.items() if name != "host"}
    return headers, EventSigner(headers["authorization"].rpartition("=")[2])
