"""AWS's own client at a gateway process, in front of scripted containers and of whole servers with
the echo engine.
"""

from __future__ import annotations

import json
import random
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from http.client import HTTPConnection, HTTPResponse, IncompleteRead
from typing import Any

import pytest
from botocore.eventstream import EventStreamBuffer
from botocore.exceptions import ClientError, EventStreamError
from hypothesis import given, settings, strategies as st

from lmi.gateway.eventstream import failure, part
from lmi.gateway.worker import error_of
from lmi.http.refusals import Refusal
from tests import machine
from tests.gateway.gateways import (
    READY,
    TIMEOUT_S,
    Gateway,
    Script,
    ScriptedContainer,
    Talk,
    chunked,
    gateway,
    scripted,
    then_silent,
    whole,
)
from tests.served import Server, resident_bytes, serve
from tests.system.container import free_port, wait_until, write_model

MODES = ("as-is", "coalesce", "split")
ANSWER = b'{"generated_text": "fox"}\n'
NUM_STREAMS = 400
# Of the slow server
STEP_S = 0.1
Both = tuple[Gateway, ScriptedContainer]
Modes = tuple[ScriptedContainer, dict[str, Gateway]]


@contextmanager
def before(script: Script, *flags: str, ping: Script = READY) -> Iterator[Both]:
    """A gateway before a scripted container."""
    with scripted(script, ping) as container, gateway("--endpoint", container.url, *flags) as aws:
        yield aws, container


@pytest.fixture(scope="module")
def shared() -> Iterator[Both]:
    with before(whole(b"")) as both:
        yield both


@pytest.fixture
def plain(shared: Both) -> Both:
    """A gateway without flags before a container whose script is the test's."""
    _, container = shared
    container.script = whole(ANSWER, 200, "Content-Type: application/json")
    container.seen.clear()
    container.left.clear()
    return shared


@pytest.fixture(scope="module")
def modes() -> Iterator[Modes]:
    """A gateway in each mode, before one container."""
    with ExitStack() as stack:
        container = stack.enter_context(scripted(chunked()))
        flags = ("--endpoint", container.url, "--parts")
        yield container, {mode: stack.enter_context(gateway(*flags, mode)) for mode in MODES}


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = write_model(tmp_path_factory.mktemp("fast"))
    with serve(
        folder, "option.rolling_batch=echo", "option.echo_step_ms=2", "frontend_workers=1"
    ) as server:
        yield server


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = write_model(tmp_path_factory.mktemp("slow"))
    step = f"option.echo_step_ms={STEP_S * 1000:g}"
    with serve(folder, "option.rolling_batch=echo", step, "frontend_workers=1") as server:
        yield server


@contextmanager
def fails(code: str, status: int) -> Iterator[dict[str, Any]]:
    """The block raises an error of that class and status. Yields the response, which has its
    members afterwards.
    """
    response: dict[str, Any] = {}
    with pytest.raises(ClientError) as caught:
        yield response

    response |= caught.value.response
    assert response["Error"]["Code"] == code
    assert response["ResponseMetadata"]["HTTPStatusCode"] == status


def request(
    aws: Gateway, method: str, path: str, body: bytes = b"", **headers: str
) -> tuple[HTTPResponse, bytes]:
    """A request as no client of AWS sends it."""
    with closing(HTTPConnection("127.0.0.1", aws.port, timeout=60)) as connection:
        connection.request(
            method, path, body, {name.replace("_", "-"): value for name, value in headers.items()}
        )
        with connection.getresponse() as response:
            return response, response.read()


def frames(aws: Gateway) -> list[dict[str, Any]]:
    """Every frame of a stream as it stands on the wire."""
    _, body = request(aws, "POST", "/endpoints/any/invocations-response-stream", b"{}")
    buffer = EventStreamBuffer()
    buffer.add_data(body)
    return [event.to_response_dict() for event in buffer]


# Headers.


