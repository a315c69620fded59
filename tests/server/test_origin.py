"""Whose request it is, how long its client says that it waits, and how urgent it is."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path

import msgspec
import pytest

from lmi.executor import DEFAULT_PRIORITY
from lmi.http.exchange import CUSTOM_ATTRIBUTES, TIMEOUT, TIMEOUT_MS, Exchange
from lmi.runtime import ServerRuntime
from lmi.server.access import FAIRNESS_ID, Access
from lmi.server.client_headers import client_of
from lmi.settings.config import ServerConfig
from tests.scripted import CAPABILITIES, host, wait_until

SAYING = [{TIMEOUT: "0.3"}, {TIMEOUT_MS: "300"}, {CUSTOM_ATTRIBUTES: "trace=a; timeout=0.3"}]


@pytest.mark.parametrize("headers", SAYING, ids=lambda headers: next(iter(headers)))
def test_a_client_may_say_how_long_it_waits(headers: dict[str, str], tmp_path: Path) -> None:
    with host(tmp_path) as lmi:
        response, answer = lmi.post({"inputs": "hang"}, headers=headers)
        assert (response.status, json.loads(answer)["error"]) == (
            504,
            "no answer within 0.3 s, as the client asked",
        )
        assert lmi.post({"inputs": "say a"}, headers=headers)[0].status == 200


def test_a_stream_that_has_begun_ends_with_the_error_of_its_clients_deadline(
    tmp_path: Path,
) -> None:
    with host(tmp_path) as lmi:
        response, body = lmi.post({"inputs": "hang a", "stream": True}, headers={TIMEOUT: "0.5"})
        last = json.loads(body.strip().splitlines()[-1])
        assert (response.status, last["code"], last["error"]) == (
            200,
            504,
            "no answer within 0.5 s, as the client asked",
        )


def test_the_servers_own_limit_counts_where_it_is_shorter(tmp_path: Path) -> None:
    with host(tmp_path, server={"predict_timeout_s": 0.2}) as lmi:
        _, answer = lmi.post({"inputs": "hang"}, headers={TIMEOUT: "60"})
        assert json.loads(answer)["error"] == "no answer within 0.2 s, the server's predict_timeout"


def test_a_request_waits_for_a_place_since_the_server_has_had_all_of_it(tmp_path: Path) -> None:
    with host(tmp_path) as lmi, socket.create_connection(("127.0.0.1", lmi.port), 60) as slow:
        body = json.dumps({"inputs": "say a"}).encode()
        slow.sendall(
            b"POST /invocations HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
            % len(body)
        )
        slow.sendall(body[:5])
        wait_until(lambda: lmi.server_block.frontends[0].num_body_bytes == 5)
        before_s = time.monotonic()
        slow.sendall(body[5:])
        assert slow.recv(15) == b"HTTP/1.1 200 OK"

        entry = lmi.queue.last_offered
        assert entry is not None and entry.received_s is not None
        assert entry.arrived_s < before_s <= entry.received_s <= entry.queued_s


@pytest.mark.parametrize("text", ["0", "-1", "soon", "nan", "inf", ""])
def test_a_time_that_is_none_is_refused_by_its_name(text: str, tmp_path: Path) -> None:
    with host(tmp_path) as lmi:
        response, answer = lmi.post({"inputs": "say a"}, "/v1/completions", {TIMEOUT: text})
        assert response.status == 400
        assert f"{TIMEOUT} must be a number over 0" in answer.decode()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/invocations", {"inputs": "say a"}),
        ("/v1/completions", {"prompt": "say a", "priority": 7}),
        ("/generate", {"inputs": "say a"}),
    ],
)
def test_attributes_may_say_how_urgent_a_request_is(
    path: str, body: dict[str, object], tmp_path: Path
) -> None:
    urgencies = []
    with host(tmp_path, capabilities=msgspec.structs.replace(CAPABILITIES, priority=True)) as lmi:
        for rank in ("-1", "0", "1"):
            assert (
                lmi.post(body, path, {CUSTOM_ATTRIBUTES: f"trace=a; priority={rank}"})[0].status
                == 200
            )
            urgencies.append(lmi.executor.requests[-1].priority)

    assert urgencies == sorted(set(urgencies), reverse=True) and urgencies[1] == DEFAULT_PRIORITY


def test_an_urgency_that_is_none_or_that_the_engine_lacks_is_refused_by_name(
    tmp_path: Path,
) -> None:
    with host(tmp_path) as lmi:
        for priority, words in (
            ("high", "must be a whole number"),
            ("1e3", "must be a whole number"),
            ("2", "priorities"),
        ):
            response, answer = lmi.post(
                {"prompt": "say a"}, "/v1/completions", {CUSTOM_ATTRIBUTES: f"priority={priority}"}
            )

            assert (
                response.status == 400
                and "priority" in answer.decode()
                and words in answer.decode()
            )


def exchange(address: tuple[str, int] | None, headers: dict[str, str] | None = None) -> Exchange:
    raw = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
    scope = {"type": "http", "method": "POST", "path": "/", "headers": raw, "client": address}

    async def unused(*_: object) -> None:
        raise AssertionError

    return Exchange(scope, unused, unused)  # type: ignore[arg-type]


def test_a_client_is_its_address_its_adapter_or_whom_a_trusted_gateway_names() -> None:
    usual, trusting = (
        Access(ServerRuntime(Path("/r"), ServerConfig(trust_fairness_id=trusts)))
        for trusts in (False, True)
    )

    def client(access: Access, asked: Exchange, adapter: str | None = None) -> str:
        access.check(asked)
        return client_of(asked, adapter)

    def named() -> Exchange:
        return exchange(("10.0.0.7", 4711), {FAIRNESS_ID: "team a"})

    assert client(trusting, exchange(("10.0.0.7", 4711))) == "10.0.0.7"
    assert client(usual, exchange(None)) == ""
    assert client(usual, named()) == "10.0.0.7"
    assert client(usual, named(), "fr") == "adapter fr"
    assert client(trusting, named(), "fr") == "id team a"
