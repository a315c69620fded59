"""What a hostile hub may send, and where it may send us, asked in this process over loopback."""

import gzip
import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, suppress

import pytest
import zstandard

from lmi.errors import SecurityRefused
from lmi.sources import hub_client, hub_listing
from lmi.sources.hub_client import HubClient, HubRefusal, NoHub, raise_for_status
from lmi.sources.hub_file import HubFile
from lmi.sources.hub_listing import HubApi
from lmi.sources.job import MayPass
from lmi.sources.reach import Reach
from tests.sources.faulty_server import Answer
from tests.sources.hub_server import HubServer

ID = "writers/fox"
JSON = {"Content-Type": "application/json"}
DEEP = b"[" * 200_000 + b"]" * 200_000
LARGE_BYTES = 3 << 20


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setattr(hub_client, "MAX_ANSWER_BYTES", 1 << 20)
    with HubServer() as server:
        server.publish(ID, {"config.json": b"{}"})
        yield server


class Api:
    """One hub as a fetch asks it, with a token."""

    def __init__(self, hub: HubServer, *opened_hosts: str) -> None:
        self._hub = hub
        self._reach = Reach(hub.url, opened_hosts)

    def commit_of(self, revision: str) -> str:
        with closing(HubClient(ID, self._reach)) as client:
            return self._api(client).commit_of(revision)

    def files_of(self, commit: str) -> list[HubFile]:
        with closing(HubClient(ID, self._reach)) as client:
            return self._api(client).files_of(commit)

    def _api(self, client: HubClient) -> HubApi:
        return HubApi(
            client, self._hub.url, ID, {"Authorization": "Bearer hf_secret"}, lambda num_bytes: None
        )


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b'{"sha": null}',
        b'{"sha": 1}',
        b"[]",
        b"null",
        b"1",
        b'{"sha": "../../x"}',
        b'{"sha": "a',
        DEEP,
        b"\xff",
    ],
    ids=lambda body: body[:20].decode(errors="replace"),
)
def test_a_revision_of_a_wrong_type_is_an_answer_of_no_hub(hub: HubServer, body: bytes) -> None:
    hub.replace("GET .*/revision/", Answer(200, JSON, body))
    with pytest.raises(NoHub) as raised:
        Api(hub).commit_of("main")

    assert "\n" not in str(raised.value) and len(str(raised.value)) < 400


FILE = {"type": "file", "path": "config.json", "size": 2, "oid": "0" * 40}


@pytest.mark.parametrize(
    "listed",
    [
        FILE,
        [[FILE]],
        [FILE | {"path": None}],
        [{name: FILE[name] for name in FILE if name != "path"}],
        [{name: FILE[name] for name in FILE if name != "oid"}],
        [FILE | {"size": "2"}],
        [FILE | {"size": -1}],
        [FILE | {"size": 1e300}],
        [FILE | {"oid": "../../outside"}],
        [FILE | {"oid": 1}],
        [FILE | {"lfs": "x"}],
        [FILE | {"lfs": {}}],
        [FILE | {"lfs": {"oid": "0" * 40}}],
        [FILE | {"path": "\ud800"}],
    ],
    ids=ascii,
)
def test_a_listing_of_wrong_types_is_an_answer_of_no_hub(hub: HubServer, listed: object) -> None:
    hub.replace("GET .*/tree/", Answer(200, JSON, json.dumps(listed).encode()))
    with pytest.raises(NoHub):
        Api(hub).files_of("0" * 40)


def test_an_answer_larger_than_its_limit_is_not_read_to_its_end(hub: HubServer) -> None:
    hub.replace("GET", Answer(200, JSON, b" " * LARGE_BYTES))
    with pytest.raises(NoHub, match="more than 1048576 bytes"):
        Api(hub).commit_of("main")


def test_an_answer_that_is_small_until_it_is_unpacked_is_not_unpacked_whole(hub: HubServer) -> None:
    bomb = gzip.compress(b" " * LARGE_BYTES * 20)
    hub.replace("GET", Answer(200, JSON | {"Content-Encoding": "gzip"}, bomb))
    with pytest.raises(NoHub, match="more than 1048576 bytes"):
        Api(hub).commit_of("main")

    assert hub.headers[hub.requests[0]]["accept-encoding"] == "gzip"


