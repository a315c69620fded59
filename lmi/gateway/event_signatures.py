"""Checks the messages of a signed event stream, each of which signs all before it too.

Source: AWS's signatures of version 4, for event streams.
"""

import hashlib
import hmac
import struct
import time

from lmi.gateway.event_message import TIMESTAMP, EventMessage, Timestamp
from lmi.gateway.signatures import NO_MATCH, SERVICE, TIME_FORM, Signed, check_date, wrong_signature

DATE = ":date"
SIGNATURE = ":chunk-signature"


class SignatureChain:
    """The signatures of one stream, which begin with that of the request's head."""

    def __init__(self, secret_key: str, signed: Signed) -> None:
        self._secret_key = secret_key
        self._region = signed.region
        self._last_signature = signed.signature

    def check(self, message: EventMessage) -> None:
        """Raise AwsError unless the message is signed, lately, and follows the one before."""
        date = message.headers.get(DATE)
        signature = message.headers.get(SIGNATURE)
        has_more = len(message.headers) > len((DATE, SIGNATURE))
        if has_more or not isinstance(date, Timestamp) or not isinstance(signature, bytes):
            raise wrong_signature(f"Each message must have {DATE} and {SIGNATURE} alone.")

        expected = self._signature(date, message.payload)
        if not hmac.compare_digest(expected, signature):
            raise wrong_signature(NO_MATCH)

        self._last_signature = signature.hex()

    def _signature(self, date: Timestamp, payload: bytes) -> bytes:
        """Return the signature that a message of this time and payload has here."""
        text_of_date = _text_of(date)
        day = text_of_date[:8]
        check_date(text_of_date, day)

        header = struct.pack(f"!B{len(DATE)}sBq", len(DATE), DATE.encode(), TIMESTAMP, date)
        lines = (
            "AWS4-HMAC-SHA256-PAYLOAD",
            text_of_date,
            f"{day}/{self._region}/{SERVICE}/aws4_request",
            self._last_signature,
            hashlib.sha256(header).hexdigest(),
            hashlib.sha256(payload).hexdigest(),
        )

        key = f"AWS4{self._secret_key}".encode()
        for text in (day, self._region, SERVICE, "aws4_request", "\n".join(lines)):
            key = hmac.digest(key, text.encode(), "sha256")

        return key


def _text_of(date: Timestamp) -> str:
    """Return a time as signatures write it. Raises AwsError for one of no year that they know."""
    try:
        return time.strftime(TIME_FORM, time.gmtime(date // 1000))
    except (OverflowError, OSError, ValueError):
        raise wrong_signature(NO_MATCH) from None
