"""`--check-signatures` at an endpoint's OpenAI path: bearer tokens as AWS's generator makes them,
and tokens that expired, are of others, or were changed.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.client import HTTPConnection

import pytest
from botocore.auth import SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from tests.gateway.gateways import (
    CREDENTIALS,
    REGION,
    Gateway,
    ScriptedContainer,
    chunked,
    gateway,
    scripted,
)

PATH = "/endpoints/any/openai/v1/chat/completions"
SESSION_TOKEN = "a-session/token+"
ENVIRON = {**CREDENTIALS, "AWS_SESSION_TOKEN": SESSION_TOKEN, "AWS_REGION": REGION}
PREFIX = "sagemaker-api-key-"
URL = "https://sagemaker.amazonaws.com/"
VERSION = "&Version=1"
EVENTS = (b'data: {"a": 1}\n\n', b"data: [DONE]\n\n")

SERVED = (200, None)
UNRECOGNIZED = (403, "UnrecognizedClientException")
WRONG = (403, "InvalidSignatureException")
EXPIRED = (403, "ExpiredTokenException")
MISSING = (403, "MissingAuthenticationTokenException")


@pytest.fixture(scope="module")
def container() -> Iterator[ScriptedContainer]:
    with scripted(chunked(*EVENTS)) as running:
        yield running


@pytest.fixture(scope="module")
def aws(container: ScriptedContainer) -> Iterator[Gateway]:
    with gateway("--endpoint", container.url, "--check-signatures", environ=ENVIRON) as running:
        yield running


def signed_url(
    *,
    key: str = CREDENTIALS["AWS_ACCESS_KEY_ID"],
    secret: str = CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
    session_token: str | None = SESSION_TOKEN,
    region: str = REGION,
    service: str = "sagemaker",
    action: str = "CallWithBearerToken",
    url: str = URL,
    method: str = "POST",
    expires_s: int = 43_200,
    age_s: float = 0.0,
) -> str:
    """A presigned URL, without its scheme, as if it were signed so many seconds ago."""
    request = AWSRequest(method, url, params={"Action": action})
    made = datetime.now(UTC) - timedelta(seconds=age_s)
    request.context["timestamp"] = made.strftime("%Y%m%dT%H%M%SZ")

    signer = SigV4QueryAuth(
        Credentials(key, secret, session_token), service, region, expires=expires_s
    )
    signer._modify_request_before_signing(request)
    text = signer.string_to_sign(request, signer.canonical_request(request))
    signer._inject_signature_to_request(request, signer.signature(text, request))
    return str(request.url).removeprefix("https://")


def encoded(url: str) -> str:
    return PREFIX + base64.b64encode(url.encode()).decode()


def token(**changed: object) -> str:
    return encoded(signed_url(**changed) + VERSION)  # type: ignore[arg-type]


def post(aws: Gateway, bearer: str, path: str = PATH) -> tuple[int, str | None]:
    """The status of the answer, and the class of its error."""
    connection = HTTPConnection("127.0.0.1", aws.port, timeout=60)
    connection.request("POST", path, b"{}", {"Authorization": f"Bearer {bearer}"})
    with connection.getresponse() as response:
        body = response.read()
        kind = response.getheader("x-amzn-ErrorType")

    connection.close()
    if response.status == 200:
        assert body == b"".join(EVENTS)
    else:
        assert json.loads(body)["Message"]

    return response.status, kind


def test_a_token_of_the_gateways_credentials_is_served(aws: Gateway) -> None:
    assert post(aws, token()) == SERVED
    assert post(aws, token(expires_s=1000, age_s=900)) == SERVED
    assert post(aws, token(age_s=-290)) == SERVED, "a clock that is a little ahead"


def test_a_token_is_good_at_the_openai_path_only(aws: Gateway) -> None:
    good = token()
    assert post(aws, good, "/endpoints/any/invocations") == MISSING
    assert post(aws, good, "/endpoints/any/invocations-response-stream") == MISSING
    assert post(aws, good, "/") == MISSING


def test_an_expired_token_is_refused(aws: Gateway) -> None:
    assert post(aws, token(expires_s=60, age_s=61)) == EXPIRED
    assert post(aws, token(age_s=43_201)) == EXPIRED


def test_a_token_that_is_good_too_long_or_too_late_is_refused(aws: Gateway) -> None:
    assert post(aws, token(expires_s=43_201)) == WRONG
    assert post(aws, token(expires_s=0)) == WRONG
    assert post(aws, token(expires_s=-5)) == WRONG
    assert post(aws, token(age_s=-310)) == WRONG


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"key": "OTHER"}, UNRECOGNIZED),
        ({"session_token": "other"}, UNRECOGNIZED),
        ({"session_token": None}, UNRECOGNIZED),
        ({"secret": "other"}, WRONG),
        ({"region": "us-east-1"}, WRONG),
        ({"service": "bedrock"}, WRONG),
        ({"method": "GET"}, WRONG),
        ({"action": "ListEndpoints"}, UNRECOGNIZED),
        ({"url": "https://bedrock.amazonaws.com/"}, UNRECOGNIZED),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_foreign_token_is_refused(
    aws: Gateway, changed: dict[str, str | None], found: tuple[int, str]
) -> None:
    assert post(aws, token(**changed)) == found


def test_a_token_whose_fields_were_changed_is_refused(aws: Gateway) -> None:
    url = signed_url(expires_s=60, age_s=61) + VERSION
    assert post(aws, encoded(url.replace("Expires=60", "Expires=43200"))) == WRONG
    assert post(aws, encoded(url + "&X-Amz-Expires=43200")) == UNRECOGNIZED
    assert post(aws, encoded("x" + url)) == UNRECOGNIZED
    assert post(aws, encoded(url.replace("SignedHeaders=host", "SignedHeaders="))) == UNRECOGNIZED

    # A field twice, one that no token has, and one that is missing
    query = url.removesuffix(VERSION)
    assert post(aws, encoded(query + "&X-Amz-Expires=9" + VERSION)) == UNRECOGNIZED
    assert post(aws, encoded(query + "&a=1" + VERSION)) == UNRECOGNIZED
    assert post(aws, encoded(query.replace("&X-Amz-Expires=60", "") + VERSION)) == UNRECOGNIZED


def test_a_mangled_token_is_refused(aws: Gateway) -> None:
    good = token()
    mangled = [
        "any",
        PREFIX,
        good.removeprefix(PREFIX),
        good.replace("sagemaker", "bedrock", 1),
        good[:-9],
        good + "!",
        PREFIX + "é",
        PREFIX + base64.b64encode(b"\xff\x00").decode(),
        encoded("[" + signed_url() + VERSION),
        encoded(signed_url()),
    ]
    for bearer in mangled:
        assert post(aws, bearer) == UNRECOGNIZED, bearer


def test_a_refused_token_reaches_no_container(aws: Gateway, container: ScriptedContainer) -> None:
    num_before = len(container.seen)
    post(aws, token(secret="other"))
    assert len(container.seen) == num_before


def test_no_container_sees_a_token(aws: Gateway, container: ScriptedContainer) -> None:
    num_before = len(container.seen)
    post(aws, token())
    (seen,) = container.seen[num_before:]
    assert "authorization" not in {name.lower() for name, _ in seen.headers}


def test_a_gateway_of_no_region_takes_tokens_of_each(container: ScriptedContainer) -> None:
    environ = {**ENVIRON, "AWS_REGION": "", "AWS_DEFAULT_REGION": ""}
    with gateway("--endpoint", container.url, "--check-signatures", environ=environ) as anywhere:
        assert post(anywhere, token(region="us-east-1")) == SERVED


def test_without_checks_a_token_is_ignored(container: ScriptedContainer) -> None:
    with gateway("--endpoint", container.url) as unchecked:
        assert post(unchecked, "any") == SERVED
        assert post(unchecked, token(expires_s=60, age_s=61)) == SERVED
