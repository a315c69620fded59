"""A server with API keys: who is served, and what anybody else is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lmi import __version__
from lmi.errors import BadConfiguration
from lmi.runtime import ServerRuntime
from lmi.server.access import PROBES, keys_of
from lmi.settings.annexes import KEYS
from lmi.settings.config import ServerConfig
from lmi.supervisor.credentials import read_keys
from tests.scripted import Host, host

WITH_KEYS = {"api_keys": KEYS.parse("sk-one, sk-two")}
BODY = {"inputs": "say a"}


@pytest.mark.parametrize(
    "headers", [{"Authorization": "Bearer sk-two"}, {"x-api-key": "sk-one"}, {"api-key": "sk-one"}]
)
def test_a_request_with_any_of_the_keys_is_served(headers: dict[str, str], tmp_path: Path) -> None:
    with host(tmp_path, server=WITH_KEYS) as lmi:
        assert lmi.post(BODY, headers=headers)[0].status == 200
        assert lmi.send("GET", "/metrics", headers=headers)[0].status == 200


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        ({}, "the request has no key"),
        ({"Authorization": "Basic c2stb25l"}, "the request has no key"),
        ({"Authorization": "Bearer sk-three"}, "this server does not know the key of the request"),
        ({"x-api-key": "sk-one, sk-two"}, "this server does not know the key of the request"),
    ],
)
def test_any_other_request_is_refused_before_its_body_is_read(
    headers: dict[str, str], said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with host(tmp_path, server=WITH_KEYS) as lmi:
        response, body = lmi.post(b"{", headers=headers)
        assert (response.status, response.getheader("WWW-Authenticate")) == (401, "Bearer")
        assert (
            json.loads(body)["error"]
            == f"{said}: send one as Authorization: Bearer KEY or x-api-key"
        )

        for method, path in (
            ("GET", "/metrics"),
            ("GET", "/v1/models"),
            ("GET", "/openapi.json"),
            ("POST", "/none"),
        ):
            assert lmi.send(method, path, headers=headers)[0].status == 401

    assert "sk-" not in caplog.text


@pytest.mark.parametrize(
    ("path", "kind"), [("/v1/chat/completions", "invalid_api_key"), ("/generate", "validation")]
)
def test_each_api_says_it_in_its_form(path: str, kind: str, tmp_path: Path) -> None:
    with host(tmp_path, server=WITH_KEYS) as lmi:
        response, body = lmi.post({"inputs": "say a"}, path)
        assert response.status == 401 and kind in body.decode()


@pytest.mark.parametrize("path", PROBES)
def test_who_only_looks_whether_it_serves_needs_no_key(path: str, tmp_path: Path) -> None:
    with host(tmp_path, server=WITH_KEYS) as lmi:
        assert lmi.send("GET", path)[0].status == 200


def test_the_pages_need_no_key_but_what_they_ask_for_does(tmp_path: Path) -> None:
    with host(tmp_path, server=WITH_KEYS) as lmi:
        for path in ("/", "/playground", "/docs", "/pages/page.js"):
            assert lmi.send("GET", path)[0].status == 200

        assert lmi.post(BODY, "/")[0].status == 401


def test_only_who_has_a_key_reads_the_settings_and_nobody_a_secret(tmp_path: Path) -> None:
    options = {"hf_token": "canary", "seed": "7"}
    with host(tmp_path, server={**WITH_KEYS, "port": 8123}, options=options) as lmi:
        assert lmi.send("GET", "/server_info")[0].status == 401

        response, body = lmi.send("GET", "/server_info", headers={"x-api-key": "sk-one"})

    info = json.loads(body)
    assert (response.status, info["version"], info["server"]["port"]) == (200, __version__, 8123)
    assert info["models"]["scripted"]["engine"]["options"] == {"hf_token": "***", "seed": "7"}
    assert info["server"]["api_keys"] == "***" and WITH_KEYS["api_keys"][0] not in body.decode()


def test_keys_of_a_file_count_too(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("sk-three\n\n sk-four \n")
    with host(tmp_path, server={**WITH_KEYS, "api_key_file": str(file)}) as lmi:
        for key in ("sk-one", "sk-three", "sk-four"):
            assert lmi.post(BODY, headers={"x-api-key": key})[0].status == 200


def statuses(lmi: Host, *keys: str) -> list[int]:
    return [lmi.post(BODY, headers={"x-api-key": key})[0].status for key in keys]


def test_keys_that_a_file_loses_or_gets_count_once_it_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("sk-old\n")
    with host(tmp_path, server={**WITH_KEYS, "api_key_file": str(file)}) as lmi:
        assert statuses(lmi, "sk-old", "sk-new", "sk-one") == [200, 401, 200]

        file.write_text("sk-new\n")
        assert statuses(lmi, "sk-old", "sk-new", "sk-one") == [200, 401, 200]

        lmi.read_credentials_again()
        assert statuses(lmi, "sk-old", "sk-new", "sk-one") == [401, 200, 200]

        file.write_text("not a key\n")
        lmi.read_credentials_again()

        assert statuses(lmi, "sk-old", "sk-new", "sk-one") == [401, 200, 200]


def test_a_file_that_has_lost_all_its_keys_closes_everything_but_what_tells_whether_it_serves(
    tmp_path: Path,
) -> None:
    file = tmp_path / "keys"
    file.write_text("sk-old\n")
    with host(tmp_path, server={"api_key_file": str(file)}) as lmi:
        file.write_text("")
        lmi.read_credentials_again()

        assert statuses(lmi, "sk-old", "", "sk-new") == [401] * 3
        assert lmi.post(BODY)[0].status == lmi.send("GET", "/metrics")[0].status == 401
        assert lmi.send("GET", "/ping")[0].status == 200

        file.write_text("sk-new")
        lmi.read_credentials_again()

        assert statuses(lmi, "sk-old", "sk-new") == [401, 200]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "has no key"),
        ("two words\n", "a line is not keys of printable ASCII"),
        (None, "No such file"),
    ],
)
def test_a_file_without_keys_ends_the_start(content: str | None, said: str, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_text(content)

    with pytest.raises(BadConfiguration, match=said):
        read_keys(file)


def test_the_key_of_the_servers_own_gateway_counts_only_where_there_are_keys(
    tmp_path: Path,
) -> None:
    for config in (ServerConfig(), ServerConfig(**WITH_KEYS)):  # type: ignore[arg-type]
        runtime = ServerRuntime.create(config)
        try:
            runtime.gateway_key().write_text(KEYS.parse("its-own")[0])
            assert bool(keys_of(runtime)) is bool(config.api_keys)
        finally:
            runtime.remove()


def test_the_settings_keep_no_key(tmp_path: Path) -> None:
    runtime = ServerRuntime.create(ServerConfig(**WITH_KEYS))  # type: ignore[arg-type]
    try:
        assert not any(
            "sk-" in path.read_text(errors="replace")
            for path in runtime.path.iterdir()
            if path.is_file()
        )
    finally:
        runtime.remove()
