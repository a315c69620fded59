"""Streams in both directions: a client over HTTP/2 at a gateway process, and a container with a
WebSocket behind it.
"""

from __future__ import annotations

import json
import random
import signal
import ssl
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from lmi.gateway.duplex_invocation import GATEWAY_ENDS
from lmi.gateway.http2 import MAX_IDLE_FRAMES
from lmi.gateway.signatures import SIGNED_EVENTS
from tests.gateway.event_signer import EventSigner, signed_head
from tests.gateway.gateways import (
    CREDENTIALS,
    TIMEOUT_S,
    Gateway,
    gateway,
    scripted,
    then_silent,
    whole,
)
from tests.gateway.http2_client import PATH, Http2Client, event, speaks_http_1
from tests.gateway.socket_container import (
    FLOOD_MESSAGE,
    NUM_FLOOD_MESSAGES,
    STREAM,
    SocketContainer,
    socket_container,
)
from tests.machine import wait_until
from tests.served import resident_bytes

TARGET = "x-amzn-sagemaker-model-invocation-path"
QUERY = "x-amzn-sagemaker-model-query-string"
MAX_BODY_BYTES = 2 << 20
INVALID = "InputValidationError"
UNREACHABLE = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def container() -> Iterator[SocketContainer]:
    with socket_container() as running:
        yield running


@pytest.fixture(scope="module")
def plain(container: SocketContainer) -> Iterator[Gateway]:
    """A gateway that serves HTTP/2 without TLS, and checks no signatures."""
    flags = ("--endpoint", f"any={container.url}", "--endpoint", f"lost={UNREACHABLE}")
    limit = ("--max-body", str(MAX_BODY_BYTES))
    with scripted(then_silent(whole(b"no room", 503))) as full:
        endpoint = ("--endpoint", f"full={full.url}")
        with gateway(*flags, *endpoint, *limit, "--http2-port", "0") as running:
            yield running


@pytest.fixture
def client(plain: Gateway) -> Iterator[Http2Client]:
    with Http2Client(plain.http2) as connection:
        yield connection


