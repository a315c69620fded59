"""HTTP/1.1 at the gateway, where what is refused below HTTP has the form of AWS's API too."""

from __future__ import annotations

import uuid

from lmi.gateway.errors import AwsError, unavailable
from lmi.http.protocol import GuardedProtocol, Refusal


class AwsProtocol(GuardedProtocol):
    def rendered(self, refusal: Refusal) -> tuple[bytes, str]:
        said = str(refusal)
        error = unavailable(said) if refusal.status == 503 else AwsError("ValidationError", refusal.status, said)
        return error.body, f"x-amzn-requestid: {uuid.uuid4()}\r\nx-amzn-errortype: {error.kind}\r\n"
