"""Messages on a WebSocket and their answers, over real sockets, with the client of the package
`websockets`.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from lmi.duplex.conversation import MAX_REFUSED, MAX_RUNNING
from lmi.duplex.messages import HEADERS
from lmi.duplex.paths import STREAM
from lmi.settings.annexes import KEYS
from lmi.shared.state import Phase
from tests.scripted import Host, host, wait_until

TEMPLATE = "say {{ messages[-1].content }}"
HI = {"inputs": "say hi"}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
KEY = "a-key-of-sixteen-characters"
TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def lmi(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    settings: dict[str, object] = {"enable_sessions": True, "job_queue_size": 4}
    folder = tmp_path_factory.mktemp("duplex")
    with host(folder, server=settings, model={"chat_template": TEMPLATE}) as started:
        wait_until(lambda: started.block.engines[0].max_num_sequences == 64)
        yield started


def opened(lmi: Host, path: str = STREAM, **options: Any) -> ClientConnection:
    return connect(f"ws://127.0.0.1:{lmi.port}{path}", max_size=None, **options)


def ask(websocket: ClientConnection, message: object, *, is_binary: bool = False) -> None:
    text = message if isinstance(message, str) else json.dumps(message)
    websocket.send(text.encode() if is_binary else text)


def read(websocket: ClientConnection) -> Any:
    text = websocket.recv(timeout=TIMEOUT_S)
    assert isinstance(text, str)
    return json.loads(text)


def read_answer(websocket: ClientConnection, id: str | None) -> tuple[int, list[Any], str]:
    """The status, the records and the end of the answer with an id, the only one that comes."""
    head = read(websocket)
    assert head["id"] == id, head
    records = []
    while "end" not in (message := read(websocket)):
        assert message["id"] == id, message
        records.append(message["data"])

    return head["status"], records, message["end"]


def answer_to(websocket: ClientConnection, **message: Any) -> tuple[int, list[Any], str]:
    ask(websocket, {"id": "a", **message})
    return read_answer(websocket, "a")


def close_of(websocket: ClientConnection) -> tuple[int, str]:
    """How the server closes, whatever it says before."""
    with pytest.raises(ConnectionClosed) as raised:
        while True:
            websocket.recv(timeout=TIMEOUT_S)

    assert raised.value.rcvd is not None
    return raised.value.rcvd.code, raised.value.rcvd.reason


# Answers.


@pytest.mark.parametrize("is_binary", [False, True], ids=["text", "binary"])
def test_a_body_is_answered_with_the_records_of_its_stream(lmi: Host, is_binary: bool) -> None:
    with opened(lmi) as websocket:
        ask(websocket, {**HI, "stream": True}, is_binary=is_binary)
        records = [read(websocket) for _ in range(3)]

    assert [record["token"]["text"] for record in records] == ["h", "i", ""]
    assert records[-1]["generated_text"] == "hi"


def test_a_body_that_asks_for_no_stream_is_answered_with_one_message(lmi: Host) -> None:
    with opened(lmi) as websocket:
        ask(websocket, HI)
        assert read(websocket) == {"generated_text": "hi"}
        ask(websocket, CHAT)
        assert read(websocket)["choices"][0]["message"]["content"] == "hi"


def test_bodies_without_an_id_are_answered_one_after_the_other(lmi: Host) -> None:
    lmi.executor.let_go.clear()
    with opened(lmi) as websocket:
        ask(websocket, {"inputs": "late say slow"})
        ask(websocket, {"inputs": "say quick"})
        wait_until(lambda: lmi.executor.num_active == 1)
        lmi.executor.let_go.set()
        assert read(websocket) == {"generated_text": "slow"}
        assert read(websocket) == {"generated_text": "quick"}


def test_messages_with_ids_are_answered_at_once(lmi: Host) -> None:
    lmi.executor.let_go.clear()
    with opened(lmi) as websocket:
        ask(websocket, {"id": "slow", "body": {"inputs": "late say slow"}})
        ask(websocket, {"id": "quick", "body": {"inputs": "say quick"}})
        assert read_answer(websocket, "quick") == (200, [{"generated_text": "quick"}], "complete")
        lmi.executor.let_go.set()
        assert read_answer(websocket, "slow") == (200, [{"generated_text": "slow"}], "complete")


def test_records_of_several_answers_come_between_each_other(lmi: Host) -> None:
    lmi.executor.let_go.clear()
    with opened(lmi) as websocket:
        texts = {"a": "", "b": ""}
        for id in texts:
            ask(websocket, {"id": id, "body": {"inputs": "rest abc", "stream": True}})

        messages: list[Any] = []
        while sum("end" in message for message in messages) < 2:
            message = read(websocket)
            messages.append(message)
            if "data" in message:
                texts[message["id"]] += message["data"]["token"]["text"]

            if all(texts.values()):
                lmi.executor.let_go.set()

    assert texts == {"a": "abc", "b": "abc"}


def test_a_path_of_an_api_takes_its_bodies_and_streams_the_data_of_its_events(lmi: Host) -> None:
    with opened(lmi, "/v1/chat/completions") as websocket:
        websocket.send(json.dumps(CHAT | {"stream": True}))
        messages = []
        while not messages or messages[-1] != "[DONE]":
            messages.append(websocket.recv(timeout=TIMEOUT_S))

        chunks = [json.loads(message) for message in messages[:-1]]
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        assert text == "hi"

        status, records, end = answer_to(websocket, body=CHAT | {"stream": True})
        assert (status, end) == (200, "complete")
        assert records[-1]["choices"][0]["finish_reason"] == "stop"


def test_an_anthropic_client_s_path_streams_typed_events(lmi: Host) -> None:
    with opened(lmi, "/v1/messages") as websocket:
        status, events, end = answer_to(websocket, body=CHAT | {"max_tokens": 9, "stream": True})

    assert (status, events[0]["type"], events[-1]["type"]) == (200, "message_start", "message_stop")


def test_a_message_may_name_its_api_by_a_header(lmi: Host) -> None:
    route = {"X-Amzn-SageMaker-Custom-Attributes": "route=/v1/completions"}
    with opened(lmi) as websocket:
        status, records, _ = answer_to(websocket, body={"prompt": "say hi"}, headers=route)

    assert status == 200 and records[0]["object"] == "text_completion"


def test_a_session_is_opened_used_and_closed_by_messages(lmi: Host) -> None:
    with opened(lmi) as websocket:
        ask(websocket, {"id": "new", "body": {"requestType": "NEW_SESSION"}})
        opening = read(websocket)["headers"]["x-amzn-sagemaker-new-session-id"]
        session = {"x-amzn-sagemaker-session-id": opening.partition(";")[0]}
        assert [read(websocket)["id"] for _ in range(2)] == ["new", "new"]

        assert answer_to(websocket, body=HI, headers=session)[0] == 200
        assert answer_to(websocket, body={"requestType": "CLOSE"}, headers=session)[0] == 200
        status, records, _ = answer_to(websocket, body=HI, headers=session)
        assert status >= 400 and "closed" in json.dumps(records)


def test_a_session_of_the_handshake_is_that_of_every_message(lmi: Host) -> None:
    headers = {"X-Amzn-SageMaker-Session-Id": "unknown-1"}
    with opened(lmi, additional_headers=headers) as websocket:
        ask(websocket, HI)
        assert "the id of an open session" in read(websocket)["error"]


# Ends.


def test_a_message_that_is_cancelled_ends_in_the_engine_and_says_so(lmi: Host) -> None:
    with opened(lmi) as websocket:
        ask(websocket, {"id": "a", "body": {"inputs": "run on", "stream": True}})
        assert read(websocket)["status"] == 200
        ask(websocket, {"id": "a", "cancel": True})
        while "end" not in (message := read(websocket)):
            pass

        assert message == {"id": "a", "end": "cancelled"}
        wait_until(lambda: lmi.executor.num_active == 0)
        ask(websocket, {"id": "unknown", "cancel": True})
        assert answer_to(websocket, body=HI)[0] == 200


@pytest.mark.parametrize("way", ["closes", "is lost"])
def test_a_client_that_leaves_ends_all_that_runs(lmi: Host, way: str) -> None:
    with opened(lmi) as websocket:
        for id in "ab":
            ask(websocket, {"id": id, "body": {"inputs": "run on", "stream": True}})

        ask(websocket, {"inputs": "hang"})
        wait_until(lambda: lmi.executor.num_active == 3)
        if way == "is lost":
            websocket.socket.shutdown(socket.SHUT_RDWR)

    wait_until(lambda: lmi.executor.num_active == 0)
    wait_until(lambda: lmi.server_block.frontends[0].num_in_flight == 0)


def test_an_answer_that_fails_ends_with_the_api_s_error(lmi: Host) -> None:
    with opened(lmi) as websocket:
        status, records, end = answer_to(websocket, body={"inputs": "fail hi", "stream": True})

    assert (status, end) == (200, "complete")
    assert records[-1]["details"]["finish_reason"] == "error"


def test_a_server_that_shuts_down_closes_what_is_idle_and_answers_what_runs(
    tmp_path: Path,
) -> None:
    with host(tmp_path) as lmi, opened(lmi) as idle, opened(lmi) as busy:
        ask(busy, {"id": "late", "body": {"inputs": "late say hi"}})
        wait_until(lambda: lmi.executor.num_active == 1)
        lmi.server_block.supervisor.phase = Phase.DRAINING
        lmi.leave()
        assert close_of(idle) == (1001, "the server shuts down")

        assert answer_to(busy, body=HI)[0] == 503
        with pytest.raises(InvalidStatus, match="503"):
            opened(lmi)

        lmi.executor.let_go.set()
        assert read_answer(busy, "late")[1:] == ([{"generated_text": "hi"}], "complete")
        assert close_of(busy) == (1001, "the server shuts down")


# Faults.


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ("{bad", 424, "the body is not JSON"),
        ({"inputs": "say hi", "parameters": {"temperature": -1}}, 424, "temperature"),
        ({"messages": [], "model": "scripted"}, 400, "messages"),
        ({"prompt": "say hi", "max_tokens": -3}, 400, "max_tokens"),
        ([1], 424, "object"),
    ],
)
def test_a_fault_is_told_in_the_words_of_the_api_with_its_status(
    lmi: Host, body: object, status: int, words: str
) -> None:
    with opened(lmi) as websocket:
        ask(websocket, body)
        error = read(websocket)
        assert error["code"] == status and words in json.dumps(error)
        if body != "{bad":
            told = answer_to(websocket, body=body)
            assert told[0] == status and words in json.dumps(told[1])


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"id": 3, "body": HI}, "id must be a text"),
        ({"id": "", "body": HI}, "id must be a text"),
        ({"id": "x" * 129, "body": HI}, "id must be a text"),
        ({"id": "a", "body": HI, "more": 1}, "more"),
        ({"id": "a", "body": HI, "headers": {"Authorization": "x"}}, "headers must be among"),
        ({"id": "a", "body": HI, "headers": {"host": "x"}}, "headers must be among"),
        ({"id": "a", "body": HI, "headers": {"accept": "a\r\nb: c"}}, "printable"),
        ({"id": "a", "body": HI, "headers": [1]}, "headers"),
        ({"id": "a", "cancel": "yes"}, "cancel"),
        ({"id": "a", "cancel": False}, "body must be there"),
    ],
)
def test_a_message_with_a_fault_is_refused_by_name(lmi: Host, message: Any, words: str) -> None:
    id = message["id"] if message["id"] == "a" or message["id"] == "x" * 129 else None
    with opened(lmi) as websocket:
        ask(websocket, message)
        status, records, end = read_answer(websocket, id)
        assert status == 424 and words in json.dumps(records), records
        assert answer_to(websocket, body=HI)[0] == 200


def test_the_id_of_a_running_message_is_refused_to_another(lmi: Host) -> None:
    with opened(lmi) as websocket:
        ask(websocket, {"id": "a", "body": {"inputs": "hang"}})
        status, records, _ = answer_to(websocket, body=HI)
        assert status == 424 and "no message has that is answered now" in json.dumps(records)


def test_messages_beyond_those_of_a_connection_and_of_the_server_are_refused(lmi: Host) -> None:
    with opened(lmi) as first, opened(lmi) as second:
        for number in range(MAX_RUNNING):
            ask(first, {"id": f"{number}", "body": {"inputs": "hang"}})

        ask(first, {"id": "more", "body": HI})
        head = read(first)
        assert (head["id"], head["status"], head["headers"]["retry-after"]) == ("more", 503, "1")
        assert f"at most {MAX_RUNNING} messages" in json.dumps(read(first))

        for number in range(4):
            ask(second, {"id": f"{number}", "body": {"inputs": "hang"}})

        wait_until(lambda: lmi.server_block.frontends[0].num_sequences == MAX_RUNNING + 4)
        ask(second, CHAT)
        error = read(second)
        assert error["code"] == 503 and "job_queue_size" in json.dumps(error)


def test_a_connection_with_very_many_messages_is_closed(lmi: Host) -> None:
    with opened(lmi) as websocket:
        with suppress(ConnectionClosed):
            for _ in range(MAX_RUNNING + MAX_REFUSED + 1):
                ask(websocket, {"inputs": "hang"})

        assert close_of(websocket) == (1008, "more than 128 messages wait for an answer")

    wait_until(lambda: lmi.executor.num_active == 0)


def test_no_header_of_a_client_may_be_given_twice_or_name_a_key() -> None:
    assert not {"authorization", "x-api-key", "x-llm-d-inference-fairness-id", "host"} & {*HEADERS}


# Who may come.


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        (STREAM, {"Origin": "https://evil.example"}, 403),
        (STREAM, {"Host": "evil.example"}, 403),
        ("/nothing", {}, 404),
        ("/v1/models", {}, 200),
        ("/models/other/invoke", {}, 101),
    ],
)
def test_a_handshake_is_let_in_as_a_request_is(
    lmi: Host, path: str, headers: dict[str, str], status: int
) -> None:
    answer, body = handshake(lmi, path, headers)
    assert answer == status
    if status in (403, 404):
        assert "error" in json.loads(body)


def handshake(lmi: Host, path: str, headers: dict[str, str]) -> tuple[int, bytes]:
    lines = {
        "Host": "localhost",
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
        **headers,
    }
    text = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    with socket.create_connection(("127.0.0.1", lmi.port), timeout=TIMEOUT_S) as raw:
        raw.sendall(f"GET {path} HTTP/1.1\r\n{text}\r\n".encode())
        answer = HTTPResponse(raw)
        answer.begin()
        return answer.status, answer.read()


def test_a_message_to_an_unknown_model_of_the_path_is_refused(lmi: Host) -> None:
    with opened(lmi, "/models/other/invoke") as websocket:
        assert answer_to(websocket, body=HI)[0] == 404


def test_a_client_that_asks_for_no_websocket_is_told_to(lmi: Host) -> None:
    answer, body = lmi.send("GET", STREAM)
    assert answer.status == 426 and answer.headers["upgrade"] == "websocket"
    assert "this path is a WebSocket" in json.loads(body)["error"]


def test_a_websocket_needs_the_key_that_requests_need(tmp_path: Path) -> None:
    with host(tmp_path, server={"api_keys": KEYS.parse(KEY)}) as lmi:
        for headers in ({}, {"Authorization": "Bearer another"}):
            with pytest.raises(InvalidStatus, match="401"):
                opened(lmi, additional_headers=headers)

        with opened(lmi, additional_headers={"Authorization": f"Bearer {KEY}"}) as websocket:
            assert answer_to(websocket, body=HI)[0] == 200