def refusal(client: Http2Client, path: str = PATH, **headers: str) -> tuple[int, str, Any]:
    """Status, class and members of an error."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    answer = client.read_to_end(client.open(path, names))
    return answer.status, answer.headers["x-amzn-errortype"], json.loads(answer.body)


def code_of(container: SocketContainer, query: str) -> int | None:
    """The code with which the WebSocket that was opened with a query has ended."""
    return container.codes.get(f"{STREAM}?{query}")


# Messages.


def test_messages_come_back_as_what_they_were_sent_as(client: Http2Client) -> None:
    stream = client.open()
    answer = client.read_until_begun(stream)
    client.send_part(stream, "é".encode(), DataType="UTF8", P="abcdefgh")
    client.send_part(stream, b"\xff\x00", DataType="BINARY", CompletionState="COMPLETE")
    client.send_part(stream, b"without a type")
    assert client.read_parts(stream, 3) == [
        ("UTF8", "COMPLETE", "é".encode()),
        ("BINARY", "COMPLETE", b"\xff\x00"),
        ("BINARY", "COMPLETE", b"without a type"),
    ]
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/vnd.amazon.eventstream"
    assert answer.headers["x-amzn-invoked-production-variant"] == "AllTraffic"


def test_parts_of_a_message_are_frames_in_the_container(client: Http2Client) -> None:
    stream = client.open(headers={TARGET: "frames"})
    client.send_part(stream, b"a \xc3", DataType="UTF8", CompletionState="PARTIAL")
    client.send_part(stream, b"\xa9 b", DataType="UTF8", CompletionState="PARTIAL")
    client.send_part(stream, b"", DataType="UTF8")
    [(_, _, told)] = client.read_parts(stream, 1)
    assert json.loads(told) == ["a ", "é b", ""]


def test_frames_of_the_container_are_parts_and_a_long_one_is_several(client: Http2Client) -> None:
    stream = client.open(headers={TARGET: "fragments"})
    parts = client.read_to_end(stream).parts
    assert parts[:3] == [
        ("BINARY", "PARTIAL", b"one"),
        ("BINARY", "PARTIAL", b"two"),
        ("BINARY", "PARTIAL", b"three"),
    ]
    # The library of the container ends a message with a frame of its own.
    assert parts[3] == ("BINARY", "COMPLETE", b"")
    assert [(*part[:2], len(part[2])) for part in parts[4:]] == [
        ("UTF8", "PARTIAL", 1 << 20),
        ("UTF8", "COMPLETE", 1_500_000 - (1 << 20)),
    ]


def test_the_container_gets_path_query_and_session(
    client: Http2Client, container: SocketContainer
) -> None:
    stream = client.open(
        headers={
            TARGET: "frames",
            QUERY: "a=b%20c&d=1",
            "x-amzn-sagemaker-session-id": "session-1",
            "x-amzn-sagemaker-custom-attributes": "of=me",
        }
    )
    client.read_until_begun(stream)
    request = container.requests[-1]
    assert request.path == "/frames?a=b%20c&d=1"
    assert request.headers["X-Amzn-SageMaker-Session-Id"] == "session-1"
    assert request.headers["X-Amzn-SageMaker-Custom-Attributes"] == "of=me"


def test_streams_of_one_connection_are_apart(client: Http2Client) -> None:
    streams = [client.open() for _ in range(8)]
    for number, stream in enumerate(streams):
        client.send_part(stream, b"%d" % number)

    for number, stream in enumerate(streams):
        assert client.read_parts(stream, 1) == [("BINARY", "COMPLETE", b"%d" % number)]


# The end.


def test_a_client_that_ends_its_half_closes_the_websocket(
    client: Http2Client, container: SocketContainer
) -> None:
    stream = client.open(headers={QUERY: "test=half"})
    client.send_part(stream, b"last")
    client.read_parts(stream, 1)
    client.send(stream, b"", is_last=True)
    answer = client.read_to_end(stream)
    assert answer.parts == [("BINARY", "COMPLETE", b"last")]
    assert answer.is_complete
    wait_until(lambda: code_of(container, "test=half") == 1000, "the WebSocket is closed")


def test_a_container_that_closes_ends_the_answer(client: Http2Client) -> None:
    stream = client.open(headers={TARGET: "end"})
    answer = client.read_to_end(stream)
    assert answer.parts == [("UTF8", "COMPLETE", b"last words")]
    assert answer.is_complete


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("break", {"ErrorCode": "1011", "Message": "the engine is lost"}),
        ("error", {"ErrorCode": "Cuda", "Message": "out of memory"}),
        ("cut", {"ErrorCode": "1006", "Message": "The container has closed with 1006."}),
    ],
)
def test_an_error_of_the_container_is_the_last_event(
    client: Http2Client, path: str, error: dict[str, str]
) -> None:
    last = client.read_to_end(client.open(headers={TARGET: path})).events[-1]
    assert last["headers"][":exception-type"] == "ModelStreamError"
    assert json.loads(last["body"]) == error


@pytest.mark.parametrize("way", ["reset", "close"])
def test_a_client_that_goes_away_ends_the_websocket(
    client: Http2Client, container: SocketContainer, way: str
) -> None:
    query = f"test={way}"
    stream = client.open(headers={QUERY: query})
    client.send_part(stream, b"hello")
    client.read_parts(stream, 1)
    if way == "reset":
        client.h2.reset_stream(stream)
        client.flush()
    else:
        client.close()

    wait_until(lambda: code_of(container, query) == 1006, "the WebSocket is cut")


# Refused.


def test_what_is_not_there_is_refused_as_aws_does(client: Http2Client, plain: Gateway) -> None:
    status, kind, members = refusal(client, PATH.replace("any", "other"))
    assert (status, kind) == (400, INVALID)
    assert "other" in members["Message"]

    assert refusal(client, x_amzn_sagemaker_target_variant="no")[:2] == (400, INVALID)
    assert refusal(client, **{TARGET: "/slash"})[:2] == (400, INVALID)
    assert refusal(client, x_amzn_sagemaker_model_query_string="a b")[:2] == (400, INVALID)
    assert refusal(client, PATH.replace("any", "lost"))[:2] == (503, "ServiceUnavailableError")
    assert refusal(client, "/endpoints/any/invocations")[:2] == (404, "UnknownOperationException")

    status, kind, members = refusal(client, **{TARGET: "refused"})
    assert (status, kind) == (424, "ModelError")
    assert members["OriginalStatusCode"] == 404
    assert members["OriginalMessage"] == "no such path\n"


def test_a_container_that_refuses_and_keeps_the_connection_is_not_waited_for(
    client: Http2Client,
) -> None:
    status, kind, members = refusal(client, PATH.replace("any", "full"))
    assert (status, kind) == (424, "ModelError")
    assert (members["OriginalStatusCode"], members["OriginalMessage"]) == (503, "no room")


def with_prelude(num_bytes: int, num_header_bytes: int, rest: bytes = b"") -> bytes:
    """A message whose lengths are what they say, with their checksum."""
    lengths = struct.pack("!II", num_bytes, num_header_bytes)
    return lengths + struct.pack("!I", crc32(lengths)) + rest


@pytest.mark.parametrize(
    ("data", "rule"),
    [
        (event(b"hello")[:-1] + b"x", "checksum is wrong"),
        (b"x" * 16, "checksum of its lengths is wrong"),
        (with_prelude(0xFFFFFFFF, 0), f"at most {MAX_BODY_BYTES} bytes, given 4294967295"),
        (with_prelude(15, 0, b"xxxx"), "cannot have 0 bytes"),
        (with_prelude(64, 0xFFFFFFFF), "cannot have 4294967295 bytes"),
        (event(b"hello", **{":event-type": "Other"}), "must be a PayloadPart, given 'Other'"),
        (event(b"hello", **{":message-type": "exception"}), "must be a PayloadPart"),
        (event(b"hello", DataType="TEXT"), "DataType must be one of BINARY, UTF8, given 'TEXT'"),
        (event(b"hello", CompletionState="END"), "CompletionState must be one of"),
        (event(b"a", CompletionState="PARTIAL") + event(b"b", DataType="UTF8"), "one DataType"),
    ],
)
def test_a_message_that_is_none_ends_the_stream_with_its_rule(
    client: Http2Client, data: bytes, rule: str
) -> None:
    stream = client.open()
    client.send(stream, data)
    last = client.read_to_end(stream).events[-1]
    assert last["headers"][":error-code"] == INVALID
    assert rule in last["headers"][":error-message"]


def test_a_request_that_ends_within_a_message_is_refused(client: Http2Client) -> None:
    stream = client.open()
    client.send(stream, event(b"hello")[:20], is_last=True)
    assert "in the middle" in client.read_to_end(stream).events[-1]["headers"][":error-message"]


def test_a_client_that_reads_nothing_holds_up_the_container_and_not_memory(
    plain: Gateway, client: Http2Client, container: SocketContainer
) -> None:
    container.num_flooded = 0
    num_bytes_before = resident_bytes(plain.process.pid)
    client.opens_windows = False
    stream = client.open(headers={TARGET: "flood"})
    answer = client.read_until_begun(stream)
    while len(answer.body) < 60_000:
        client.read()

    counts = [-1, 0]
    wait_until(
        lambda: counts.append(container.num_flooded) or counts[-3:-1] == [counts[-1]] * 2,
        "the container waits",
        pause_s=0.1,
    )
    assert container.num_flooded < NUM_FLOOD_MESSAGES
    assert resident_bytes(plain.process.pid) - num_bytes_before < 8 << 20

    client.open_windows()
    parts = client.read_to_end(stream).parts
    assert len(parts) == NUM_FLOOD_MESSAGES
    assert all(data == FLOOD_MESSAGE for _, _, data in parts)


@pytest.mark.parametrize("frame", ["ping", "settings", "reset", "empty data"])
def test_a_flood_of_empty_frames_ends_the_connection(plain: Gateway, frame: str) -> None:
    with Http2Client(plain.http2) as client:
        stream = client.open()
        client.read_until_begun(stream)
        wires = {
            "ping": b"\0\0\x08\x06\0\0\0\0\0" + bytes(8),
            "settings": b"\0\0\0\x04\0\0\0\0\0",
            "empty data": b"\0\0\0\0\0" + struct.pack("!I", stream),
        }
        if frame == "reset":
            for _ in range(MAX_IDLE_FRAMES + 100):
                client.h2.reset_stream(client.open(is_sent=False))
        else:
            client.socket.sendall(wires[frame] * (MAX_IDLE_FRAMES + 1))

        with pytest.raises(OSError):
            client.flush()
            while True:
                client.read()

    with Http2Client(plain.http2) as other:
        assert other.read_to_end(other.open("/ping", method="GET")).status == 200


def test_other_protocols_and_noise_are_cut_and_nobody_else_is(plain: Gateway) -> None:
    assert b"HTTP/1.1" not in speaks_http_1(plain.http2)
    chance = random.Random(0)
    for _ in range(40):
        with Http2Client(plain.http2) as client:
            client.open("/ping", method="GET")
            kind, flags = chance.randrange(12), chance.randrange(256)
            payload = chance.randbytes(chance.randrange(60))
            head = struct.pack("!I", len(payload))[1:] + bytes((kind, flags))
            client.socket.sendall(head + struct.pack("!I", chance.choice((0, 1, 3))) + payload)

    with Http2Client(plain.http2) as client:
        assert client.read_to_end(client.open("/ping", method="GET")).status == 200

    assert not any(line["level"] == "ERROR" for line in plain.log_lines())


def test_a_stream_that_runs_when_the_gateway_ends_is_told_so_and_is_whole(
    plain: Gateway, client: Http2Client
) -> None:
    """The last of this gateway."""
    stream = client.open()
    client.send_part(stream, b"a")
    client.read_parts(stream, 1)

    plain.process.send_signal(signal.SIGTERM)
    answer = client.read_to_end(stream)
    assert answer.is_complete
    last = answer.events[-1]
    assert last["headers"][":exception-type"] == "InternalStreamFailure"
    assert json.loads(last["body"]) == {"Message": GATEWAY_ENDS}
    assert plain.process.wait(TIMEOUT_S) == 0


# Signatures and TLS.


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a certificate for this machine and its key."""
    file = tmp_path_factory.mktemp("pem") / "both.pem"
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -days 2 -nodes "
        f"-subj /CN=localhost -addext subjectAltName=DNS:localhost -keyout {file} -out {file}.crt"
    )
    subprocess.run(command.split(), check=True, capture_output=True)
    with file.open("a") as both:
        both.write(Path(f"{file}.crt").read_text())

    return file


