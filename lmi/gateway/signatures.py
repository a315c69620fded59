"""Checks who asks: the Signature Version 4 of a request, computed again by botocore. Source: AWS's pages on SigV4."""

from __future__ import annotations

import hashlib
import hmac
import re
import time
from calendar import timegm
from collections.abc import Mapping

from lmi.errors import BadConfiguration
from lmi.gateway.exchange import AwsError, AwsExchange

SERVICE = "sagemaker"
MAX_SKEW_S = 300.0
AUTHORIZATION = re.compile(
    r"AWS4-HMAC-SHA256 Credential=(?P<key>[^/,]+)/(?P<day>\d{8})/(?P<region>[^/,]+)/(?P<service>[^/,]+)/aws4_request, *"
    r"SignedHeaders=(?P<headers>[^,]+), *Signature=(?P<signature>[0-9a-f]{64})"
)
REQUIRED = {"host", "x-amz-date"}  # among the signed headers
SIGNED_IF_SENT = ("x-amz-", "x-amzn-sagemaker-")  # AWS's rule, and what chooses the model or its session
DIGEST = "x-amz-content-sha256"  # is compared with the body
TIME_FORM = "%Y%m%dT%H%M%SZ"


class Signatures:
    """Checks signatures made with the credentials in `environ`. Raises BadConfiguration without these or botocore."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        key, secret = environ.get("AWS_ACCESS_KEY_ID"), environ.get("AWS_SECRET_ACCESS_KEY")
        if not key or not secret:
            raise BadConfiguration(
                "--check-signatures needs AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, as clients do"
            )
        try:
            from botocore.credentials import Credentials  # type: ignore[import-untyped]
        except ModuleNotFoundError:
            raise BadConfiguration("--check-signatures needs botocore: pip install boto3") from None
        self._credentials = Credentials(key, secret, environ.get("AWS_SESSION_TOKEN") or None)

    def check(self, exchange: AwsExchange, body: bytes) -> None:
        """Raise AwsError unless the request is signed with these credentials, as it is, and lately."""
        given = AUTHORIZATION.fullmatch(exchange.headers.get("authorization", ""))
        if given is None:
            raise AwsError("MissingAuthenticationTokenException", 403, "Missing Authentication Token")
        token = exchange.headers.get("x-amz-security-token")
        if (given["key"], token) != (self._credentials.access_key, self._credentials.token):
            message = "The security token included in the request is invalid."
            raise AwsError("UnrecognizedClientException", 403, message)
        date = exchange.headers.get("x-amz-date", "")
        if not _is_now(date) or not date.startswith(given["day"]):
            raise _wrong(f"Signature expired or not yet current: X-Amz-Date is more than {MAX_SKEW_S:g} s off.")
        # What anyone could have added to a signed request, whose meaning it changes.
        sent = {name for name in exchange.headers.keys() if name.startswith(SIGNED_IF_SENT)}
        if unsigned := sorted(sent - {DIGEST, *given["headers"].split(";")}):
            raise _wrong(f"There were headers present in the request which were not signed: {', '.join(unsigned)}")
        if not hmac.compare_digest(self._sign(exchange, body, given, date), given["signature"]):
            raise _wrong("The request signature we calculated does not match the signature you provided.")

    def _sign(self, exchange: AwsExchange, body: bytes, given: re.Match[str], date: str) -> str:
        """Return the signature that the request must have."""
        from botocore.auth import SigV4Auth  # type: ignore[import-untyped]
        from botocore.awsrequest import AWSRequest  # type: ignore[import-untyped]

        names, headers = given["headers"].split(";"), exchange.headers
        digest = headers.get(DIGEST, hashlib.sha256(body).hexdigest())
        is_bound = REQUIRED <= set(names) and digest == hashlib.sha256(body).hexdigest()
        if not is_bound or given["service"] != SERVICE:
            return ""  # it would be good for other requests too
        query = exchange.scope["query_string"].decode("latin-1")
        url = f"http://{headers['host']}{exchange.scope['raw_path'].decode('latin-1')}" + (f"?{query}" if query else "")
        signed = {name: ",".join(headers.getlist(name)) for name in names}
        request = AWSRequest(exchange.method, url, signed, body)
        request.context["timestamp"] = date
        signer = SigV4Auth(self._credentials, SERVICE, given["region"])
        text: str = signer.signature(signer.string_to_sign(request, signer.canonical_request(request)), request)
        return text


def _is_now(date: str) -> bool:
    try:
        signed_s = timegm(time.strptime(date, TIME_FORM))
    except ValueError:
        return False
    return abs(time.time() - signed_s) <= MAX_SKEW_S


def _wrong(message: str) -> AwsError:
    return AwsError("InvalidSignatureException", 403, message)