def test_a_container_gets_the_headers_that_are_for_it_and_a_client_those_of_the_api(
    plain: Both,
) -> None:
    answer = whole(
        ANSWER,
        200,
        "Content-Type: application/json",
        "X-Amzn-SageMaker-Custom-Attributes: seen=1",
        "X-Amzn-SageMaker-Closed-Session-Id: abc",
        "X-Amzn-SageMaker-New-Session-Id: def; Expires=2030-01-01T00:00:00Z",
        "Set-Cookie: a=b",
        "X-Request-Id: 5",
    )
    aws, container = plain
    container.script = answer
    got = aws.invoke(
        b"body",
        ContentType="text/plain",
        Accept="text/x",
        CustomAttributes="route=/a; b=1",
        InferenceId="id 7",
        SessionId="abc",
        TargetVariant="AllTraffic",
        TargetContainerHostname="first",
        InferenceComponentName="ic",
        EnableExplanations="`true`",
        PrefixAwareId="prefix",
    )
    body = got.pop("Body").read()
    [request] = container.seen

    assert (request.method, request.path, request.body) == ("POST", "/invocations", b"body")
    assert dict(request.headers) == {
        "Host": container.url.removeprefix("http://"),
        "Content-Length": "4",
        "Content-Type": "text/plain",
        "Accept": "text/x",
        "X-Amzn-SageMaker-Custom-Attributes": "route=/a; b=1",
        "X-Amzn-SageMaker-Inference-Id": "id 7",
        "X-Amzn-SageMaker-Session-Id": "abc",
        "X-Lmi-Endpoint-Name": "any",
    }
    assert body == ANSWER

    headers = got.pop("ResponseMetadata")["HTTPHeaders"]
    assert got == {
        "ContentType": "application/json",
        "InvokedProductionVariant": "AllTraffic",
        "CustomAttributes": "seen=1",
        "ClosedSessionId": "abc",
        "NewSessionId": "def; Expires=2030-01-01T00:00:00Z",
    }
    assert headers.keys() == {
        "date",
        "content-length",
        "content-type",
        "x-content-type-options",
        "x-amzn-requestid",
        "x-amzn-invoked-production-variant",
        "x-amzn-sagemaker-custom-attributes",
        "x-amzn-sagemaker-closed-session-id",
        "x-amzn-sagemaker-new-session-id",
    }


def test_a_header_that_was_not_sent_is_not_made_up(plain: Both) -> None:
    aws, container = plain
    got = aws.invoke(b"{}")
    got["Body"].read()
    assert {name for name, _ in container.seen[-1].headers} == {
        "Host",
        "Content-Length",
        "X-Lmi-Endpoint-Name",
    }
    assert got.keys() == {"ResponseMetadata", "ContentType", "InvokedProductionVariant", "Body"}


def test_a_stream_takes_its_accept_from_the_header_of_the_api_and_gives_its_content_type_there(
    plain: Both,
) -> None:
    aws, container = plain
    container.script = chunked(ANSWER)
    got = aws.stream(
        b"{}", Accept="text/event-stream", ContentType="application/json", SessionId="abc"
    )
    assert [event["PayloadPart"]["Bytes"] for event in got["Body"]] == [ANSWER]

    request = container.seen[0]
    assert (
        request.header("Accept") == "text/event-stream"
        and request.header("Content-Type") == "application/json"
    )
    assert request.header("X-Amzn-SageMaker-Accept") is None
    assert got["ContentType"] == "application/jsonlines"
    assert (
        got["ResponseMetadata"]["HTTPHeaders"]["content-type"]
        == "application/vnd.amazon.eventstream"
    )
    assert got["InvokedProductionVariant"] == "AllTraffic"


def test_a_session_that_the_container_names_as_the_guide_says_reaches_the_client(
    plain: Both,
) -> None:
    session_header = "X-Amzn-SageMaker-Session-Id: abc; Expires=2030-01-01T00:00:00Z"
    aws, container = plain
    container.script = whole(b"", 200, session_header)
    assert (
        aws.invoke(SessionId="NEW_SESSION")["NewSessionId"] == "abc; Expires=2030-01-01T00:00:00Z"
    )
    assert container.seen[0].header("X-Amzn-SageMaker-Session-Id") == "NEW_SESSION"


def test_a_component_is_an_adapter_under_its_own_name() -> None:
    flags = (
        "--component",
        "sql=adapter-1",
        "--component",
        "only/sql=adapter-2",
        "--component",
        "base",
    )
    with before(whole(ANSWER), *flags) as (aws, container):
        for endpoint, component in (("any", "sql"), ("only", "sql"), ("any", "base")):
            aws.invoke(endpoint=endpoint, InferenceComponentName=component)["Body"].read()

        request(
            aws,
            "POST",
            "/endpoints/only/inference-components/sql/openai/v1/chat/completions",
            b"{}",
        )
        with fails("ValidationError", 400) as error:
            aws.invoke(InferenceComponentName="other")

        assert error["Error"]["Message"] == "Inference Component other of endpoint any not found."

    names = ("X-Amzn-SageMaker-Adapter-Identifier", "X-Amzn-SageMaker-Adapter-Alias")
    assert [tuple(map(request_seen.header, names)) for request_seen in container.seen] == [
        ("adapter-1", "sql"),
        ("adapter-2", "sql"),
        (None, None),
        ("adapter-2", "sql"),
    ]
    assert all(
        request_seen.header("X-Amzn-SageMaker-Inference-Component") is None
        for request_seen in container.seen
    )


def test_two_endpoints_have_their_own_containers() -> None:
    with ExitStack() as stack:
        left_container, right = (
            stack.enter_context(scripted(whole(name))) for name in (b"left", b"right")
        )
        aws = stack.enter_context(
            gateway("--endpoint", f"left={left_container.url}", "--endpoint", f"right={right.url}")
        )

        assert aws.invoke(endpoint="left")["Body"].read() == b"left"
        assert aws.invoke(endpoint="right")["Body"].read() == b"right"

        with fails("ValidationError", 400) as error:
            aws.invoke(endpoint="middle")

        assert error["Error"]["Message"] == "Endpoint middle of account 000000000000 not found."

        listed_endpoints = aws.control.list_endpoints(SortBy="Name", SortOrder="Ascending")[
            "Endpoints"
        ]
        assert [endpoint["EndpointName"] for endpoint in listed_endpoints] == ["left", "right"]


