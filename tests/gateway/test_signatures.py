"""`--check-signatures`: requests that AWS's own client signed, and requests that
somebody changed.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from http.client import HTTPConnection
from pathlib import Path

import boto3
import pytest
from botocore import UNSIGNED
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.credentials import Credentials
from botocore.exceptions import ClientError

from tests.gateway.gateways import (
    CREDENTIALS,
    REGION,
    Gateway,
    ScriptedContainer,
    gateway,
    scripted,
    whole,
)

PATH = "/endpoints/any/invocations"
TOKEN = "a-session-token"
ENVIRON = {**CREDENTIALS, "AWS_SESSION_TOKEN": TOKEN}


@pytest.fixture(scope="module")
def container() -> Iterator[ScriptedContainer]:
    with scripted(whole(b"hello")) as running:
        yield running


@pytest.fixture(scope="module")
def aws(container: ScriptedContainer) -> Iterator[Gateway]:
    with gateway("--endpoint", container.url, "--check-signatures", environ=ENVIRON) as running:
        yield running


def code(aws: Gateway, service: str = "sagemaker-runtime", **credentials: str) -> str:
    """What the gateway says to a client with these credentials, "" if it serves it."""
    client = aws.client(service, **credentials)
    try:
        if service == "sagemaker":
            client.list_endpoints()
        else:
            client.invoke_endpoint(EndpointName="any", Body=b"{}", CustomAttributes="a  b=1")[
                "Body"
            ].read()
    except ClientError as error:
        assert error.response["ResponseMetadata"]["HTTPStatusCode"] == 403
        return str(error.response["Error"]["Code"])
    finally:
        client.close()

    return ""


def signed(
    aws: Gateway, service: str = "sagemaker", late_s: float = 0.0, path: str = PATH
) -> dict[str, str]:
    """The headers of a request with the body `{}`, signed as if it were sent so many
    seconds later.
    """
    credentials = Credentials(
        CREDENTIALS["AWS_ACCESS_KEY_ID"], CREDENTIALS["AWS_SECRET_ACCESS_KEY"], TOKEN
    )
    request = AWSRequest("POST", aws.url + path, {"X-Amz-Security-Token": TOKEN}, b"{}")
    signer = SigV4Auth(credentials, service, REGION)
    request.context["timestamp"] = (datetime.now(UTC) + timedelta(seconds=late_s)).strftime(
        "%Y%m%dT%H%M%SZ"
    )
    request.headers["X-Amz-Date"] = request.context["timestamp"]
    text = signer.string_to_sign(request, signer.canonical_request(request))
    signer._inject_signature_to_request(request, signer.signature(text, request))
    return dict(request.headers.items())


def post(
    aws: Gateway, headers: dict[str, str], body: bytes = b"{}", path: str = PATH
) -> tuple[int, str | None]:
    connection = HTTPConnection("127.0.0.1", aws.port, timeout=60)
    connection.request("POST", path, body, headers)
    with connection.getresponse() as response:
        response.read()
        kind = response.getheader("x-amzn-ErrorType")

    connection.close()
    return response.status, kind


WRONG = (403, "InvalidSignatureException")
MISSING = (403, "MissingAuthenticationTokenException")


def test_a_request_signed_with_the_gateways_credentials_is_served(aws: Gateway) -> None:
    assert code(aws, aws_session_token=TOKEN) == ""
    assert code(aws, "sagemaker", aws_session_token=TOKEN) == ""


def test_another_key_or_token_is_not_recognised(aws: Gateway) -> None:
    assert code(aws, aws_session_token="other") == "UnrecognizedClientException"
    assert code(aws) == "UnrecognizedClientException"
    assert (
        code(aws, aws_access_key_id="OTHER", aws_session_token=TOKEN)
        == "UnrecognizedClientException"
    )


def test_another_secret_makes_a_wrong_signature(aws: Gateway) -> None:
    assert (
        code(aws, aws_secret_access_key="other", aws_session_token=TOKEN)
        == "InvalidSignatureException"
    )
    assert (
        code(aws, "sagemaker", aws_secret_access_key="x", aws_session_token=TOKEN)
        == "InvalidSignatureException"
    )


def test_a_request_without_a_signature_is_refused(aws: Gateway) -> None:
    assert post(aws, {}) == MISSING
    assert post(aws, {"Authorization": "Bearer x"}) == MISSING
    assert post(aws, {}, path="/endpoints/any/openai/v1/chat/completions") == MISSING

    client = boto3.client(
        "sagemaker-runtime",
        endpoint_url=aws.url,
        region_name=REGION,
        config=Config(signature_version=UNSIGNED),
    )
    with pytest.raises(ClientError, match="Missing Authentication Token"):
        client.invoke_endpoint(EndpointName="any", Body=b"{}")

    client.close()


def test_a_signature_is_good_for_one_body_path_method_and_service(aws: Gateway) -> None:
    headers = signed(aws)
    assert post(aws, headers) == (200, None)
    assert post(aws, headers, b"{ }") == WRONG
    assert post(aws, headers, path="/endpoints/other/invocations") == WRONG
    assert post(aws, headers, path=PATH + "?a=1") == WRONG
    assert post(aws, signed(aws, service="s3")) == WRONG
    assert post(aws, {**headers, "X-Amz-Content-SHA256": "UNSIGNED-PAYLOAD"}) == WRONG
    assert post(aws, {**headers, "X-Amz-Date": "today"}) == WRONG


@pytest.mark.parametrize(
    "name", ["X-Amzn-SageMaker-Target-Model", "X-Amzn-SageMaker-Session-Id", "X-Amz-Target"]
)
def test_a_header_that_was_added_to_a_signed_request_is_refused(aws: Gateway, name: str) -> None:
    assert post(aws, {**signed(aws), name: "other"}) == WRONG
    assert post(aws, {**signed(aws), "X-Amzn-Trace-Id": "Root=1"}) == (200, None), "proxies add it"


@pytest.mark.parametrize(
    ("late_s", "found"), [(290, (200, None)), (310, WRONG), (-290, (200, None)), (-310, WRONG)]
)
def test_a_signature_is_good_for_five_minutes(
    aws: Gateway, late_s: float, found: tuple[int, str | None]
) -> None:
    assert post(aws, signed(aws, late_s=late_s)) == found


def heard_of_the_head(aws: Gateway, headers: dict[str, str]) -> bytes:
    """What the gateway says to a request of which no byte of the body comes."""
    fields = {"Host": f"127.0.0.1:{aws.port}", **headers, "Content-Length": "20000000"}
    lines = [
        f"POST {PATH} HTTP/1.1",
        *(f"{name}: {value}" for name, value in fields.items()),
        "",
        "",
    ]
    with socket.create_connection(("127.0.0.1", aws.port), 5) as connection:
        connection.sendall("\r\n".join(lines).encode())
        return connection.recv(65536)


@pytest.mark.parametrize(
    ("changed", "kind"),
    [
        ({"Authorization": ""}, b"MissingAuthenticationTokenException"),
        ({"X-Amz-Security-Token": "other"}, b"UnrecognizedClientException"),
        ({"X-Amz-Date": "20200101T000000Z"}, b"InvalidSignatureException"),
        ({"X-Amz-Target": "other"}, b"InvalidSignatureException"),
        ({"X-Amz-Content-SHA256": "0" * 64}, b"InvalidSignatureException"),
        ({"X-Amz-Content-SHA256": "UNSIGNED-PAYLOAD"}, b"InvalidSignatureException"),
    ],
)
def test_what_the_head_shows_is_refused_before_a_byte_of_the_body_is_read(
    aws: Gateway, changed: dict[str, str], kind: bytes
) -> None:
    answer = heard_of_the_head(aws, {**signed(aws), **changed})
    assert answer.startswith(b"HTTP/1.1 403 ") and kind in answer


def test_a_digest_in_the_head_is_of_the_body_that_comes(aws: Gateway) -> None:
    digest = {"X-Amz-Content-SHA256": sha256(b"{}").hexdigest()}
    assert post(aws, {**signed(aws), **digest}) == (200, None)
    assert post(aws, {**signed(aws), **digest}, b"{ }") == WRONG


def test_names_that_need_escapes_and_queries_are_signed_as_they_stand(aws: Gateway) -> None:
    path = "/endpoints/a%20b/invocations?b=2&a=%2F"
    # A name with a space
    assert post(aws, signed(aws, path=path), path=path) == (
        400,
        "ValidationError",
    )


def test_a_request_that_is_refused_reaches_no_container(
    aws: Gateway, container: ScriptedContainer
) -> None:
    num_before = len(container.seen)
    post(aws, {})
    assert len(container.seen) == num_before


def test_without_credentials_the_gateway_does_not_start() -> None:
    environ = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}
    with pytest.raises(AssertionError, match="--check-signatures needs AWS_ACCESS_KEY_ID"):
        with gateway("--check-signatures", environ=environ):
            pass


def test_without_botocore_the_gateway_names_the_extra_and_needs_it_for_signatures_only(
    tmp_path: Path,
) -> None:
    (tmp_path / "botocore.py").write_text(
        "raise ModuleNotFoundError('No module named botocore', name='botocore')\n"
    )
    environ = {**ENVIRON, "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"}
    with pytest.raises(AssertionError, match="pip install boto3"):
        with gateway("--check-signatures", environ=environ):
            pass

    with gateway(environ=environ) as aws:
        assert aws.port
