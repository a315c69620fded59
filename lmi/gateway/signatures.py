"""Checks who signed a request: AWS's signatures of version 4."""

import hashlib
import hmac
import re
import time
from calendar import timegm
from collections.abc import Mapping
from dataclasses import dataclass

from lmi.errors import BadConfiguration
from lmi.gateway.errors import AwsError
from lmi.gateway.exchange import AwsExchange

SERVICE = "sagemaker"
# By so much the time of a signature may differ from ours.
MAX_SKEW_S = 300.0
AUTHORIZATION = re.compile(
    r"AWS4-HMAC-SHA256 "
    r"Credential=(?P<key>[^/,]+)/(?P<day>\d{8})/(?P<region>[^/,]+)/(?P<service>[^/,]+)/"
    r"aws4_request, *"
    r"SignedHeaders=(?P<headers>[^,]+), *Signature=(?P<signature>[0-9a-f]{64})"
)
# These are always among the signed headers.
REQUIRED = {"host", "x-amz-date"}
# AWS has this rule, and these choose the model or its session.
SIGNED_IF_SENT = (
    "x-amz-",
    "x-amzn-sagemaker-",
)
# It is compared with the body.
DIGEST = "x-amz-content-sha256"
# In its place, where the body is a stream of signed events.
SIGNED_EVENTS = "STREAMING-AWS4-HMAC-SHA256-EVENTS"
TIME_FORM = "%Y%m%dT%H%M%SZ"
NO_MATCH = "The request signature we calculated does not match the signature you provided."


@dataclass(frozen=True, slots=True)
class Signed:
    """What the head of a request says of its signature."""

    # The names of the headers that are signed.
    names: list[str]
    region: str
    date: str
    signature: str
    # The digest of the body, in hex.
    digest: str | None


class Signatures:
    """Checks signatures made with the credentials in `environ`. Raises BadConfiguration without
    these or botocore.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        key = environ.get("AWS_ACCESS_KEY_ID")
        secret = environ.get("AWS_SECRET_ACCESS_KEY")
        if not key or not secret:
            names = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            raise BadConfiguration(f"--check-signatures needs {names}, as clients do")

        try:
            from botocore.credentials import Credentials  # type: ignore[import-untyped]
        except ModuleNotFoundError:
            raise BadConfiguration("--check-signatures needs botocore: pip install boto3") from None

        self.credentials = Credentials(key, secret, environ.get("AWS_SESSION_TOKEN") or None)

    def check_head(self, exchange: AwsExchange, signs_events: bool = False) -> Signed:
        """Return what the head says of the signature, before a byte of the body is read. Raises
        AwsError unless it is by these credentials, was made lately, and is bound to this request.

        A head that has the digest of the body, as S3's clients send it, is checked here in full,
        and so is one whose body is to be a stream of signed events (`signs_events`).
        """
        authorization = AUTHORIZATION.fullmatch(exchange.headers.get("authorization", ""))
        if authorization is None:
            raise AwsError(
                "MissingAuthenticationTokenException", 403, "Missing Authentication Token"
            )

        token = exchange.headers.get("x-amz-security-token")
        credentials = (self.credentials.access_key, self.credentials.token)
        if (authorization["key"], token) != credentials:
            raise unrecognized()

        date = exchange.headers.get("x-amz-date", "")
        names = authorization["headers"].split(";")
        check_date(date, authorization["day"])
        _check_signed(exchange, names)
        # A signature that is not bound to this request would be good for others too.
        is_bound = REQUIRED <= set(names) and authorization["service"] == SERVICE
        if not is_bound:
            raise wrong_signature(NO_MATCH)

        digest = exchange.headers.get(DIGEST)
        signature = authorization["signature"]
        signed = Signed(names, authorization["region"], date, signature, digest)
        if digest is not None or signs_events:
            # It may be none, as UNSIGNED-PAYLOAD.
            expected = SIGNED_EVENTS if signs_events else "[0-9a-f]{64}"
            if digest is None or not re.fullmatch(expected, digest):
                raise wrong_signature(NO_MATCH)

            self._compare(exchange, signed, digest)

        return signed

    def check_body(self, exchange: AwsExchange, signed: Signed) -> None:
        """Raise AwsError unless the body is the one that was signed."""
        digest = hashlib.sha256(exchange.payload).hexdigest()
        if signed.digest is None:
            self._compare(exchange, signed, digest)
        elif signed.digest != digest:
            raise wrong_signature(NO_MATCH)

    def _compare(self, exchange: AwsExchange, signed: Signed, digest: str) -> None:
        """Raise AwsError unless the request has the signature that it has with this digest of its
        body.
        """
        from botocore.auth import SigV4Auth  # type: ignore[import-untyped]
        from botocore.awsrequest import AWSRequest  # type: ignore[import-untyped]

        scope = exchange.scope
        query = scope["query_string"].decode("latin-1")
        url = f"http://{exchange.headers['host']}{scope['raw_path'].decode('latin-1')}"
        if query:
            url += f"?{query}"

        headers = {name: ",".join(exchange.headers.getlist(name)) for name in signed.names}
        request = AWSRequest(exchange.method, url, headers)
        request.context["timestamp"] = signed.date

        signer = SigV4Auth(self.credentials, SERVICE, signed.region)
        signer.payload = lambda request: digest
        canonical_request = signer.canonical_request(request)
        text_to_sign = signer.string_to_sign(request, canonical_request)
        signature = signer.signature(text_to_sign, request)
        if not hmac.compare_digest(signature, signed.signature):
            raise wrong_signature(NO_MATCH)


def unrecognized() -> AwsError:
    """Somebody else's credentials, or none."""
    message = "The security token included in the request is invalid."
    return AwsError("UnrecognizedClientException", 403, message)


def wrong_signature(message: str) -> AwsError:
    """The signature is not that of this request, made lately."""
    return AwsError("InvalidSignatureException", 403, message)


def check_date(date: str, day: str) -> None:
    """Raise AwsError for a date that is too far from now, or of another day than the key."""
    try:
        skew_s = abs(time.time() - timegm(time.strptime(date, TIME_FORM)))
    except ValueError:
        skew_s = float("inf")

    if skew_s > MAX_SKEW_S or not date.startswith(day):
        raise wrong_signature(
            f"Signature expired or not yet current: X-Amz-Date is more than {MAX_SKEW_S:g} s off."
        )


def _check_signed(exchange: AwsExchange, names: list[str]) -> None:
    """Raise AwsError for a header that changes what a request means and is not among the signed
    ones: anyone could have added it.
    """
    sent = {name for name in exchange.headers.keys() if name.startswith(SIGNED_IF_SENT)}
    unsigned = sorted(sent - {DIGEST, *names})
    if unsigned:
        raise wrong_signature(
            f"There were headers present in the request which were not signed: "
            f"{', '.join(unsigned)}"
        )