# Errors.


@pytest.mark.parametrize(
    ("status", "side"), [(302, "server"), (400, "client"), (404, "client"), (503, "server")]
)
def test_an_error_of_the_container_is_a_model_error_with_its_status_and_body(
    plain: Both, status: int, side: str
) -> None:
    body = '{"error": "inputs must be a text — not 5", "code": 424}'
    aws, container = plain
    container.script = whole(body.encode(), status)
    for call in (aws.invoke, aws.stream):
        with fails("ModelError", 424) as error:
            call(b"{}")

        reason = (
            f'Received {side} error ({status}) from primary with message "{body}". See the '
            f"container's log."
        )

        assert error["Error"]["Message"] == error["Message"] == reason
        assert (error["OriginalStatusCode"], error["OriginalMessage"]) == (status, body)
        assert error["LogStreamArn"] == (
            "arn:aws:logs:eu-central-1:000000000000:log-group:/aws/sagemaker/Endpoints/any"
        )


def test_a_long_error_is_cut_to_2048_characters(plain: Both) -> None:
    aws, container = plain
    container.script = whole("é".encode() * 900_000, 500)
    with fails("ModelError", 424) as error:
        aws.invoke()

    assert len(error["OriginalMessage"]) == len(error["Message"]) == 2048
    assert error["Message"].endswith("…\". See the container's log.")


@pytest.mark.parametrize(
    "script", [lambda talk: None, chunked(b"some", end=b"")], ids=["nothing", "half an answer"]
)
def test_a_plain_call_that_takes_too_long_is_a_model_error_of_status_0(script: Script) -> None:
    with before(then_silent(script), "--timeout", "2") as (aws, container):
        with fails("ModelError", 424) as error:
            aws.invoke()

        assert container.left.wait(60)

    assert error["OriginalStatusCode"] == 0
    assert error["OriginalMessage"] == (
        "Your invocation timed out while waiting for a response from container primary."
    )


def test_a_stream_without_a_first_byte_in_time_is_a_model_error_of_status_0() -> None:
    with before(then_silent(chunked(end=b"")), "--stream-timeout", "2") as (aws, container):
        with fails("ModelError", 424) as error:
            aws.stream()

        assert container.left.wait(60)

    assert (error["OriginalStatusCode"], error["OriginalMessage"][:26]) == (
        0,
        "Your invocation timed out ",
    )


def test_a_stream_over_its_time_ends_with_an_exception_after_what_came() -> None:
    silent = then_silent(chunked(b"some", b"thing", end=b""))
    with before(silent, "--stream-timeout", "2", "--parts", "coalesce") as (aws, container):
        *parts, last = frames(aws)
        assert container.left.wait(60)
        with pytest.raises(
            EventStreamError, match="did not complete sending the inference response"
        ):
            aws.parts()

    assert b"".join(part["body"] for part in parts) == b"something"
    assert last["headers"][":exception-type"] == "ModelStreamError"
    assert json.loads(last["body"]) == {
        "Message": (
            "Your model primary did not complete sending the inference response in the "
            "allotted time."
        ),
        "ErrorCode": "ModelInvocationTimeExceeded",
    }


@pytest.mark.parametrize("mode", MODES)
def test_a_stream_that_the_container_cuts_ends_with_an_exception_after_what_came(
    modes: Modes, mode: str
) -> None:
    container, gateways = modes
    container.script = chunked(b"some", b"thing", end=b"5\r\nhal")
    *parts, last = frames(gateways[mode])
    assert b"".join(part["body"] for part in parts) == b"somethinghal"
    assert json.loads(last["body"])["ErrorCode"] == "StreamBroken"


def test_a_plain_answer_that_the_container_cuts_is_a_model_error_and_never_half_an_answer(
    plain: Both,
) -> None:
    aws, container = plain
    container.script = chunked(b"some", end=b"")
    with fails("ModelError", 424) as error:
        aws.invoke()

    assert (
        error["OriginalStatusCode"] == 0
        and "did not complete its answer" in error["OriginalMessage"]
    )


def test_an_error_record_of_the_model_is_data_and_the_stream_ends_well(plain: Both) -> None:
    record = b'{"error": "out of memory", "code": 507}\n'
    aws, container = plain
    container.script = chunked(b'{"token": {}}\n', record)
    assert aws.parts() == [b'{"token": {}}\n', record]


def test_an_empty_stream_ends_well(plain: Both) -> None:
    aws, container = plain
    container.script = chunked()
    assert aws.parts() == []