def test_an_answer_in_gzip_is_read(hub: HubServer) -> None:
    answer = gzip.compress(json.dumps({"sha": "0" * 40}).encode())
    hub.replace("GET", Answer(200, JSON | {"Content-Encoding": "gzip"}, answer))
    assert Api(hub).commit_of("main") == "0" * 40


def test_an_answer_in_a_packing_that_nobody_asked_for_is_refused(hub: HubServer) -> None:
    packed = zstandard.compress(b'{"sha": ""}')
    hub.replace("GET", Answer(200, JSON | {"Content-Encoding": "zstd"}, packed))
    with pytest.raises(NoHub, match="packed as 'zstd'"):
        Api(hub).commit_of("main")

    hub.replace("GET", Answer(200, JSON | {"Content-Encoding": "gzip"}, b"no gzip"))
    with pytest.raises(NoHub, match="not the gzip"):
        Api(hub).commit_of("main")


def test_an_answer_that_trickles_is_given_up(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_client, "MAX_ANSWER_S", 0.0)
    with pytest.raises(MayPass, match="not whole after 0 s"):
        Api(hub).commit_of("main")


def next_page(
    hub: HubServer, target: str, times: int = 1, files: list[dict[str, object]] | None = None
) -> None:
    link = {"Link": f'<{target}>; rel="next"'}
    hub.replace("GET .*/tree/", Answer(200, JSON | link, json.dumps(files or []).encode()), times)


def test_the_pages_of_a_listing_are_joined(hub: HubServer) -> None:
    commit = hub.publish(ID, {"config.json": b"{}"})
    next_page(
        hub, f"{hub.url}/api/models/{ID}/tree/{commit}?cursor=2", files=[FILE | {"path": "a.json"}]
    )
    assert [file.path for file in Api(hub).files_of(commit)] == ["a.json", "config.json"]
    assert hub.requests[-1].endswith(f"/tree/{commit}?cursor=2")


def test_a_list_of_pages_without_an_end_is_given_up(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_listing, "MAX_PAGES", 5)
    next_page(hub, "?cursor=2", times=1000)
    with pytest.raises(NoHub, match="more than 5 pages"):
        Api(hub).files_of("0" * 40)

    assert len(hub.requests) == 5


@pytest.mark.parametrize(("name", "limit"), [("MAX_FILES", 5), ("MAX_LISTING_BYTES", 1000)])
def test_all_pages_together_have_a_limit(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, name: str, limit: int
) -> None:
    monkeypatch.setattr(hub_listing, name, limit)
    next_page(hub, "?cursor=2", times=1000, files=[FILE, FILE])
    with pytest.raises(NoHub, match="more than"):
        Api(hub).files_of("0" * 40)

    assert len(hub.requests) < 10


def test_the_token_does_not_go_to_where_a_listing_says_that_its_next_page_is(
    hub: HubServer,
) -> None:
    commit = hub.publish(ID, {"config.json": b"{}"})
    with HubServer() as second_hub:
        next_page(hub, f"{second_hub.url}/steal?cursor=2")
        assert [file.path for file in Api(hub).files_of(commit)] == ["config.json"]
        assert second_hub.requests == []


def test_a_redirect_leads_to_no_other_port_of_this_machine_unless_it_is_opened(
    hub: HubServer,
) -> None:
    with HubServer() as second_hub:
        second_hub.publish(ID, {"config.json": b"{}"})
        hub.replace(
            "GET",
            Answer(302, {"Location": f"{second_hub.url}/api/models/{ID}/revision/main"}),
            times=2,
        )
        place = second_hub.url.removeprefix("http://")
        with pytest.raises(
            SecurityRefused,
            match=f"{ID}: .*{second_hub.url} is neither .*download_hosts={place} allows",
        ):
            Api(hub).commit_of("main")

        assert second_hub.requests == []

        assert len(Api(hub, place).commit_of("main")) == 40
        assert "authorization" not in second_hub.headers[second_hub.requests[0]]


