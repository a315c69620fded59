"""Sessions over real sockets: what opens, closes and names one, and every way to do it wrong."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from lmi.http.exchange import CUSTOM_ATTRIBUTES
from lmi.server.service import Service
from lmi.sessions.cleaning import kept_clean
from lmi.sessions.folder import InvalidSession, Sessions
from lmi.sessions.http import CLOSED_HEADER, HEADER, NEW_HEADER, request_type
from tests.scripted import Host, host, wait_until

PATHS = ["/invocations", "/predictions/scripted", "/predictions/model/1", "/models/scripted/invoke"]
NEW = {"requestType": "NEW_SESSION"}
CLOSE = {"requestType": "CLOSE"}
UNKNOWN = "7c9e6679-7425-40de-944b-e07fc1f90ae7"
SAY = {"inputs": "say hi"}


@pytest.fixture(scope="module")
def lmi(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with host(tmp_path_factory.mktemp("sessions")) as served:
        yield served


def opened(lmi: Host) -> str:
    """Open a session and return its id."""
    response, _ = lmi.post(NEW)
    assert response.status == 200
    return str(response.headers[HEADER]).partition(";")[0]


def refused(answered: tuple[HTTPResponse, bytes], status: int = 400) -> str:
    """The message of an error in the shape that the LMI API has for a body that it does
    not read.
    """
    response, body = answered
    fields = json.loads(body)
    assert (response.status, list(fields), fields["code"]) == (status, ["error", "code"], status), (
        body
    )
    return str(fields["error"])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("headers", [{}, {HEADER: "NEW_SESSION"}])
def test_a_new_session_is_told_in_both_headers(
    lmi: Host, path: str, headers: dict[str, str]
) -> None:
    before_s = time.time()
    response, body = lmi.post(NEW, path, headers)
    session_header = response.headers[HEADER]
    match = re.fullmatch(
        r"([0-9a-f-]{36}); Expires=(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ)", session_header
    )
    assert match and response.headers[NEW_HEADER] == session_header
    assert body == b'{"result": "Session %b created"}\n' % match[1].encode()
    expires_s = datetime.strptime(match[2], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC).timestamp()
    assert before_s + 1198 < expires_s <= time.time() + 1200
    assert response.headers["content-length"] == str(len(body))


def test_the_session_that_is_named_is_closed_once(lmi: Host) -> None:
    session = opened(lmi)
    session_id = opened(lmi)
    response, body = lmi.post(CLOSE, headers={HEADER: session})

    assert (response.status, body) == (200, b'{"result": "Session %b closed"}\n' % session.encode())
    assert response.headers[CLOSED_HEADER] == session and HEADER not in response.headers
    assert "unknown, closed or expired" in refused(lmi.post(CLOSE, headers={HEADER: session}))
    assert lmi.post(SAY, headers={HEADER: session_id})[0].status == 200


def test_a_session_belongs_to_the_address_that_opened_it(tmp_path: Path) -> None:
    with host(tmp_path, server={"max_sessions": 4}) as lmi:

        def status(address: str) -> int:
            connection = HTTPConnection("127.0.0.1", lmi.port, 60, (address, 0))
            with closing(connection):
                connection.request("POST", "/invocations", json.dumps(NEW))
                return connection.getresponse().status

        assert [status("127.0.0.1") for _ in range(3)] == [200, 200, 424], (
            "it may have as many as are free"
        )
        assert status("127.0.0.2") == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_in_a_session_is_answered_as_any_other(lmi: Host, stream: bool) -> None:
    response, body = lmi.post(SAY | {"stream": stream}, headers={HEADER: opened(lmi)})
    assert (response.status, body) == (200, lmi.post(SAY | {"stream": stream})[1])
    assert not [name for name in response.headers if "session" in name.lower()]


@pytest.mark.parametrize("given", ["NEW_SESSION", ""])
def test_a_request_that_does_not_open_a_session_is_served_without_one(
    lmi: Host, given: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    response, _ = lmi.post(SAY, headers={HEADER: given})
    assert response.status == 200 and HEADER not in response.headers
    messages = [
        record.message for record in caplog.records if "served without one" in record.message
    ]
    assert len(messages) == 1 and repr(given) in messages[0]


BAD_IDS = [
    "-a",
    "a-",
    "a_b",
    "a b",
    "../etc/passwd",
    "%2e%2e",
    "a" * 257,
    "é",
    UNKNOWN,
    UNKNOWN.upper(),
    "a" * 256,
]


@pytest.mark.parametrize("given", BAD_IDS)
@pytest.mark.parametrize("body", [SAY, CLOSE])
def test_an_id_of_no_open_session_is_400_and_makes_no_file(
    lmi: Host, given: str, body: dict[str, str]
) -> None:
    message = refused(lmi.post(body, headers={HEADER: given.encode().decode("latin-1")}))
    assert message.startswith(f"{HEADER} must be ") and "given '" in message


def test_a_session_that_is_over_is_400(tmp_path: Path) -> None:
    with host(tmp_path, server={"sessions_expiration_s": 0.2}) as lmi:
        session = opened(lmi)
        wait_until(lambda: lmi.post(SAY, headers={HEADER: session})[0].status == 400)

        assert "expired" in refused(lmi.post(SAY, headers={HEADER: session}))
        assert opened(lmi) != session


@pytest.mark.parametrize("given", ["NEW", "close", "", 5, True, ["CLOSE"], {}])
def test_another_request_type_is_400(lmi: Host, given: object) -> None:
    message = refused(lmi.post({"requestType": given}))
    assert message.startswith("requestType must be NEW_SESSION or CLOSE, given ")


def test_a_request_type_that_cannot_be_read_is_400(lmi: Host) -> None:
    assert refused(lmi.post(b'{"requestType": "\xff"}')).endswith(", given null")


@pytest.mark.parametrize("name", ["inputs", "messages", "prompt", "extra"])
@pytest.mark.parametrize("kind", ["NEW_SESSION", "CLOSE"])
def test_a_request_type_beside_another_field_is_400(lmi: Host, name: str, kind: str) -> None:
    message = refused(lmi.post({"requestType": kind, "other": None, name: "say hi"}))
    assert message == f"requestType must be left out beside '{name}', given '{kind}'"


@pytest.mark.parametrize("headers", [{}, {HEADER: ""}, {HEADER: "NEW_SESSION"}])
def test_closing_no_session_is_400(lmi: Host, headers: dict[str, str]) -> None:
    assert refused(lmi.post(CLOSE, headers=headers)).startswith(
        f"{HEADER} must be the id of the session to close"
    )


def test_a_request_type_of_null_and_one_inside_a_text_mean_nothing(lmi: Host) -> None:
    assert lmi.post(SAY | {"requestType": None})[1] == b'{"generated_text": "hi"}\n'

    response, body = lmi.post({"inputs": 'say "requestType": "CLOSE"'})
    assert (response.status, json.loads(body)["generated_text"]) == (200, '"requestType": "CLOSE"')

    response, body = lmi.post(b'say {"requestType": 1}', headers={"content-type": "text/plain"})
    assert (response.status, json.loads(body)["generated_text"]) == (200, '{"requestType": 1}')


def test_sessions_that_are_off_are_400_where_a_request_names_them(tmp_path: Path) -> None:
    with host(tmp_path, server={"enable_sessions": False}) as lmi:
        for body, headers, name in [
            (NEW, {}, "requestType"),
            (CLOSE, {}, "requestType"),
            (SAY, {HEADER: UNKNOWN}, HEADER),
        ]:
            message = refused(lmi.post(body, headers=headers))
            assert message.startswith(
                f"{name} must be left out: sessions are off here (option.enable_stateful_sessions)"
            )

        assert lmi.post(SAY)[0].status == 200

    assert not (tmp_path / "sessions").exists()


def test_a_session_that_cannot_be_written_is_424_with_the_cause(tmp_path: Path) -> None:
    (tmp_path / "sessions").write_text("not a folder")
    with host(tmp_path) as lmi:
        assert "no session can be created: File exists" in refused(lmi.post(NEW), 424)


def test_every_api_takes_the_header_and_refuses_it_in_its_own_words(lmi: Host) -> None:
    good = {HEADER: opened(lmi)}
    bad = {HEADER: UNKNOWN}
    completion = {"prompt": "say hi"}
    for path in ("/v1/completions", "/invocations"):
        assert lmi.post(completion, path, good)[0].status == 200

        response, body = lmi.post(completion, path, bad)
        error = json.loads(body)["error"]

        assert (response.status, error["type"], error["param"]) == (
            400,
            "invalid_request_error",
            HEADER,
        )

    assert lmi.post(SAY, "/generate", good)[0].status == 200

    response, body = lmi.post(SAY, "/generate", bad)
    assert (response.status, json.loads(body)["error_type"]) == (400, "validation")
    assert lmi.post(SAY, headers=good | {CUSTOM_ATTRIBUTES: "route=/generate"})[0].status == 200


def test_a_body_opens_a_session_whatever_route_its_attributes_name(lmi: Host) -> None:
    response, _ = lmi.post(NEW, headers={CUSTOM_ATTRIBUTES: "route=/v1/chat/completions"})
    assert response.status == 200 and NEW_HEADER in response.headers
    assert lmi.post(NEW, "/v1/completions")[0].status == 400


def test_a_session_may_be_closed_while_a_request_runs_in_it(lmi: Host) -> None:
    session = opened(lmi)
    num_before = len(lmi.executor.requests)
    with ThreadPoolExecutor() as pool:
        running = pool.submit(
            lmi.post,
            {"inputs": "run ab", "parameters": {"max_new_tokens": 150}},
            headers={HEADER: session},
        )
        wait_until(lambda: len(lmi.executor.requests) > num_before)

        assert lmi.post(CLOSE, headers={HEADER: session})[0].status == 200
        assert running.result()[0].status == 200


def test_user_code_that_reads_the_bodies_keeps_its_own_request_types() -> None:
    assert request_type(b'{"requestType": "summarise"}', is_ours=False) is None
    assert request_type(b'{"requestType": "CLOSE", "extra": 1}', is_ours=False) == "CLOSE"
    with pytest.raises(InvalidSession, match="beside 'inputs'"):
        request_type(b'{"requestType": "CLOSE", "inputs": "a"}', is_ours=False)


def test_expired_sessions_go_while_nobody_opens_one(tmp_path: Path) -> None:
    sessions = Sessions(tmp_path / "sessions", 0.05)
    sessions.open()
    service = cast(Service, SimpleNamespace(sessions=sessions))

    async def clean() -> None:
        async with kept_clean({"demo": service}, every_s=0.02):
            async with asyncio.timeout(60):
                while list((tmp_path / "sessions").iterdir()):
                    await asyncio.sleep(0.01)

    asyncio.run(clean())