@pytest.mark.parametrize(
    "script",
    [
        lambda talk: None,
        lambda talk: talk.send(b"HTTP/1.1 200"),
        lambda talk: talk.send(b"hello\r\n\r\n"),
    ],
    ids=["silence", "half a head", "no HTTP"],
)
def test_a_connection_lost_before_the_head_is_service_unavailable(
    plain: Both, script: Script
) -> None:
    aws, container = plain
    container.script = script
    for call in (aws.invoke, aws.stream):
        with fails("ServiceUnavailable", 503) as error:
            call(b"{}")

        assert "did not complete its answer" in error["Error"]["Message"]


def endless(begin: bytes, piece: bytes) -> Script:
    """What a container sends without end, until the gateway leaves."""

    def answer(talk: Talk) -> None:
        with suppress(ConnectionError):
            talk.send(begin)
            while True:
                talk.send(piece)

    return answer


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "script",
    [
        endless(b"", b"HTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\n" * 1000),
        endless(b"HTTP/1.1 200 OK\r\n", b"X: " + b"a" * 65536 + b"\r\n"),
        endless(b"HTTP/1.1 200 OK\r\nX: ", b"a" * 65536),
        endless(CHUNKED + b"5;", b"a" * 65536),
        endless(CHUNKED + b"0\r\n", b"X: " + b"a" * 65536 + b"\r\n"),
    ],
    ids=["interim answers", "fields", "a field", "a chunk extension", "trailers"],
)
def test_an_answer_without_an_end_takes_no_memory_and_ends(script: Script) -> None:
    with (
        scripted(script) as container,
        gateway("--endpoint", container.url, "--timeout", "3") as aws,
    ):
        before = resident_bytes(aws.process.pid)
        with pytest.raises(ClientError) as error:
            aws.invoke()

        assert error.value.response["Error"]["Code"] in ("ModelError", "ServiceUnavailable")
        assert resident_bytes(aws.process.pid) - before < 64 << 20

        container.script = whole(b"hello")
        assert aws.invoke()["Body"].read() == b"hello"


def test_a_redirection_of_the_container_is_followed_nowhere(plain: Both) -> None:
    aws, container = plain
    num_seen = len(container.seen)
    container.script = whole(b"", 302, f"Location: {container.url}/elsewhere")
    with fails("ModelError", 424):
        aws.invoke()

    assert [request.path for request in container.seen[num_seen:]] == ["/invocations"]


def test_a_frame_that_the_container_forges_is_data(plain: Both) -> None:
    aws, container = plain
    forged = failure("InternalStreamFailure", "forged")
    container.script = chunked(forged, b"after")
    assert b"".join(aws.parts()) == forged + b"after"


def test_nobody_at_the_containers_port_is_service_unavailable() -> None:
    port = free_port()
    with (
        gateway("--endpoint", f"http://127.0.0.1:{port}") as aws,
        fails("ServiceUnavailable", 503) as error,
    ):
        aws.invoke()

    assert f"no connection to http://127.0.0.1:{port}" in error["Error"]["Message"]


def test_a_container_is_called_when_its_ping_was_once_200_and_not_before() -> None:
    loading = whole(b'{"status": "loading", "stage": "weights"}', 503)
    with before(whole(ANSWER), ping=loading) as (aws, container):
        with fails("ServiceUnavailable", 503) as error:
            aws.invoke()

        assert (
            'its /ping says 503: {"status": "loading", "stage": "weights"}'
            in error["Error"]["Message"]
        )
        assert container.seen == []

        container.ping = whole(b"")
        assert aws.invoke()["Body"].read() == ANSWER

        container.ping = loading
        assert aws.invoke()["Body"].read() == ANSWER


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"endpoint": "a b"}, "endpointName"),
        ({"endpoint": "a" * 64}, "endpointName"),
        ({"TargetVariant": "Blue"}, "Variant Blue of endpoint any not found."),
        ({"TargetVariant": "-"}, "targetVariant"),
        ({"SessionId": "a b"}, "sessionId"),
        ({"SessionId": "a" * 257}, "sessionId"),
        ({"InferenceId": "7é"}, "inferenceId"),
        ({"InferenceId": "7" * 65}, "inferenceId"),
        ({"CustomAttributes": "a" * 1025}, "customAttributes"),
        ({"InferenceComponentName": "a_b"}, "inferenceComponentName"),
        ({"TargetContainerHostname": "a.b"}, "targetContainerHostname"),
        ({"PrefixAwareId": "a" * 65}, "prefixAwareId"),
        ({"EnableExplanations": "a" * 65}, "enableExplanations"),
        ({"ContentType": "a" * 1025}, "contentType"),
        ({"Accept": "a" * 1025}, "accept"),
        ({"TargetModel": "a.tar.gz"}, "is not a multi-model endpoint"),
    ],
)
def test_a_value_against_its_rule_is_refused_by_name_and_reaches_no_container(
    plain: Both, parameters: dict[str, str], named: str
) -> None:
    aws, container = plain
    num_before = len(container.seen)
    with fails("ValidationError", 400) as error:
        aws.invoke(**parameters)

    assert named in error["Error"]["Message"]
    assert len(container.seen) == num_before


