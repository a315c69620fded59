"""A body of JSON lines: a request on each line, and the answers in order."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lmi.apis.base.body import MARK
from lmi.http.exchange import CUSTOM_ATTRIBUTES, TIMEOUT
from lmi.server.lines import MAX_LINES, num_transforms, one_value, with_code
from lmi.sessions.http import HEADER
from lmi.settings.config import ServerConfig
from tests.scripted import CAPABILITIES, Host, host, wait_until

LINES = {"content-type": "application/jsonlines"}
PATHS = ["/invocations", "/predictions/scripted", "/predictions/model/1", "/models/scripted/invoke"]
# Of the scripted engine
NUM_RUNNING = 64


@pytest.fixture(scope="module")
def lmi(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    many = msgspec.structs.replace(CAPABILITIES, num_return_sequences=True)
    with host(tmp_path_factory.mktemp("lines"), capabilities=many) as served:
        yield served


def body_of(*requests: object) -> bytes:
    return b"\n".join(
        request if isinstance(request, bytes) else json.dumps(request).encode()
        for request in requests
    )


def answers(
    lmi: Host, *requests: object, headers: dict[str, str] | None = None, path: str = "/invocations"
) -> list[Any]:
    """Send the requests as lines and return the answers, each from its own line."""
    response, body = lmi.post(body_of(*requests), path, LINES | (headers or {}))
    assert (response.status, response.headers["content-type"]) == (200, "application/jsonlines"), (
        body
    )
    assert (
        response.headers["content-length"] == str(len(body))
        and "transfer-encoding" not in response.headers
    )
    assert body.endswith(b"\n")
    return [json.loads(line) for line in body.splitlines()]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "kind",
    ["application/jsonlines", "Application/X-NDJSON; charset=utf-8", "application/x-jsonlines"],
)
def test_each_line_is_a_request_by_its_fields(lmi: Host, path: str, kind: str) -> None:
    lmi_answer, completion = answers(
        lmi, {"inputs": "say hi"}, {"prompt": "say ho"}, path=path, headers={"content-type": kind}
    )
    assert lmi_answer == {"generated_text": "hi"}
    assert (completion["object"], completion["choices"][0]["text"]) == ("text_completion", "ho")


def test_the_byte_order_mark_of_windows_is_skipped_at_the_head_of_every_line(lmi: Host) -> None:
    lines = [MARK + json.dumps({"inputs": f"say {word}"}).encode() for word in ("hi", "ho")]
    assert answers(lmi, *lines) == [{"generated_text": "hi"}, {"generated_text": "ho"}]


def test_a_line_is_answered_as_it_would_be_alone(lmi: Host) -> None:
    requests = [
        {"inputs": "say hi", "parameters": {"details": True}},
        {"inputs": "say hi", "parameters": {"top_p": 5, "do_sample": True}},
        {"inputs": "fail ab"},
        {"inputs": "oom"},
        {"inputs": 5},
        {"nothing": "here"},
        {"inputs": "x" * 500},
    ]
    alone = [lmi.post(request)[1] for request in requests]

    assert lmi.post(body_of(*requests), headers=LINES)[1] == b"".join(alone)
    assert [json.loads(answer).get("code") for answer in alone] == [
        None,
        424,
        424,
        507,
        424,
        424,
        424,
    ]


def test_a_thousand_lines_come_back_in_order_with_the_bad_ones_in_their_places(lmi: Host) -> None:
    bad = {
        3: b"{",
        500: b"\xe2\x82\xac",
        501: b"[1]",
        502: {"inputs": ""},
        999: {"inputs": "fail x"},
    }
    requests = [bad.get(n, {"inputs": f"say {n}"}) for n in range(1000)]
    answers_read = answers(lmi, *requests)
    assert len(answers_read) == 1000

    for n, answer in enumerate(answers_read):
        if n in bad:
            assert answer["error"] and answer["code"] == 424, answer
        else:
            assert answer == {"generated_text": str(n)}


def test_blank_lines_are_skipped_and_lines_may_end_as_on_windows(lmi: Host) -> None:
    body = b'\r\n\n{"inputs": "say a"}\r\n   \n{"inputs": "say b"}'
    assert lmi.post(body, headers=LINES)[1] == b'{"generated_text": "a"}\n{"generated_text": "b"}\n'


NOTHING = b"\n \t\r\n" * 500_000


@pytest.mark.parametrize(
    "body", [b"", b"\n \r\n", b'{"inputs": "\xff"}', b"{}\n" * (MAX_LINES + 1), NOTHING]
)
def test_a_body_without_lines_with_too_many_or_not_in_utf8_is_424(lmi: Host, body: bytes) -> None:
    response, answer = lmi.post(body, headers=LINES)
    fields = json.loads(answer)

    assert (response.status, list(fields), fields["code"]) == (424, ["error", "code"], 424)
    assert fields["error"].startswith("the body ")


def test_a_stream_in_a_line_is_answered_whole_and_logged_once(
    lmi: Host, caplog: pytest.LogCaptureFixture
) -> None:
    requests = [
        {"inputs": "say hi", "stream": True},
        {"inputs": "say hi", "parameters": {"output_formatter": "sse"}},
        {"prompt": "say hi", "stream": True, "stream_options": {"include_usage": True}},
        {"inputs": "say hi", "stream": True, "parameters": {"top_p": 5}},
    ]
    plain, formatted, completion, refused = answers(
        lmi, *requests, headers={"accept": "text/event-stream"}
    )

    assert plain == formatted == {"generated_text": "hi"}
    assert (
        completion["choices"][0]["text"] == "hi" and completion["usage"]["completion_tokens"] == 3
    )
    assert refused["code"] == 424

    warned = [
        record for record in caplog.records if "no effect in a body of lines" in record.getMessage()
    ]

    assert [record.levelname for record in warned].count("WARNING") == 1


def test_options_of_a_stream_in_a_line_that_asks_for_none_are_refused(lmi: Host) -> None:
    options = {"stream_options": {"include_usage": True}}
    alone, beside = answers(
        lmi, {"prompt": "say hi", **options}, {"prompt": "say hi", "stream": True, **options}
    )
    assert alone["error"]["param"] == "stream_options" and alone["code"] == 400
    assert beside["choices"][0]["text"] == "hi"


@pytest.mark.parametrize(
    ("route", "key"),
    [
        ("/v1/completions", "choices"),
        ("/generate", "generated_text"),
        ("/generate_stream", "generated_text"),
    ],
)
def test_a_route_is_that_of_every_line(lmi: Host, route: str, key: str) -> None:
    request = {"inputs": "say hi", "prompt": "say hi"}
    good, bad = answers(
        lmi, request, {"inputs": 5, "prompt": 5.5}, headers={CUSTOM_ATTRIBUTES: f"route={route}"}
    )
    assert key in good
    assert bad["error"] and bad["code"] == (400 if "v1" in route else 422)


def test_a_line_of_a_session_request_is_refused_and_the_header_is_for_all_lines(lmi: Host) -> None:
    [refused, _] = answers(lmi, {"requestType": "NEW_SESSION"}, {"inputs": "say a"})
    assert (refused["code"], "a body of its own" in refused["error"]) == (400, True)

    session = lmi.post({"requestType": "NEW_SESSION"})[0].headers[HEADER].partition(";")[0]
    assert answers(lmi, {"inputs": "say a"}, headers={HEADER: session}) == [{"generated_text": "a"}]

    response, body = lmi.post(
        body_of({"inputs": "say a"}), headers=LINES | {HEADER: "no-such-session"}
    )

    assert (response.status, json.loads(body)["code"]) == (400, 400)


def send(lmi: Host, *requests: object) -> socket.socket:
    """A connection on which lines are sent and nothing is read."""
    body = body_of(*requests)
    raw = socket.create_connection(("127.0.0.1", lmi.port), timeout=60)
    head = (
        b"POST /invocations HTTP/1.1\r\nHost: x\r\nContent-Type: "
        b"application/jsonlines\r\nContent-Length: %d\r\n\r\n"
    )
    raw.sendall(head % len(body) + body)
    return raw


def test_as_many_lines_run_at_once_as_the_engine_can_and_the_body_has_one_place(lmi: Host) -> None:
    record = lmi.server_block.frontends[0]
    with send(lmi, *[{"inputs": "hang"}] * (NUM_RUNNING + 40)):
        wait_until(lambda: lmi.executor.num_active == NUM_RUNNING)
        assert (record.num_sequences, record.num_in_flight) == (1, 1)

    wait_until(lambda: lmi.executor.num_active == 0)
    wait_until(lambda: record.num_in_flight == 0)

    assert (
        len(
            [
                request
                for request in lmi.executor.requests
                if request.input_token_ids[:4] == tuple(b"hang")
            ]
        )
        <= 2 * NUM_RUNNING
    )


def test_a_line_of_several_sequences_takes_the_place_of_each(lmi: Host) -> None:
    sampled = {"inputs": "hang", "parameters": {"n": 16, "do_sample": True}}
    with send(lmi, *[sampled] * 10):
        wait_until(lambda: lmi.executor.num_active == NUM_RUNNING // 16)

    wait_until(lambda: lmi.executor.num_active == 0)


def test_a_line_beyond_its_time_is_504_and_the_next_one_has_its_own_time(tmp_path: Path) -> None:
    with host(tmp_path, server={"predict_timeout_s": 2}) as lmi:
        late, fine = answers(lmi, {"inputs": "hang"}, {"inputs": "say a"})
        assert (late["code"], fine) == (504, {"generated_text": "a"})

        requests = [*[{"inputs": "hang"}] * NUM_RUNNING, {"inputs": "say b"}]
        assert answers(lmi, *requests)[-1] == {"generated_text": "b"}


def test_the_time_that_a_client_waits_is_that_of_all_its_lines_together(lmi: Host) -> None:
    num_before = len(lmi.executor.requests)
    late = answers(lmi, *[{"inputs": "hang"}] * (NUM_RUNNING + 40), headers={TIMEOUT: "0.5"})
    message = "no answer within 0.5 s, as the client asked"
    assert [(late_answer["error"], late_answer["code"]) for late_answer in late] == [
        (message, 504)
    ] * (NUM_RUNNING + 40)
    assert len(lmi.executor.requests) - num_before <= NUM_RUNNING, (
        "a line that was late already began"
    )
    assert answers(lmi, {"inputs": "say a"}, headers={TIMEOUT: "60"}) == [{"generated_text": "a"}]


def test_a_body_of_lines_is_503_while_no_engine_can_answer_any(tmp_path: Path) -> None:
    with host(tmp_path) as lmi:
        lmi.post({"inputs": "lose a"})
        wait_until(lambda: lmi.post({"inputs": "say a"})[0].status == 503)
        response, body = lmi.post(body_of(*[{"inputs": "say a"}] * 3), headers=LINES)

        assert (response.status, json.loads(body)["code"]) == (503, 503)


def test_a_full_queue_refuses_a_body_of_lines_like_any_other(tmp_path: Path) -> None:
    with host(tmp_path, server={"job_queue_size": 1}) as lmi:
        raws = [send(lmi, {"inputs": "hang"}) for _ in range(NUM_RUNNING + 1)]
        wait_until(lambda: lmi.server_block.frontends[0].num_in_flight == NUM_RUNNING + 1)

        assert lmi.post(body_of({"inputs": "say a"}), headers=LINES)[0].status == 503

        for raw in raws:
            raw.close()

        wait_until(lambda: lmi.executor.num_active == 0)


def test_the_answers_of_a_dynamic_batch_are_one_line_each(tmp_path: Path) -> None:
    with host(tmp_path, model={"dynamic_batch": True, "enable_streaming": True}) as lmi:
        good, bad = answers(lmi, {"inputs": ["say a", "say b"]}, {"inputs": []})
        assert good == [{"generated_text": "a"}, {"generated_text": "b"}]
        assert (list(bad), bad["code"]) == (["code", "message", "error"], 424)


def test_what_is_no_json_becomes_a_string_and_no_character_ends_the_line_early() -> None:
    assert one_value(b"plain\ntext\n") == rb'"plain\ntext"'
    assert one_value(b'[\n  {"a": 1}\n]') == b'[{"a":1}]'
    assert one_value('{"a": "x\u2028y\x85"}\n'.encode()) == rb'{"a": "x\u2028y\u0085"}'
    assert (
        with_code(b'{"error": {"message": "no"}}', 400) == b'{"error":{"message":"no"},"code":400}'
    )


@pytest.mark.parametrize(
    ("settings", "num_running", "expected"),
    [
        ({}, 1, 1),
        ({}, 64, 16),
        ({}, 200, 16),
        ({}, 0, 1),
        ({"max_payload_mb": 1}, 64, 64),
        ({"max_payload_mb": 1}, 200, 100),
        ({"max_payload_mb": 0}, 200, 200),
        ({"max_payload_mb": 100}, 200, 1),
        ({"max_payload_mb": 101}, 200, 1),
        ({"max_concurrent_transforms": 50}, 1, 50),
    ],
)
def test_transforms_are_as_many_as_run_at_once_and_at_most_100_mb(
    settings: dict[str, int], num_running: int, expected: int
) -> None:
    assert num_transforms(ServerConfig(**settings), num_running) == expected  # type: ignore[arg-type]


def test_execution_parameters_are_told_at_any_time(lmi: Host) -> None:
    response, body = lmi.send("GET", "/execution-parameters")
    assert (response.status, response.headers["content-type"]) == (200, "application/json")
    assert json.loads(body) == {
        "MaxConcurrentTransforms": 16,
        "BatchStrategy": "SINGLE_RECORD",
        "MaxPayloadInMB": 6,
    }
