"""Checks the bearer tokens of an endpoint's OpenAI path.

Such a token is a presigned URL in base64: a signature of version 4 that allows
CallWithBearerToken until it expires, in any request.
"""

import base64
import hmac
import re
import time
from calendar import timegm
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl

from lmi.gateway.errors import AwsError
from lmi.gateway.exchange import AwsExchange
from lmi.gateway.signatures import (
    MAX_SKEW_S,
    NO_MATCH,
    SERVICE,
    TIME_FORM,
    unrecognized,
    wrong_signature,
)

HEADER = re.compile(r"bearer +(?P<token>\S+)", re.IGNORECASE)
PREFIX = "sagemaker-api-key-"
# What is signed: a POST of this URL.
URL = "sagemaker.amazonaws.com/?"
ACTION = "CallWithBearerToken"
# It is added after the signature is made.
VERSION = "&Version=1"
SIGNATURE = re.compile("&X-Amz-Signature=(?P<signature>[0-9a-f]{64})")
CREDENTIAL = re.compile(
    r"(?P<key>[^/]+)/(?P<day>\d{8})/(?P<region>[^/]+)/(?P<service>[^/]+)/aws4_request"
)
SECONDS = re.compile("[1-9][0-9]{0,4}")
MAX_EXPIRES_S = 43_200
# The fields of every token, and the one of temporary credentials.
FIELDS = {
    "Action",
    "X-Amz-Algorithm",
    "X-Amz-Credential",
    "X-Amz-Date",
    "X-Amz-Expires",
    "X-Amz-SignedHeaders",
}
SESSION_TOKEN = "X-Amz-Security-Token"
CONSTANTS = {
    "Action": ACTION,
    "X-Amz-Algorithm": "AWS4-HMAC-SHA256",
    "X-Amz-SignedHeaders": "host",
}


class BearerTokens:
    """Checks tokens made with these credentials of botocore. They must be for the region that
    `environ` names, if it names one.
    """

    def __init__(self, credentials: Any, environ: Mapping[str, str]) -> None:
        self._credentials = credentials
        self._region = environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION", "")

    def is_sent(self, exchange: AwsExchange) -> bool:
        """Whether the request has a bearer token, of whatever form."""
        return HEADER.fullmatch(exchange.headers.get("authorization", "")) is not None

    def check(self, exchange: AwsExchange) -> None:
        """Raise AwsError unless the token is by these credentials, and has not expired."""
        header = HEADER.fullmatch(exchange.headers.get("authorization", ""))
        if header is None:
            raise unrecognized()

        signed_query, signature = _parts(header["token"])
        fields = _fields(signed_query)
        credential = CREDENTIAL.fullmatch(fields["X-Amz-Credential"])
        if credential is None:
            raise unrecognized()

        session_token = fields.get(SESSION_TOKEN)
        credentials = (self._credentials.access_key, self._credentials.token)
        if (credential["key"], session_token) != credentials:
            raise unrecognized()

        self._check_scope(credential["service"], credential["region"])
        self._compare(signed_query, signature, credential["region"], fields["X-Amz-Date"])

        # Last, so that only who had a good token learns that it has expired.
        _check_time(fields, credential["day"])

    def _check_scope(self, service: str, region: str) -> None:
        """Raise AwsError unless the token is for this service and region."""
        if service != SERVICE:
            raise wrong_signature(
                f"Credential should be scoped to correct service: '{SERVICE}', given '{service}'."
            )

        if self._region and region != self._region:
            raise wrong_signature(
                f"Credential should be scoped to a valid region: '{self._region}', "
                f"given '{region}'."
            )

    def _compare(self, signed_query: str, signature: str, region: str, date: str) -> None:
        """Raise AwsError unless the query has this signature."""
        from botocore.auth import SigV4QueryAuth  # type: ignore[import-untyped]
        from botocore.awsrequest import AWSRequest  # type: ignore[import-untyped]

        request = AWSRequest("POST", f"https://{URL}{signed_query}")
        request.context["timestamp"] = date

        signer = SigV4QueryAuth(self._credentials, SERVICE, region)
        canonical_request = signer.canonical_request(request)
        text_to_sign = signer.string_to_sign(request, canonical_request)
        if not hmac.compare_digest(signer.signature(text_to_sign, request), signature):
            raise wrong_signature(NO_MATCH)


def _parts(token: str) -> tuple[str, str]:
    """Return the query that a token signs, and its signature. Raises AwsError for a token of
    another form.
    """
    prefix, encoded = token[: len(PREFIX)], token[len(PREFIX) :]
    try:
        url = base64.b64decode(encoded, validate=True).decode("ascii")
    except ValueError:
        raise unrecognized() from None

    is_whole = prefix == PREFIX and url.startswith(URL) and url.endswith(VERSION)
    query = url.removeprefix(URL).removesuffix(VERSION)
    signatures = list(SIGNATURE.finditer(query))
    if not is_whole or len(signatures) != 1:
        raise unrecognized()

    return SIGNATURE.sub("", query), signatures[0]["signature"]


def _fields(signed_query: str) -> dict[str, str]:
    """Return the fields of a signed query. Raises AwsError unless they are those of a token, each
    once.
    """
    try:
        pairs = parse_qsl(signed_query, keep_blank_values=True, strict_parsing=True)
    except ValueError:
        raise unrecognized() from None

    fields = dict(pairs)
    is_complete = len(fields) == len(pairs) and fields.keys() - {SESSION_TOKEN} == FIELDS
    if not is_complete or any(fields[name] != value for name, value in CONSTANTS.items()):
        raise unrecognized()

    return fields


def _check_time(fields: dict[str, str], day: str) -> None:
    """Raise AwsError unless a token is good now, and for no longer than AWS allows."""
    date = fields["X-Amz-Date"]
    try:
        made_s = timegm(time.strptime(date, TIME_FORM))
    except ValueError:
        raise wrong_signature(NO_MATCH) from None

    expires = fields["X-Amz-Expires"]
    if not SECONDS.fullmatch(expires) or int(expires) > MAX_EXPIRES_S:
        raise wrong_signature(
            f"X-Amz-Expires must be from 1 to {MAX_EXPIRES_S} seconds, given '{expires}'."
        )

    age_s = time.time() - made_s
    if age_s < -MAX_SKEW_S or not date.startswith(day):
        raise wrong_signature(f"Signature not yet current: X-Amz-Date is {date}.")

    if age_s >= int(expires):
        message = "The security token included in the request is expired"
        raise AwsError("ExpiredTokenException", 403, message)