def test_a_stream_cannot_open_a_session(plain: Both) -> None:
    with fails("ValidationError", 400) as error:
        plain[0].stream(SessionId="NEW_SESSION")

    assert "Value 'NEW_SESSION' at 'sessionId'" in error["Error"]["Message"]


def test_a_body_over_the_limit_is_413() -> None:
    with before(whole(ANSWER), "--max-body", "1000") as (aws, container):
        aws.invoke(b"x" * 1000)["Body"].read()
        for call in (aws.invoke, aws.stream):
            with fails("ValidationError", 413) as error:
                call(b"x" * 1001)

            assert "1000 bytes" in error["Error"]["Message"]

    assert len(container.seen) == 1


def test_a_large_body_passes_with_a_warning(plain: Both) -> None:
    aws, container = plain
    aws.invoke(b"x" * 6291457)["Body"].read()
    assert len(container.seen[-1].body) == 6291457
    assert aws.says("6291457 bytes")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/endpoints/any/invocations"),
        ("POST", "/endpoints/any/invocations-bidirectional-stream"),
        ("POST", "/endpoints/any/other"),
        ("POST", "/endpoints//invocations"),
        ("POST", "/endpoints/any/openai/v1/models"),
        ("POST", "/inference-routers/any/invocations"),
        ("GET", "/"),
        ("POST", "/ping"),
    ],
)
def test_every_other_path_is_an_unknown_operation(plain: Both, method: str, path: str) -> None:
    response, body = request(plain[0], method, path)
    assert (response.status, response.getheader("x-amzn-ErrorType")) == (
        404,
        "UnknownOperationException",
    )
    assert response.getheader("Content-Type") == "application/json"
    assert json.loads(body).keys() == {"Message"}


def test_the_gateway_is_healthy_by_itself() -> None:
    with gateway("--endpoint", f"http://127.0.0.1:{free_port()}") as aws:
        for method in ("GET", "HEAD"):
            response, body = request(aws, method, "/ping")
            assert (response.status, body) == (200, b"")


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"\x16\x03\x01 TLS\r\n\r\n", 400),
        (b"GET /ping HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nExpect: more\r\n\r\n", 417),
        (b"POST / HTTP/1.1\r\nHost: a\r\nA: " + b"a" * 70_000 + b"\r\n\r\n", 431),
        (b"GET /ping HTTP/3.1\r\nHost: a\r\n\r\n", 505),
    ],
)
def test_what_is_refused_below_http_has_the_form_of_the_api_too(
    plain: Both, head: bytes, status: int
) -> None:
    with socket.create_connection(("127.0.0.1", plain[0].port), timeout=60) as connection:
        connection.sendall(head)
        response = HTTPResponse(connection)
        response.begin()
        body = json.loads(response.read())

    assert (response.status, response.getheader("x-amzn-ErrorType")) == (status, "ValidationError")
    assert response.getheader("x-amzn-RequestId") and list(body) == ["Message"]


def test_a_request_that_comes_too_slowly_has_aws_class_for_it() -> None:
    error = error_of(Refusal(408, "the request body came too slowly"))
    assert (error.kind, error.status) == ("RequestTimeoutException", 408)


@pytest.mark.parametrize(
    "headers", [{"Origin": "https://evil.example"}, {"Host": "rebound.example"}]
)
def test_a_page_of_another_origin_reaches_no_container(
    plain: Both, headers: dict[str, str]
) -> None:
    aws, container = plain
    num_seen = len(container.seen)
    response, body = request(aws, "POST", "/endpoints/any/invocations", b"{}", **headers)
    assert (response.status, response.getheader("x-amzn-ErrorType")) == (
        403,
        "AccessDeniedException",
    )
    assert json.loads(body)["Message"].startswith(f"{next(iter(headers))} must be ")
    assert len(container.seen) == num_seen


def test_a_client_of_aws_reads_the_reason_of_a_head_that_is_too_large(plain: Both) -> None:
    with fails("ValidationError", 431) as error:
        plain[0].invoke(CustomAttributes="a" * 70_000)

    assert error["Error"]["Message"] == "a request head has at most 65536 bytes"


def test_what_only_an_asynchronous_endpoint_would_refuse_is_a_warning(plain: Both) -> None:
    aws, container = plain
    container.script = chunked(b"some", b"thing")
    assert aws.invoke()["Body"].read() == b"something"
    assert aws.says("the container's answer is chunked")
    container.script = whole(b"", 200, f"X-Long: {'x' * 4090}")
    aws.invoke()["Body"].read()
    assert aws.says("bytes of headers")


# Streams.


@settings(max_examples=40)
@given(st.lists(st.binary(min_size=1, max_size=300), min_size=1, max_size=12))
def test_every_mode_keeps_the_bytes_and_as_is_the_chunks(modes: Modes, chunks: list[bytes]) -> None:
    container, gateways = modes
    container.script = chunked(*chunks)
    parts_of_modes = {mode: aws.parts() for mode, aws in gateways.items()}

    assert parts_of_modes["as-is"] == chunks
    assert {b"".join(parts) for parts in parts_of_modes.values()} == {b"".join(chunks)}
    assert all(all(parts) for parts in parts_of_modes.values())
    assert {len(part) for part in parts_of_modes["split"][:-1]} <= {7}