@pytest.fixture(scope="module")
def careful(container: SocketContainer, certificate: Path) -> Iterator[Gateway]:
    """A gateway with TLS that checks signatures."""
    flags = ("--endpoint", container.url, "--http2-port", "0", "--check-signatures")
    with gateway(*flags, "--ssl-certfile", str(certificate), environ=CREDENTIALS) as running:
        yield running


@pytest.fixture
def trusted(careful: Gateway, certificate: Path) -> Iterator[Http2Client]:
    tls = ssl.create_default_context(cafile=f"{certificate}.crt")
    tls.set_alpn_protocols(["h2"])
    with Http2Client(careful.http2, tls) as connection:
        yield connection


def test_a_signed_stream_is_served_over_tls(trusted: Http2Client) -> None:
    headers, signer = signed_head(trusted.authority, PATH)
    stream = trusted.open(headers=headers)
    trusted.send(stream, signer.sign(event(b"one")) + signer.sign(event(b"two")))
    parts = trusted.read_parts(stream, 2)
    assert [data for _, _, data in parts] == [b"one", b"two"]

    trusted.send(stream, signer.sign(b""))
    assert trusted.read_to_end(stream).is_complete


@pytest.mark.parametrize("way", ["unsigned", "changed", "out of order", "twice", "old", "foreign"])
def test_what_is_not_signed_in_its_place_ends_the_stream(trusted: Http2Client, way: str) -> None:
    headers, signer = signed_head(trusted.authority, PATH)
    first = signer.sign(event(b"one"))
    wires = {
        "unsigned": event(b"one"),
        "changed": EventSigner.with_payload(first, event(b"two")),
        "out of order": signer.sign(event(b"two")),
        "twice": first + first,
        "old": signed_head(trusted.authority, PATH)[1].sign(event(b"one"), age_s=400),
        "foreign": EventSigner("0" * 64).sign(event(b"one")),
    }
    stream = trusted.open(headers=headers)
    trusted.send(stream, wires[way])
    last = trusted.read_to_end(stream).events[-1]
    assert last["headers"][":error-code"] == "InvalidSignatureException"


def test_a_head_that_is_not_signed_for_events_is_refused(trusted: Http2Client) -> None:
    assert refusal(trusted)[:2] == (403, "MissingAuthenticationTokenException")

    headers, _ = signed_head(trusted.authority, PATH)
    assert headers["x-amz-content-sha256"] == SIGNED_EVENTS
    for wrong in ({"x-amz-content-sha256": "UNSIGNED-PAYLOAD"}, {TARGET: "frames"}):
        answer = trusted.read_to_end(trusted.open(headers=headers | wrong))
        assert (answer.status, answer.headers["x-amzn-errortype"]) == (
            403,
            "InvalidSignatureException",
        )


def test_a_client_of_tls_without_http2_is_cut(careful: Gateway, certificate: Path) -> None:
    tls = ssl.create_default_context(cafile=f"{certificate}.crt")
    with pytest.raises(OSError), Http2Client(careful.http2, tls) as client:
        client.read()
