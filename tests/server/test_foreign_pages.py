"""Pages of other origins, and of names that turn into this machine: what a browser sends for them,
and what it gets.
"""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from lmi.settings.annexes import KEYS
from tests.scripted import Host, host

ATTACK = {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"}
ASK = json.dumps({"inputs": "say a"}).encode()


def status(lmi: Host, headers: dict[str, str], path: str = "/invocations") -> int:
    return lmi.post(ASK, path, headers)[0].status


@pytest.mark.parametrize(
    "origin",
    ["https://evil.example", "null", "http://127.0.0.1:1", "http://localhost.evil.example"],
)
def test_a_page_of_another_origin_makes_the_model_do_nothing(origin: str, tmp_path: Path) -> None:
    with host(tmp_path) as lmi:
        response, body = lmi.post(
            ASK, headers=ATTACK | {"Origin": origin, "Content-Type": "text/plain"}
        )
        message = "Origin must be that of this server or one of lmi serve's cors_allowed_origins"
        assert (response.status, json.loads(body)["error"]) == (403, f"{message}, given '{origin}'")
        assert lmi.executor.requests == []


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/v1/chat/completions", "foreign_page"),
        ("/v1/messages", "permission_error"),
        ("/generate", "error"),
    ],
)
def test_each_api_refuses_the_page_in_its_form(path: str, kind: str, tmp_path: Path) -> None:
    with host(tmp_path) as lmi:
        response, body = lmi.post(ASK, path, ATTACK)
        assert response.status == 403 and kind in body.decode()


def test_the_server_s_own_pages_may_also_behind_a_proxy_that_changes_the_host(
    tmp_path: Path,
) -> None:
    with host(tmp_path) as lmi:
        assert status(lmi, {"Origin": f"http://127.0.0.1:{lmi.port}"}) == 200
        assert status(lmi, {"Host": "LOCALHOST:8080", "Origin": "http://localhost:8080"}) == 200
        assert (
            status(lmi, {"Origin": "https://llm.example", "Sec-Fetch-Site": "same-origin"}) == 200
        )
        assert status(lmi, {"Origin": "https://llm.example", "Sec-Fetch-Site": "same-site"}) == 403


def test_an_origin_of_another_scheme_is_another_one_also_at_the_same_place(tmp_path: Path) -> None:
    with host(tmp_path) as lmi:
        assert status(lmi, {"Host": "localhost", "Origin": "http://localhost:80"}) == 200
        assert status(lmi, {"Host": "localhost:80", "Origin": "http://localhost"}) == 200
        assert status(lmi, {"Host": "localhost:8080", "Origin": "https://localhost:8080"}) == 403
        assert status(lmi, {"Host": "localhost", "Origin": "https://localhost"}) == 403

        at_a_proxy = {
            "Host": "localhost",
            "Origin": "https://localhost",
            "Sec-Fetch-Site": "same-origin",
        }

        assert status(lmi, at_a_proxy) == 200


def test_two_origins_are_none_of_this_server(tmp_path: Path) -> None:
    with host(tmp_path) as lmi:
        own_origin = f"Origin: http://127.0.0.1:{lmi.port}\r\n"
        for further in (own_origin, "Origin: https://evil.example\r\n"):
            with socket.create_connection(("127.0.0.1", lmi.port), 60) as connection:
                request_line = f"POST /invocations HTTP/1.1\r\nHost: 127.0.0.1:{lmi.port}\r\n"
                head = f"{request_line}{own_origin}{further}"
                connection.sendall(f"{head}Content-Length: {len(ASK)}\r\n\r\n".encode() + ASK)
                assert connection.recv(100).startswith(b"HTTP/1.1 403 ")

        assert lmi.executor.requests == []


@pytest.mark.parametrize("origins", [("https://evil.example",), ("*",)])
def test_a_page_that_the_option_lets_in_may(origins: tuple[str, ...], tmp_path: Path) -> None:
    with host(tmp_path, server={"cors_allowed_origins": origins}) as lmi:
        assert status(lmi, ATTACK) == 200


def test_where_there_are_keys_a_key_decides_and_no_origin(tmp_path: Path) -> None:
    with host(tmp_path, server={"api_keys": KEYS.parse("sk-one")}) as lmi:
        assert status(lmi, ATTACK) == 401
        assert status(lmi, ATTACK | {"Authorization": "Bearer sk-one"}) == 200


def test_on_loopback_no_name_that_the_dns_may_turn_into_it_is_answered(tmp_path: Path) -> None:
    with host(tmp_path) as lmi:
        dotted = (
            "rebound.example",
            "rebound.example:8080",
            "127.0.0.1.rebound.example",
            "rebound.example.",
        )
        for name in (*dotted, "rebound%2eexample", "rebound%2Eexample:80"):
            for method, path in (
                ("GET", "/metrics"),
                ("GET", "/v1/models"),
                ("GET", "/"),
                ("POST", "/invocations"),
            ):
                headers = {"Host": name, "Origin": f"http://{name}"}
                response, body = lmi.send(method, path, ASK, headers)
                assert response.status == 403 and b"allowed_hosts" in body

        assert lmi.executor.requests == []


@pytest.mark.parametrize(
    "name",
    [
        "127.0.0.1",
        "localhost:1",
        "[::1]:8080",
        "10.0.0.1",
        "box",
        "a.localhost",
        "[::ffff:127.0.0.1]",
    ],
)
def test_addresses_and_names_of_this_machine_are_answered(name: str, tmp_path: Path) -> None:
    with host(tmp_path) as lmi:
        assert status(lmi, {"Host": name}) == 200


def test_an_open_server_is_asked_under_any_name_unless_the_option_says_which(
    tmp_path: Path,
) -> None:
    for folder, server, expected in (
        ("open", {"host": "0.0.0.0"}, {"llm.example": 200, "other.example": 200}),
        (
            "named",
            {"host": "0.0.0.0", "allowed_hosts": ("llm.example",)},
            {"llm.example": 200, "other.example": 403},
        ),
        (
            "local",
            {"allowed_hosts": ("llm.example",)},
            {"LLM.example:80": 200, "other.example": 403},
        ),
        ("any", {"allowed_hosts": ("*",)}, {"other.example": 200}),
    ):
        (tmp_path / folder).mkdir()
        with host(tmp_path / folder, server=server) as lmi:
            assert {name: status(lmi, {"Host": name}) for name in expected} == expected