@pytest.mark.parametrize("mode", ["as-is", "coalesce"])
def test_a_chunk_of_megabytes_comes_in_parts_of_at_most_one(modes: Modes, mode: str) -> None:
    container, gateways = modes
    chunk = random.Random(0).randbytes(5 << 19)
    container.script = chunked(chunk, b"end")
    parts = gateways[mode].parts()
    assert b"".join(parts) == chunk + b"end"
    assert max(map(len, parts)) <= 1 << 20


def test_an_answer_with_a_length_or_until_the_end_of_the_connection_is_a_stream_too(
    modes: Modes,
) -> None:
    container, gateways = modes
    for script in (whole(ANSWER), lambda talk: talk.send(b"HTTP/1.1 200 OK\r\n\r\n" + ANSWER)):
        container.script = script
        assert {b"".join(aws.parts()) for aws in gateways.values()} == {ANSWER}


def test_each_frame_is_one_write_and_so_one_chunk_of_the_response(plain: Both) -> None:
    aws, container = plain
    container.script = chunked(b"hi", b"hi")
    with socket.create_connection(("127.0.0.1", aws.port), timeout=60) as connection:
        connection.sendall(
            b"POST /endpoints/any/invocations-response-stream HTTP/1.1\r\nHost: a\r\n"
        )
        connection.sendall(b"Content-Length: 2\r\nConnection: close\r\n\r\n{}")
        received = b"".join(iter(lambda: connection.recv(65536), b""))

    frame = b"6b\r\n" + part(b"hi") + b"\r\n"
    assert received.partition(b"\r\n\r\n")[2] == 2 * frame + b"0\r\n\r\n"


def test_each_part_comes_when_its_chunk_does(plain: Both) -> None:
    aws, container = plain
    is_read = threading.Semaphore(0)

    def answer(talk: Any) -> None:
        talk.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for number in range(3):
            talk.send(b"1\r\n%d\r\n" % number)
            assert is_read.acquire(timeout=TIMEOUT_S), "the part did not come before the next chunk"

        talk.send(b"0\r\n\r\n")

    container.script = answer
    parts = []
    for event in aws.stream()["Body"]:
        parts.append(event["PayloadPart"]["Bytes"])
        is_read.release()

    assert parts == [b"0", b"1", b"2"]


def test_an_answer_that_nobody_reads_stays_in_the_container(plain: Both) -> None:
    num_sent = 0

    def flood(talk: Any) -> None:
        nonlocal num_sent
        talk.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        chunk = b"10000\r\n" + bytes(1 << 16) + b"\r\n"
        while num_sent < 4096:
            talk.send(chunk)
            num_sent += 1

    aws, container = plain
    container.script = flood
    stream = aws.stream()["Body"]
    next(iter(stream))
    last = -1

    def stands_still() -> bool:
        nonlocal last
        last, before_it = num_sent, last
        time.sleep(0.3)
        return num_sent == last == before_it

    wait_until(stands_still, "the container waits for the client")
    stream.close()

    # Of 4096 chunks of 64 KiB
    assert num_sent < 1024


def random_body(chance: random.Random) -> bytes:
    text = "".join(chance.choice('abc xyz.\n"\\é水🦊') for _ in range(chance.randint(1, 24)))
    parameters = {"max_new_tokens": chance.randint(1, 24)}
    return json.dumps({"inputs": text, "parameters": parameters, "stream": True}).encode()


def test_random_streams_have_the_records_of_the_containers_own_as_parts(fast: Server) -> None:
    chance = random.Random(1)
    bodies = [random_body(chance) for _ in range(NUM_STREAMS)]
    with (
        gateway("--endpoint", f"http://127.0.0.1:{fast.port}") as aws,
        ThreadPoolExecutor(32) as pool,
    ):
        runtime = aws.runtime  # made once
        direct_bodies = list(pool.map(lambda body: fast.post(body).body, bodies))
        through = list(pool.map(aws.parts, bodies))

        assert runtime is aws.runtime

    assert through == [body.splitlines(True) for body in direct_bodies]


def test_a_whole_answer_is_the_containers_own(fast: Server) -> None:
    body = {"inputs": "The quick", "parameters": {"max_new_tokens": 12}}
    with gateway("--endpoint", f"http://127.0.0.1:{fast.port}") as aws:
        assert aws.invoke(json.dumps(body).encode())["Body"].read() == fast.post(body).body

        with fails("ModelError", 424) as error:
            aws.invoke(b'{"inputs": 5}')

        assert error["OriginalMessage"] == fast.post({"inputs": 5}).body.decode()


# Clients that leave.

LONG = b'{"inputs": "a fox", "parameters": {"max_new_tokens": 5000}, "stream": %s}'