class Listener:
    """A port of loopback that notes whatever is sent to it."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.received: list[bytes] = []
        self.closed = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        connection, _ = self._socket.accept()
        with connection, suppress(OSError):
            while data := connection.recv(1000):
                self.received.append(data)

        self.closed.set()

    def close(self) -> None:
        self._socket.close()


def test_a_name_of_the_internet_with_an_address_of_this_machine_is_sent_nothing(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = Listener()
    look_up = socket.getaddrinfo

    def as_a_hostile_name_server(host: str, *args: object, **kwargs: object) -> object:
        return look_up("127.0.0.1" if host == "cdn.example" else host, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", as_a_hostile_name_server)
    hub.replace("GET", Answer(302, {"Location": f"https://cdn.example:{listener.port}/x"}))
    with pytest.raises(
        SecurityRefused, match=r"cdn\.example:\d+ has the address 127\.0\.0\.1, which is not one"
    ):
        Api(hub).commit_of("main")

    assert listener.closed.wait(10)
    assert listener.received == []

    listener.close()


def test_a_proxy_that_the_operator_names_may_have_any_address(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = Listener()
    for name in os.environ:
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)

    monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{listener.port}")
    hub.replace("GET", Answer(302, {"Location": "https://cdn.example/x"}))
    with closing(HubClient(ID, Reach(hub.url))) as client, suppress(Exception):
        # This proxy answers nothing
        with client.get(f"{hub.url}/x", {}, silence_s=0.5):
            pass

    assert listener.closed.wait(10)
    assert listener.received[0].startswith(b"CONNECT cdn.example:443 ")

    listener.close()


@pytest.mark.parametrize(
    "location",
    ["", "//", "http://[", "https://127.0.0.1:99999999/", "file:///etc/passwd", "x" * 9000],
)
def test_a_redirect_to_no_url_is_one_line(hub: HubServer, location: str) -> None:
    hub.replace("GET", Answer(302, {"Location": location}), times=100)
    with pytest.raises((NoHub, SecurityRefused, HubRefusal)) as raised:
        Api(hub).commit_of("main")

    assert "\n" not in str(raised.value)


def test_redirects_without_an_end_are_given_up(hub: HubServer) -> None:
    hub.replace("GET", Answer(307, {"Location": "/api/again"}), times=100)
    with pytest.raises(NoHub, match="redirects more than 10 times"):
        Api(hub).commit_of("main")


def test_the_body_of_a_redirect_is_not_read_to_its_end(hub: HubServer) -> None:
    location = f"/api/models/{ID}/revision/main"
    hub.replace(
        "GET",
        Answer(307, {"Location": location, "Content-Length": str(1 << 40)}, b" " * LARGE_BYTES),
    )
    assert len(Api(hub).commit_of("other")) == 40


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"error": "it is closed"}', "it is closed"),
        (b'{"error": ["it is closed"]}', "Forbidden"),
        (b"[]", "Forbidden"),
        (DEEP, "Forbidden"),
        (b" " * LARGE_BYTES, "Forbidden"),
        (b'{"error": "two\\nlines"}', "two lines"),
    ],
    ids=["text", "list", "other", "deep", "large", "lines"],
)
def test_the_reason_of_a_refusal_is_one_line_whatever_its_body_is(
    hub: HubServer, body: bytes, reason: str
) -> None:
    hub.replace("GET", Answer(403, JSON, body))
    with pytest.raises(HubRefusal) as raised:
        Api(hub).commit_of("main")

    assert (raised.value.status, str(raised.value)) == (403, reason)


@pytest.mark.parametrize(
    ("asked", "wait_s"), [("7", 7.0), ("soon", 0.0), ("9" * 5000, 0.0), ("-1", 0.0)]
)
def test_the_wait_that_a_hub_asks_for_is_read_where_it_is_a_number(
    hub: HubServer, asked: str, wait_s: float
) -> None:
    hub.fail("GET", 429, Retry_After=asked)
    with closing(HubClient(ID, Reach(hub.url))) as client, client.get(hub.url, {}) as response:
        with pytest.raises(HubRefusal) as raised:
            raise_for_status(response)

    assert raised.value.wait_s in (wait_s, float("inf"))
