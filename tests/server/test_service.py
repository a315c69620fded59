"""Admission over real sockets: places in the queue are sequences, and one request has a bounded
number of them.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from starlette.types import Message, Receive, Scope, Send

from lmi.errors import Overloaded
from lmi.runtime import ServerRuntime
from lmi.server.app import ErrorMiddleware
from lmi.server.front_end import FrontEnd
from lmi.server.service import Models
from lmi.settings.config import ServerConfig
from tests.scripted import CAPABILITIES, Host, host, wait_until

MANY = msgspec.structs.replace(CAPABILITIES, num_return_sequences=True)
# Of the scripted engine
NUM_RUNNING = 64
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """A server whose requests have at most four sequences."""
    folder = tmp_path_factory.mktemp("four")
    with host(folder, server={"max_request_sequences": 4}, capabilities=MANY) as served:
        yield served


def send(served: Host, path: str, fields: dict[str, object]) -> socket.socket:
    """A connection on which a request is sent and nothing is read."""
    connection = socket.create_connection(("127.0.0.1", served.port), timeout=60)
    body = json.dumps(fields).encode()
    connection.sendall(
        b"POST %b HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(body))
        + body
    )
    return connection


def test_a_request_takes_a_place_for_each_sequence(four: Host) -> None:
    record = four.server_block.frontends[0]
    with send(four, COMPLETIONS, {"prompt": ["hang a", "hang b"], "n": 2, "temperature": 1}):
        wait_until(lambda: record.num_sequences == 4)
        assert record.num_in_flight == 1
        metrics = four.send("GET", "/metrics")[1]
        assert (
            b"lmi_sequences_in_flight 4.0" in metrics and b"lmi_requests_in_flight 1.0" in metrics
        )

    wait_until(lambda: (record.num_sequences, record.num_in_flight) == (0, 0))


SAMPLED = {"do_sample": True}
TOO_MANY: dict[str, tuple[str, dict[str, object], int, str]] = {
    "lmi": (
        "/invocations",
        {"inputs": "say a", "parameters": {"n": 5, **SAMPLED}},
        424,
        "parameters.n must be at most 4, as best_of (4 sequences, max_request_sequences), given 5",
    ),
    "tgi": (
        "/generate",
        {"inputs": "say a", "parameters": {"best_of": 5, **SAMPLED}},
        422,
        (
            "parameters.best_of must be at most 4, as best_of (4 sequences, max_request_sequences), "  # noqa: E501
            "given 5"
        ),
    ),
    "triton": (
        "/v2/models/scripted/generate",
        {"text_input": "say a", "n": 5, "temperature": 1.0},
        400,
        "input 'n' must be at most 4, as best_of (4 sequences, max_request_sequences), given 5",
    ),
    "openai": (
        COMPLETIONS,
        {"prompt": ["say a"] * 3, "n": 2, "temperature": 1},
        400,
        (
            "n must be at most 1 for each of 3 prompts, as best_of (4 sequences, "
            "max_request_sequences), given 2"
        ),
    ),
    "openai, prompts": (
        COMPLETIONS,
        {"prompt": ["say a"] * 5},
        400,
        "prompt must be at most 4 prompts (max_request_sequences), given '5 prompts'",
    ),
}


@pytest.mark.parametrize("api", TOO_MANY)
def test_a_request_of_too_many_sequences_is_refused_with_field_rule_and_value(
    four: Host, api: str
) -> None:
    path, fields, status, message = TOO_MANY[api]
    response, body = four.post(fields, path)
    error = json.loads(body)["error"]
    assert (response.status, error["message"] if isinstance(error, dict) else error) == (
        status,
        message,
    )


def test_a_request_that_never_finds_room_is_refused_and_not_told_to_come_back(
    tmp_path: Path,
) -> None:
    with host(tmp_path, server={"job_queue_size": 1}, capabilities=MANY) as served:
        wait_until(
            lambda: (
                served.block.engines[0].is_alive
                and served.block.engines[0].max_num_sequences == NUM_RUNNING
            )
        )
        response, body = served.post({"prompt": ["say a"] * (NUM_RUNNING + 2)}, COMPLETIONS)
        assert response.status == 400 and "job_queue_size" in json.loads(body)["error"]["message"]
        assert served.post({"prompt": ["say a"] * (NUM_RUNNING + 1)}, COMPLETIONS)[0].status == 200


def test_sequences_that_find_no_room_together_wait_outside(tmp_path: Path) -> None:
    with host(tmp_path, server={"job_queue_size": 1}, capabilities=MANY) as served:
        record = served.server_block.frontends[0]
        wait_until(lambda: served.block.engines[0].max_num_sequences == NUM_RUNNING)
        with send(served, COMPLETIONS, {"prompt": ["hang a"] * 10, "n": 6, "temperature": 1}):
            wait_until(lambda: record.num_sequences == 60)
            response, _ = served.post({"prompt": ["say a"] * 6}, COMPLETIONS)

            assert response.status == 429 and response.headers["retry-after"] == "1"
            assert served.post({"prompt": ["say a"] * 5}, COMPLETIONS)[0].status == 200

        wait_until(lambda: record.num_sequences == 0)


API_PATHS = [
    "/invocations",
    "/generate",
    "/generate_stream",
    "/",
    "/v2/models/scripted/generate",
    COMPLETIONS,
]


@pytest.mark.parametrize(
    "path",
    [
        *API_PATHS,
        "/v2/models/scripted/generate_stream",
        "/v1/chat/completions",
        "/v1/messages",
        "/v1/responses",
    ],
)
def test_a_full_queue_says_at_every_api_when_to_come_back(four: Host, path: str) -> None:
    record = four.block.frontends[0]
    record.num_sequences += 10_000
    try:
        response, _ = four.post({"inputs": "say a", "prompt": "say a", "text_input": "say a"}, path)
    finally:
        record.num_sequences -= 10_000

    assert response.status in (429, 503, 529) and response.headers["retry-after"] == "1"


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/invocations", 503),
        ("/v2/models/a/generate", 503),
        ("/generate", 429),
        (COMPLETIONS, 429),
        ("/v1/messages", 529),
    ],
)
def test_a_queue_that_is_full_before_the_route_runs_has_the_api_s_answer_too(
    path: str, status: int
) -> None:
    async def full(scope: Scope, receive: Receive, send: Send) -> None:
        raise Overloaded("the queue of one of several models is full")

    async def receive() -> Message:
        raise AssertionError("the body is not read")

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    runtime = ServerRuntime.create(ServerConfig())
    try:
        block = runtime.attach()
        app = ErrorMiddleware(full, Models(FrontEnd(runtime, block, block.frontends[0])))
        asyncio.run(
            app({"type": "http", "method": "POST", "path": path, "headers": []}, receive, send)
        )
    finally:
        runtime.remove()

    assert sent[0]["status"] == status and dict(sent[0]["headers"])[b"Retry-After"] == b"1"


@pytest.mark.parametrize("name", ["Authorization", "X-Api-Key", "api-key"])
def test_a_key_that_nobody_checks_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    def told() -> list[str]:
        return [
            record.levelname
            for record in caplog.records
            if "has no keys and checks nothing" in record.message
        ]

    with host(tmp_path) as served:
        served.send("GET", "/v1/models", headers={"Authorization": "AWS4-HMAC-SHA256 Credential=a"})
        assert told() == []

        for _ in range(2):
            assert (
                served.send("GET", "/v1/models", headers={name: "Bearer sk-secret"})[0].status
                == 200
            )

        assert told() == ["WARNING"] and "sk-secret" not in caplog.text


def test_by_default_128_prompts_of_16_sequences_are_too_many(tmp_path: Path) -> None:
    with host(tmp_path, capabilities=MANY) as served:
        response, body = served.post(
            {"prompt": ["say a"] * 128, "n": 16, "temperature": 1}, COMPLETIONS
        )
        error = json.loads(body)["error"]
        assert (response.status, error["param"]) == (400, "n")
        assert "at most 4 for each of 128 prompts" in error["message"] and "512" in error["message"]