@contextmanager
def ends_within_two_steps(server: Server) -> Iterator[None]:
    """The block leaves its only request, whose tokens stop with the step after the one
    that runs.
    """
    wait_until(server.is_idle, "the server is idle")
    tokens_before = server.metrics()["lmi_generated_tokens_total"]
    steps_before = server.metrics()["lmi_engine_steps_total"]
    yield
    lost_s = machine.seconds_lost()
    steps_at_end = server.metrics()["lmi_engine_steps_total"]
    wait_until(server.is_idle, "the request is over")
    num_tokens = server.metrics()["lmi_generated_tokens_total"] - tokens_before
    # The engine steps while the others wait for a core
    num_more = 2 + (machine.seconds_lost() - lost_s) / STEP_S
    assert 0 < num_tokens <= steps_at_end - steps_before + num_more
    assert server.metrics()["lmi_engine_steps_total"] <= steps_at_end + num_more


@pytest.mark.parametrize("mode", MODES)
def test_a_client_that_leaves_its_stream_stops_generation(slow: Server, mode: str) -> None:
    with gateway("--endpoint", f"http://127.0.0.1:{slow.port}", "--parts", mode) as aws:
        aws.invoke(b'{"inputs": "warm", "parameters": {"max_new_tokens": 1}}')["Body"].read()
        with ends_within_two_steps(slow):
            stream = aws.stream(LONG % b"true")["Body"]
            bytes_read = b""
            for event in stream:
                bytes_read += event["PayloadPart"]["Bytes"]
                if bytes_read.count(b"\n") >= 3:
                    break

            stream.close()

        assert not aws.says("failed in the gateway")


@pytest.mark.parametrize("path", ["invocations", "openai/v1/chat/completions"])
def test_a_client_that_leaves_a_whole_answer_closes_the_containers_connection(
    plain: Both, path: str
) -> None:
    aws, container = plain
    container.script = then_silent(lambda talk: None)
    connection = HTTPConnection("127.0.0.1", aws.port)
    connection.request("POST", f"/endpoints/any/{path}", b"{}")
    wait_until(lambda: container.seen, "the container got the request")
    assert not container.left.is_set()

    connection.close()
    assert container.left.wait(60)

    wait_until(
        lambda: any(line.get("status") == 499 for line in aws.log_lines()),
        "the log says that it left",
    )


# OpenAI's path.


def chat(aws: Gateway, endpoint: str = "any", **headers: str) -> tuple[HTTPResponse, bytes]:
    return request(
        aws,
        "POST",
        f"/endpoints/{endpoint}/openai/v1/chat/completions",
        b'{"messages": []}',
        **headers,
    )


def test_openais_path_gives_status_and_bytes_and_drops_the_bearer(plain: Both) -> None:
    events = (b'data: {"id": 1}\n\n', b"data: [DONE]\n\n")
    aws, container = plain
    container.script = chunked(*events)
    response, body = chat(
        aws, Authorization="Bearer sagemaker-api-key-x", Content_Type="application/json"
    )

    assert (response.status, body) == (200, b"".join(events))
    assert response.getheader("Content-Type") == "application/jsonlines"

    container.script = whole(
        b'{"error": {"message": "no"}}', 404, "Content-Type: application/json", "X-Other: 1"
    )
    response, body = chat(aws)

    assert (response.status, body) == (404, b'{"error": {"message": "no"}}')
    assert response.getheader("X-Other") is None and response.getheader("Content-Length") == "28"

    request = container.seen[0]
    assert request.path == "/v1/chat/completions" and request.body == b'{"messages": []}'
    assert {name for name, _ in request.headers} == {
        "Host",
        "Content-Length",
        "Content-Type",
        "X-Lmi-Endpoint-Name",
    }


def test_openais_path_checks_the_names_in_it(plain: Both) -> None:
    for path in (
        "a%0d%0ab/openai",
        "any/inference-components/a%0d%0ab/openai",
        "any/inference-components/a_b/openai",
    ):
        response, body = request(plain[0], "POST", f"/endpoints/{path}/v1/chat/completions", b"{}")
        assert (response.status, response.getheader("x-amzn-ErrorType")) == (400, "ValidationError")
        assert "failed to satisfy constraint" in json.loads(body)["Message"]

    assert plain[1].seen == []


def test_openais_stream_that_the_container_cuts_is_cut(plain: Both) -> None:
    aws, container = plain
    container.script = chunked(b"data: {}\n\n", end=b"")
    with pytest.raises(IncompleteRead):
        chat(aws)

    assert aws.says("was cut")


def test_openais_path_answers_with_the_errors_of_the_real_server(fast: Server) -> None:
    with gateway("--endpoint", f"http://127.0.0.1:{fast.port}") as aws:
        response, body = chat(aws)

    direct = fast.post({"messages": []}, "/v1/chat/completions")
    assert (response.status, body) == (direct.status, direct.body)
    assert response.getheader("Content-Type") == direct.headers["content-type"]


# DescribeEndpoint and ListEndpoints.


def test_an_endpoint_is_described_as_aws_does(plain: Both) -> None:
    aws, _ = plain
    described = aws.control.describe_endpoint(EndpointName="mine")
    metadata = described.pop("ResponseMetadata")

    assert metadata["HTTPHeaders"]["content-type"] == "application/x-amz-json-1.1"
    assert described.pop("CreationTime") == described.pop("LastModifiedTime")
    assert described == {
        "EndpointName": "mine",
        "EndpointArn": "arn:aws:sagemaker:eu-central-1:000000000000:endpoint/mine",
        "EndpointConfigName": "mine",
        "EndpointStatus": "InService",
        "ProductionVariants": [
            {
                "VariantName": "AllTraffic",
                "CurrentWeight": 1.0,
                "DesiredWeight": 1.0,
                "CurrentInstanceCount": 1,
                "DesiredInstanceCount": 1,
            }
        ],
    }


def test_the_status_follows_the_ping_and_the_waiter_waits_for_it() -> None:
    with before(whole(b""), ping=whole(b"loading", 503)) as (aws, container):
        assert aws.control.describe_endpoint(EndpointName="a")["EndpointStatus"] == "Creating"

        container.ping = whole(b"the weights are broken", 500)
        failed = aws.control.describe_endpoint(EndpointName="a")

        assert (failed["EndpointStatus"], failed["FailureReason"]) == (
            "Failed",
            "the weights are broken",
        )

        num_pings = 0

        def third_time_ready(talk: Any) -> None:
            nonlocal num_pings
            num_pings += 1
            whole(b"", 200 if num_pings >= 3 else 503)(talk)

        container.ping = third_time_ready
        config = {"Delay": 1, "MaxAttempts": 10}
        aws.control.get_waiter("endpoint_in_service").wait(EndpointName="a", WaiterConfig=config)
        assert num_pings == 3

        container.ping = whole(b"", 503)
        assert aws.control.describe_endpoint(EndpointName="a")["EndpointStatus"] == "InService"


def test_an_unknown_endpoint_cannot_be_described(plain: Both) -> None:
    with (
        gateway("--endpoint", f"one={plain[1].url}") as aws,
        fails("ValidationException", 400) as error,
    ):
        aws.control.describe_endpoint(EndpointName="two")

    assert error["Error"]["Message"] == "Could not find endpoint 'two'."


def test_endpoints_are_listed_by_pages_order_and_filters(plain: Both) -> None:
    flags = [
        word for name in ("b-1", "a-2", "c-1") for word in ("--endpoint", f"{name}={plain[1].url}")
    ]
    dead = f"dead=http://127.0.0.1:{free_port()}"
    with gateway(*flags, "--endpoint", dead) as aws:
        pages = aws.control.get_paginator("list_endpoints")

        def names(**asked: Any) -> list[str]:
            answers = pages.paginate(PaginationConfig={"PageSize": 2}, **asked)
            return [
                endpoint["EndpointName"] for answer in answers for endpoint in answer["Endpoints"]
            ]

        assert names(SortBy="Name", SortOrder="Ascending") == ["a-2", "b-1", "c-1", "dead"]
        assert names(SortBy="Name") == ["dead", "c-1", "b-1", "a-2"]
        assert names(SortBy="Name", NameContains="-1") == ["c-1", "b-1"]
        assert names(StatusEquals="Creating") == ["dead"]
        assert names(CreationTimeBefore=1) == []

        with fails("ValidationException", 400) as error:
            aws.control.list_endpoints(SortBy="Size")

        assert "SortBy" in error["Error"]["Message"]


def test_other_operations_of_the_control_plane_are_unknown(plain: Both) -> None:
    with fails("UnknownOperationException", 400) as error:
        plain[0].control.delete_endpoint(EndpointName="mine")

    assert "SageMaker.DeleteEndpoint" in error["Error"]["Message"]


# The process.


def test_a_signal_ends_it_after_its_requests() -> None:
    with before(chunked(b"a", b"b", pause_s=0.5)) as (aws, _):
        stream = iter(aws.stream()["Body"])
        assert next(stream)["PayloadPart"]["Bytes"] == b"a"
        aws.process.send_signal(signal.SIGTERM)
        assert [event["PayloadPart"]["Bytes"] for event in stream] == [b"b"]
        aws.close_clients()
        assert aws.process.wait(60) == 0


def test_its_log_is_the_log_of_the_product(plain: Both) -> None:
    aws, _ = plain
    got = aws.invoke()
    got["Body"].read()
    request_id = got["ResponseMetadata"]["RequestId"]

    def lines() -> list[dict[str, Any]]:
        return [line for line in aws.log_lines() if line.get("request_id") == request_id]

    wait_until(lambda: bool(lines()), "the log has the request")
    [line] = lines()

    assert line["message"] == "POST /endpoints/any/invocations"
    assert line["role"] == "gateway" and line["status"] == 200 and line["duration_ms"] > 0
    assert re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", line["request_id"])


def test_another_host_without_signatures_is_a_warning() -> None:
    with gateway("--host", "0.0.0.0") as aws:
        assert aws.says("0.0.0.0 is no loopback address")

    with gateway() as aws:
        assert aws.log_lines() == []
