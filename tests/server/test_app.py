"""The front end over real sockets with a scripted engine: the error table, and every end of a
request.
"""

from __future__ import annotations

import asyncio
import gc
import json
import socket
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lmi import __version__
from lmi.errors import GenerationFailed, LmiError
from lmi.executor import GuideType, RequestPerfMetrics
from lmi.runtime import ServerRuntime
from lmi.server.answer_stats import AnswerStats
from lmi.server.app import ErrorMiddleware
from lmi.server.front_end import FrontEnd
from lmi.server.service import Models
from lmi.settings.config import ServerConfig
from lmi.shared.state import Block, Phase
from lmi.types import AnswerEnd, Delta, GenerationRequest, Token
from tests.machine import measurements
from tests.scripted import CAPABILITIES, CONTEXT, STEP_S, Host, host, wait_until

ERROR_DETAILS = {"finish_reason": "error", "generated_tokens": None, "inputs": None}
STREAM_FORMATS = {
    "jsonlines": ("application/jsonlines", b"", b"\n"),
    "sse": ("text/event-stream", b"data: ", b"\n\n"),
}


@pytest.fixture(scope="module")
def lmi(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with host(tmp_path_factory.mktemp("app")) as served:
        yield served


def shape_1(body: bytes) -> tuple[str, int]:
    """The message and the code of a body that is only an error."""
    fields = json.loads(body)
    assert list(fields) == ["error", "code"]
    return fields["error"], fields["code"]


def records(body: bytes, output_format: str) -> list[dict[str, object]]:
    _, head, tail = STREAM_FORMATS[output_format]
    parts = body.split(tail)
    assert parts.pop() == b""
    assert all(part.startswith(head) for part in parts)
    return [json.loads(part.removeprefix(head)) for part in parts]


def test_a_path_with_two_slashes_is_not_found_and_says_why(lmi: Host) -> None:
    response, body = lmi.post({"prompt": "say hi"}, "//v1/completions")
    assert response.status == 404
    assert json.loads(body)["error"].endswith(
        "(a path here has single slashes, and none at its end)"
    )


MALFORMED = {
    "not JSON": (b"{'inputs': 1}", "not JSON"),
    "a trailing comma, as in the documents' own curl": (
        b'{"inputs": "say a", "stream": true, }',
        "trailing comma",
    ),
    "a list": (b'["say a"]', "must be a JSON object"),
    "not UTF-8": (b'{"inputs": "\xff"}', "UTF-8"),
    "UTF-16": ('{"inputs": "say a"}'.encode("utf-16"), ""),
    "a lone surrogate": (b'{"inputs": "\\ud800"}', ""),
    "too deep": (b'{"inputs": "say a", "x": ' + b"[" * 5000 + b"]" * 5000 + b"}", ""),
    "NaN": (b'{"inputs": "say a", "parameters": {"temperature": NaN}}', "not JSON"),
    "no inputs": (b"{}", "inputs"),
    "inputs of a wrong type": (b'{"inputs": 5}', "inputs"),
    "empty inputs": (b'{"inputs": ""}', "inputs"),
    "parameters of a wrong type": (b'{"inputs": "say a", "parameters": []}', "parameters"),
    "stream of a wrong type": (b'{"inputs": "say a", "stream": "yes"}', "stream"),
    "nothing at all": (b"", "empty"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_body_that_cannot_be_read_is_424_in_shape_1(lmi: Host, name: str) -> None:
    body, expected = MALFORMED[name]
    response, answer = lmi.post(body)
    message, code = shape_1(answer)
    assert (response.status, code, response.headers["content-type"]) == (
        424,
        424,
        "application/json",
    )
    assert expected in message


PARAMETER_FAULTS = {
    "top_p": 1.5,
    "temperature": -1,
    "max_new_tokens": -5,
    "max_new_tokens ": 10**30,
    "top_k": "many",
    "stop_sequences": ["x"] * 1000,
    "seed": 0.5,
    "n": 2,
}


@pytest.mark.parametrize("name", PARAMETER_FAULTS)
def test_a_refused_parameter_is_424_in_shape_2_and_names_the_field(lmi: Host, name: str) -> None:
    parameters = {name.strip(): PARAMETER_FAULTS[name], "do_sample": True}
    response, answer = lmi.post({"inputs": "say a", "parameters": parameters})
    fields = json.loads(answer)
    assert response.status == 424
    assert list(fields) == ["generated_text", "details", "error", "code"]
    assert fields["details"] == {**ERROR_DETAILS, "tokens": None}
    assert name.strip() in fields["error"]


@pytest.mark.parametrize("output_format", STREAM_FORMATS)
@pytest.mark.parametrize(
    ("prompt", "parameters", "status"),
    [
        ("say a", {"top_p": 2, "do_sample": True}, 424),
        ("x" * 500, {}, 424),
        ("fail", {}, 424),
        ("oom", {}, 507),
    ],
)
def test_a_stream_that_fails_before_its_first_token_has_a_real_status(
    lmi: Host, output_format: str, prompt: str, parameters: dict[str, object], status: int
) -> None:
    parameters = {**parameters, "output_formatter": output_format}
    response, answer = lmi.post({"inputs": prompt, "stream": True, "parameters": parameters})
    [record] = records(answer, output_format)

    assert (response.status, record["code"]) == (status, status)
    assert response.headers["content-type"] == STREAM_FORMATS[output_format][0]
    assert record["token"] == {"id": -1, "text": "", "log_prob": -1, "special_token": True}
    assert record["details"] == ERROR_DETAILS


@pytest.mark.parametrize("output_format", STREAM_FORMATS)
@pytest.mark.parametrize(("prompt", "code"), [("fail ab", 424), ("oom ab", 507)])
def test_a_stream_that_fails_later_ends_with_an_error_record(
    lmi: Host, output_format: str, prompt: str, code: int
) -> None:
    response, answer = lmi.post(
        {"inputs": prompt, "stream": True, "parameters": {"output_formatter": output_format}}
    )
    *good, last = records(answer, output_format)

    assert response.status == 200
    assert [record["token"]["text"] for record in good] == ["a", "b"]  # type: ignore[index]
    assert (last["code"], last["error"], last["details"]) == (
        code,
        "the script says so",
        ERROR_DETAILS,
    )


@pytest.mark.parametrize(("prompt", "code"), [("fail ab", 424), ("oom ab", 507)])
def test_a_whole_answer_that_fails_is_shape_2_with_a_real_status(
    lmi: Host, prompt: str, code: int
) -> None:
    response, answer = lmi.post({"inputs": prompt})
    assert response.status == code
    assert json.loads(answer)["code"] == code
    assert json.loads(answer)["generated_text"] == ""


def test_a_prompt_over_the_context_is_refused_with_both_numbers(lmi: Host) -> None:
    response, answer = lmi.post({"inputs": "say " + "é" * CONTEXT})
    assert response.status == 424
    assert (
        str(CONTEXT) in json.loads(answer)["error"]
        or str(CONTEXT - 1) in json.loads(answer)["error"]
    )


def test_an_answer_that_would_outgrow_the_context_is_shortened(lmi: Host) -> None:
    response, answer = lmi.post(
        {"inputs": "run abc", "parameters": {"max_new_tokens": 10**6, "details": True}}
    )
    details = json.loads(answer)["details"]
    assert (response.status, details["finish_reason"]) == (200, "length")
    assert details["generated_tokens"] == CONTEXT - len("run abc")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("POST", "/invocations/", 404),
        ("GET", "/ping/", 404),
        ("POST", "/predictions/other", 404),
        ("POST", "/predictions/scripted/7", 404),
        ("POST", "/models/other/invoke", 404),
        ("GET", "/invocations", 405),
        ("DELETE", "/ping", 405),
    ],
)
def test_unknown_paths_and_methods_are_told_in_shape_1(
    lmi: Host, method: str, path: str, status: int
) -> None:
    response, answer = lmi.send(method, path)
    assert (response.status, shape_1(answer)[1]) == (status, status)
    assert response.reason in ("Not Found", "Method Not Allowed")


@pytest.mark.parametrize(
    "path",
    [
        "/invocations",
        "/predictions/scripted",
        "/predictions/model",
        "/predictions/model/1",
        "/models/scripted/invoke",
    ],
)
def test_the_model_answers_under_each_of_its_names(lmi: Host, path: str) -> None:
    response, answer = lmi.post({"inputs": "say hi"}, path=path)
    assert (response.status, answer) == (200, b'{"generated_text": "hi"}\n')


def test_an_alias_is_a_name_too(tmp_path: Path) -> None:
    with host(tmp_path, model={"aliases": ("ensemble",)}) as served:
        assert served.post({"inputs": "say hi"}, path="/predictions/ensemble")[0].status == 200
        assert served.post({"inputs": "say hi"}, path="/predictions/other")[0].status == 404


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        (None, b'{"inputs": "say hi"}'),
        ("application/json; charset=utf-8", b'{"inputs": "say hi"}'),
        ("application/x-www-form-urlencoded", b'{"inputs": "say hi"}'),
        ("application/octet-stream", b'{"inputs": "say hi"}'),
        ("text/plain", b"say hi"),
    ],
)
def test_every_content_type_that_clients_send_is_read(
    lmi: Host, content_type: str | None, body: bytes
) -> None:
    response, answer = lmi.post(
        body, headers={"content-type": content_type} if content_type else {}
    )
    assert (response.status, answer) == (200, b'{"generated_text": "hi"}\n')


def test_a_whole_answer_has_its_length_and_a_stream_ends_with_a_newline(lmi: Host) -> None:
    response, answer = lmi.post({"inputs": "say hi"})
    assert response.headers["content-length"] == str(len(answer))
    assert "transfer-encoding" not in response.headers
    response, answer = lmi.post({"inputs": "say hi", "stream": True})
    assert answer.endswith(b"\n")


def test_one_record_is_one_chunk_on_the_wire(lmi: Host) -> None:
    body = json.dumps({"inputs": "say hello", "stream": True}).encode()
    with socket.create_connection(("127.0.0.1", lmi.port)) as raw:
        raw.sendall(
            b"POST /invocations HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: "
            b"%d\r\n\r\n" % len(body) + body
        )
        answer = b"".join(iter(lambda: raw.recv(65536), b""))

    chunks = answer.partition(b"\r\n\r\n")[2].split(b"\r\n")
    bodies = [chunk for chunk in chunks[1::2] if chunk]

    assert len(bodies) == len("hello") + 1
    assert all(json.loads(chunk)["token"] for chunk in bodies)


def test_custom_attributes_and_request_id_come_back(lmi: Host) -> None:
    sent = {
        "X-Amzn-SageMaker-Custom-Attributes": "trace=7;who=me",
        "X-Amzn-SageMaker-Inference-Id": "my-id",
    }
    for stream in (False, True):
        response, _ = lmi.post({"inputs": "say hi", "stream": stream}, headers=sent)
        assert response.headers["x-amzn-sagemaker-custom-attributes"] == "trace=7;who=me"
        assert response.headers["x-request-id"] == "my-id"


def test_headers_that_could_do_harm_are_not_echoed(lmi: Host) -> None:
    sent = {"X-Amzn-SageMaker-Custom-Attributes": "x" * 1025, "X-Request-Id": "two words"}
    response, _ = lmi.post({"inputs": "say hi"}, headers=sent)

    assert "x-amzn-sagemaker-custom-attributes" not in response.headers
    assert len(response.headers["x-request-id"]) == 32
    assert sum(len(name) + len(value) + 4 for name, value in response.headers.items()) < 4096


def test_a_compressed_body_is_415(lmi: Host) -> None:
    response, answer = lmi.post(b"x", headers={"content-encoding": "gzip"})
    assert (response.status, shape_1(answer)[1]) == (415, 415)


@pytest.mark.parametrize(
    "fields", [("identity", "gzip"), ("gzip", "identity"), ("identity, gzip",)]
)
def test_every_coding_of_a_body_counts(lmi: Host, fields: tuple[str, ...]) -> None:
    answer = say(lmi, b"".join(b"Content-Encoding: %b\r\n" % field.encode() for field in fields))
    assert answer.startswith(b"HTTP/1.1 415 ") and b"gzip" in answer


def test_a_body_of_identities_is_read(lmi: Host) -> None:
    fields = b"Content-Encoding: identity\r\nContent-Encoding: Identity,identity\r\n"
    assert say(lmi, fields).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "path", ["/invocations", "/v1/completions", "/generate", "/v2/models/scripted/generate"]
)
def test_a_form_in_parts_is_415_at_every_json_api(lmi: Host, path: str) -> None:
    form = b'--x\r\nContent-Disposition: form-data; name="inputs"\r\n\r\nsay hi\r\n--x--\r\n'
    response, answer = lmi.post(
        form, path, headers={"content-type": "multipart/form-data; boundary=x"}
    )
    assert response.status == 415
    assert b"content-type must be application/json" in answer and b"multipart/form-data" in answer


def test_an_announced_body_over_the_limit_is_413_before_it_is_asked_for(lmi: Host) -> None:
    """No 100 is sent, and the connection closes although no part of the body came."""
    answer = say(lmi, b"Expect: 100-continue\r\n", num_bytes=100_000_000)
    assert answer.startswith(b"HTTP/1.1 413 ") and answer.count(b"HTTP/1.1") == 1
    assert b"connection: close" in answer.lower()


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("line", [b"ffffffffffffffff", b"3b9aca00;a=b", b"00000003B9ACA00"])
def test_a_chunk_over_the_limit_is_413_before_it_has_come(
    lmi: Host, line: bytes, pieces: int
) -> None:
    head = b"POST /invocations HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunk = b"2\r\n{}\r\n" + line + b"\r\nabc"
    with socket.create_connection(("127.0.0.1", lmi.port), timeout=5) as raw:
        for piece in [head + chunk] if pieces == 1 else [head, chunk]:
            raw.sendall(piece)

        answer = raw.recv(65536)
        while b"max_request_size" not in answer:
            answer += raw.recv(65536)

    assert answer.startswith(b"HTTP/1.1 413 ")


def test_a_chunk_whose_line_comes_by_itself_is_413_before_it_has_come(lmi: Host) -> None:
    head = b"POST /invocations HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
    with socket.create_connection(("127.0.0.1", lmi.port), timeout=5) as raw:
        raw.sendall(head + b"Expect: 100-continue\r\n\r\n")
        assert raw.recv(65536).startswith(b"HTTP/1.1 100 ")

        # Nothing stands before the line in what is read now.
        raw.sendall(b"3b9aca00\r\nabc")
        answer = raw.recv(65536)
        while b"max_request_size" not in answer:
            answer += raw.recv(65536)

    assert answer.startswith(b"HTTP/1.1 413 ")


def say(lmi: Host, fields: bytes, num_bytes: int | None = None) -> bytes:
    """Send a request with these header fields and return what comes until the connection closes.

    `num_bytes`: the size of a body that the request announces and does not send.
    """
    body = b'{"inputs": "say hi"}' if num_bytes is None else b""
    end = b"Connection: close\r\n" if num_bytes is None else b""
    head = b"POST /invocations HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n" % (
        num_bytes or len(body)
    )
    with socket.create_connection(("127.0.0.1", lmi.port), timeout=60) as raw:
        raw.sendall(head + fields + end + b"\r\n" + body)
        return b"".join(iter(lambda: raw.recv(65536), b""))


def test_ping_answers_every_way_it_is_asked(lmi: Host) -> None:
    for method in ("GET", "POST"):
        response, answer = lmi.send(method, "/ping")
        assert (response.status, answer) == (200, b'{"status":"Healthy"}')

    response, answer = lmi.send("HEAD", "/ping")
    assert (response.status, answer) == (200, b"")


@pytest.mark.parametrize(
    ("phase", "ready", "live"),
    [(Phase.READY, 200, 200), (Phase.DRAINING, 503, 200), (Phase.FAILED, 500, 500)],
)
def test_probes_of_kubernetes_tell_a_server_that_waits_from_one_that_failed(
    tmp_path: Path, phase: Phase, ready: int, live: int
) -> None:
    with host(tmp_path) as lmi:
        lmi.server_block.supervisor.phase = phase
        expected = {"/healthz": ready, "/readyz": ready, "/livez": live}
        assert {path: lmi.send("GET", path)[0].status for path in expected} == expected


def test_an_error_in_a_stream_shows_in_the_metrics(lmi: Host) -> None:
    before = dict(lmi.block.frontends[0].num_finished.items())["error"]
    lmi.post({"inputs": "fail ab", "stream": True})
    assert dict(lmi.block.frontends[0].num_finished.items())["error"] == before + 1


def open_stream(lmi: Host, prompt: str, **fields: object) -> socket.socket:
    """A connection on which a request is sent and nothing of the answer is read."""
    raw = socket.create_connection(("127.0.0.1", lmi.port))
    ask(raw, prompt, **fields)
    return raw


def ask(raw: socket.socket, prompt: str, **fields: object) -> None:
    fields = {"stream": True, "parameters": {"max_new_tokens": 150}, **fields}
    body = json.dumps({"inputs": prompt, **fields}).encode()
    raw.sendall(
        b"POST /invocations HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    )


def test_version_and_load_are_told_in_the_form_of_vllm(lmi: Host) -> None:
    def load() -> object:
        return json.loads(lmi.send("GET", "/load")[1])

    assert json.loads(lmi.send("GET", "/version")[1]) == {"version": __version__}
    with open_stream(lmi, "run a"):
        wait_until(lambda: load() == {"server_load": 1})

    wait_until(lambda: load() == {"server_load": 0})


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("prompt", ["hang", "hang abc"])
@pytest.mark.parametrize("num_behind", [0, 1, 2])
def test_a_client_that_leaves_frees_the_engine(
    lmi: Host, stream: bool, prompt: str, num_behind: int
) -> None:
    num_cancelled = len(lmi.executor.cancelled)
    raw = open_stream(lmi, prompt, stream=stream)
    wait_until(lambda: lmi.executor.num_active == 1)
    # Requests that wait on the same connection
    for _ in range(num_behind):
        ask(raw, prompt, stream=stream)

    raw.close()
    wait_until(lambda: lmi.executor.num_active == 0)
    assert len(lmi.executor.cancelled) == num_cancelled + 1
    wait_until(lambda: lmi.server_block.frontends[0].num_in_flight == 0)


def test_a_stop_string_ends_the_engines_work_too(lmi: Host) -> None:
    response, answer = lmi.post(
        {"inputs": "run ab STOP ", "parameters": {"stop_sequences": ["STOP"], "details": True}}
    )
    fields = json.loads(answer)
    assert (fields["generated_text"], fields["details"]["finish_reason"]) == (
        "ab ",
        "stop_sequence",
    )
    wait_until(lambda: lmi.executor.num_active == 0)


def test_neighbours_of_a_failing_request_are_unharmed(lmi: Host) -> None:
    streams = [open_stream(lmi, "run abc") for _ in range(8)]
    for prompt in ("fail xy", "oom"):
        lmi.post({"inputs": prompt, "stream": True})

    for raw in streams:
        with raw:
            text = b""
            while b"0\r\n\r\n" not in text:
                text += raw.recv(65536)

            assert text.count(b'"token"') == 150


def test_a_full_queue_is_503_with_retry_after_and_ping_stays_healthy(tmp_path: Path) -> None:
    with host(tmp_path, server={"job_queue_size": 1}) as lmi:
        wait_until(lambda: lmi.block.engines[0].max_num_sequences == 64)
        streams = [open_stream(lmi, "hang") for _ in range(65)]
        wait_until(lambda: lmi.server_block.frontends[0].num_in_flight == 65)
        response, answer = lmi.post({"inputs": "say hi"})

        assert (response.status, shape_1(answer)[1]) == (503, 503)
        assert int(response.headers["retry-after"]) >= 1
        assert lmi.send("GET", "/ping")[0].status == 200

        for raw in streams:
            raw.close()

        wait_until(lambda: lmi.server_block.frontends[0].num_in_flight == 0)
        assert lmi.post({"inputs": "say hi"})[0].status == 200


def test_a_body_over_the_limit_is_413_and_names_it(tmp_path: Path) -> None:
    with host(tmp_path, server={"max_request_size": 1000}) as lmi:
        # Announced, and in chunks
        for body in (b"x" * 2000, iter([b"x" * 100] * 20)):
            response, answer = lmi.send("POST", "/invocations", body, {})
            assert (response.status, shape_1(answer)[1]) == (413, 413)
            assert b"1000" in answer


def test_a_client_that_sends_all_of_a_refused_body_still_gets_the_answer(tmp_path: Path) -> None:
    with host(tmp_path) as lmi:
        response, answer = lmi.post(b"x" * 100_000_000)
        assert (response.status, shape_1(answer)[1]) == (413, 413)


@pytest.mark.parametrize(("prompt", "status"), [("hang", 504), ("hang ab", 200)])
def test_the_deadline_ends_a_request_with_504_or_an_error_record(
    tmp_path: Path, prompt: str, status: int
) -> None:
    with host(tmp_path, server={"predict_timeout_s": 2}) as lmi:
        response, answer = lmi.post({"inputs": prompt, "stream": True})
        assert response.status == status
        assert records(answer, "jsonlines")[-1]["code"] == 504
        wait_until(lambda: lmi.executor.num_active == 0)


@pytest.mark.parametrize(
    ("phase", "word"), [(Phase.LOADING, "Loading"), (Phase.LOST, "Restarting")]
)
def test_no_engine_is_503_and_ping_says_why(tmp_path: Path, phase: Phase, word: str) -> None:
    with host(tmp_path) as lmi:
        engine = lmi.block.engines[0]
        engine.phase = phase
        engine.stage = "weights"
        engine.progress = 0.5
        if phase is Phase.LOST:
            engine.reason = "killed by signal 9"

        lmi.executor.lost.set()
        engine.phase = phase
        response, answer = lmi.send("GET", "/ping")
        fields = json.loads(answer)

        assert (response.status, fields["status"], fields["stage"], fields["progress"]) == (
            503,
            word,
            "weights",
            0.5,
        )

        wait_until(lambda: lmi.post({"inputs": "say hi"})[0].status == 503)
        assert shape_1(lmi.post({"inputs": "say hi"})[1])[1] == 503


def test_draining_refuses_new_requests_and_turns_ping_503(tmp_path: Path) -> None:
    with host(tmp_path) as lmi:
        lmi.server_block.supervisor.phase = Phase.DRAINING
        response, answer = lmi.post({"inputs": "say hi"})
        assert (response.status, shape_1(answer)[1]) == (503, 503)
        assert lmi.send("GET", "/ping")[0].status == 503


def test_a_server_that_leaves_serves_on_while_ping_is_503(tmp_path: Path) -> None:
    with host(tmp_path) as lmi:
        lmi.server_block.supervisor.phase = Phase.LEAVING
        assert lmi.post({"inputs": "say hi"})[0].status == 200
        assert [
            lmi.send("GET", path)[0].status for path in ("/ping", "/health", "/v2/health/ready")
        ] == [503] * 3
        assert lmi.send("GET", "/v2/health/live")[0].status == 200


@pytest.mark.parametrize("phase", [Phase.LEAVING, Phase.DRAINING])
def test_a_server_whose_port_another_has_answers_the_connections_that_it_has(
    tmp_path: Path, phase: Phase
) -> None:
    with host(tmp_path) as lmi:
        lmi.server_block.supervisor.heir = 7
        lmi.server_block.supervisor.phase = phase
        assert lmi.post({"inputs": "say hi"})[0].status == 200
        assert lmi.send("GET", "/ping")[0].status == 200


def test_a_proxy_can_tell_a_server_that_ends_from_one_with_too_much_to_do(tmp_path: Path) -> None:
    with host(tmp_path, server={"job_queue_size": 1}) as lmi:
        lmi.block.frontends[0].num_sequences += 1 + lmi.block.engines[0].max_num_sequences
        for path in ("/invocations", "/v1/completions", "/generate"):
            response, _ = lmi.post({"inputs": "say hi", "prompt": "say hi"}, path)
            refused = response.headers["x-lmi-refusal"], response.headers["x-envoy-overloaded"]
            assert refused == ("overloaded", "true") and response.headers["retry-after"] == "1"

        lmi.server_block.supervisor.phase = Phase.DRAINING
        for path in ("/invocations", "/v1/completions", "/generate", "/adapters"):
            response, _ = lmi.post({"inputs": "say hi", "prompt": "say hi"}, path)
            headers_told = (
                response.headers["x-lmi-refusal"],
                response.headers["x-envoy-immediate-health-check-fail"],
            )

            assert (response.status, *headers_told) == (503, "draining", "true")
            assert "x-envoy-overloaded" not in response.headers


def test_a_failed_server_turns_ping_500_and_says_why(tmp_path: Path) -> None:
    with host(tmp_path) as lmi:
        lmi.server_block.supervisor.phase = Phase.FAILED
        lmi.server_block.supervisor.reason = "the engine died 3 times"
        response, answer = lmi.send("GET", "/ping")
        assert (response.status, json.loads(answer)["reason"]) == (500, "the engine died 3 times")


@pytest.mark.parametrize(("stream", "status"), [(True, 200), (False, 503)])
def test_a_lost_engine_ends_every_request_at_once(
    tmp_path: Path, stream: bool, status: int
) -> None:
    with host(tmp_path) as lmi:
        response, answer = lmi.post({"inputs": "lose ab", "stream": stream})
        assert response.status == status
        last = records(answer, "jsonlines")[-1] if stream else json.loads(answer)
        assert last["code"] == 503
        assert last["details"]["finish_reason"] == "error"


def test_a_deadline_frees_the_engine_however_slowly_the_client_reads(tmp_path: Path) -> None:
    parameters = {"max_new_tokens": 100, "logprobs": 5}
    body = json.dumps({"inputs": "flood abc", "stream": True, "parameters": parameters}).encode()
    with host(tmp_path, server={"predict_timeout_s": 2.0}) as lmi:
        for measurement in measurements():
            with socket.socket() as raw:
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
                raw.connect(("127.0.0.1", lmi.port))
                raw.sendall(
                    b"POST /invocations HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
                    % len(body)
                    + body
                )
                wait_until(lambda: lmi.executor.num_active == 1)
                with measurement.within(4):
                    wait_until(lambda: lmi.executor.num_active == 0)


def test_a_body_that_does_not_end_takes_no_place_in_the_queue(tmp_path: Path) -> None:
    with host(tmp_path, server={"job_queue_size": 1}) as lmi:
        head = b"POST /invocations HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
        unfinished = [socket.create_connection(("127.0.0.1", lmi.port)) for _ in range(80)]
        for raw in unfinished:
            raw.sendall(head)

        assert lmi.post({"inputs": "say hi"})[0].status == 200
        for raw in unfinished:
            raw.close()


UNFINISHED = {"announced": b"Content-Length: 1000000", "chunked": b"Transfer-Encoding: chunked"}


def send_unfinished(lmi: Host, kind: str) -> socket.socket:
    """A connection on which 900 KB of a body of at most a megabyte are sent."""
    raw = socket.create_connection(("127.0.0.1", lmi.port), 60)
    data = bytes(900_000) if kind == "announced" else b"%x\r\n%b\r\n" % (900_000, bytes(900_000))
    raw.sendall(b"POST /invocations HTTP/1.1\r\nHost: x\r\n%b\r\n\r\n" % UNFINISHED[kind] + data)
    return raw


@pytest.mark.parametrize("kind", UNFINISHED)
def test_bodies_over_their_memory_are_503_and_small_ones_are_served_beside_them(
    tmp_path: Path, kind: str
) -> None:
    with host(
        tmp_path, server={"max_request_size": 1_000_000, "max_body_memory": 2_000_000}
    ) as lmi:
        record = lmi.server_block.frontends[0]
        unfinished = [send_unfinished(lmi, kind) for _ in range(2)]
        wait_until(lambda: record.num_body_bytes == 1_800_000)
        with send_unfinished(lmi, kind) as another:
            refused = b"".join(iter(lambda: another.recv(65536), b""))

        assert refused.startswith(b"HTTP/1.1 503 ") and b"retry-after: 1" in refused.lower(), (
            refused
        )
        assert b"2000000" in refused and b"max_body_memory" in refused
        assert lmi.post({"inputs": "say hi"})[0].status == 200

        for raw in unfinished:
            raw.close()

        wait_until(lambda: record.num_body_bytes == 0)
        assert lmi.post(b'{"inputs": "%b"}' % bytes(b"a" * 999_000))[0].status == 424, (
            "it is not read"
        )

        wait_until(lambda: record.num_body_bytes == 0)


def test_a_short_request_holds_its_body_until_it_has_ended_and_its_frame_until_the_first_token(
    tmp_path: Path,
) -> None:
    body = b'{"inputs": "hang abc", "stream": true, "parameters": {"max_new_tokens": 150}}'
    with host(tmp_path) as lmi:
        with open_stream(lmi, "hang abc") as raw:
            assert raw.recv(15) == b"HTTP/1.1 200 OK"
            assert lmi.server_block.frontends[0].num_body_bytes == len(body)

        wait_until(lambda: lmi.server_block.frontends[0].num_body_bytes == 0)


def test_a_long_body_is_not_held_once_its_request_is_encoded(tmp_path: Path) -> None:
    """What counts until the first token is the frame, and then what the answer needs."""
    guides = msgspec.structs.replace(CAPABILITIES, guided_decoding=(GuideType.REGEX,))
    with host(tmp_path, server={"max_request_size": 1_000_000}, capabilities=guides) as lmi:
        record = lmi.server_block.frontends[0]
        parameters = {"max_new_tokens": 150, "guided_regex": "a" * 50_000}
        with open_stream(lmi, "hang", parameters=parameters, more=["another name"] * 10_000):
            wait_until(lambda: lmi.executor.num_active == 1)
            assert 50_000 < record.num_body_bytes < 52_000

        with open_stream(lmi, "hang abc", parameters=parameters) as raw:
            assert raw.recv(15) == b"HTTP/1.1 200 OK"
            assert record.num_body_bytes < 2_000

        wait_until(lambda: record.num_body_bytes == 0)


@pytest.mark.parametrize("details", [False, True])
def test_a_long_prompt_of_which_few_tokens_are_kept_counts_where_its_answer_shows_it(
    lmi: Host, details: bool
) -> None:
    record = lmi.server_block.frontends[0]
    prompt = "abc " * 5_000 + "hang"
    num_bytes = len(prompt) if details else 0
    with open_stream(lmi, prompt, parameters={"truncate": 4, "details": details}):
        wait_until(lambda: lmi.executor.num_active == 1)
        wait_until(lambda: num_bytes <= record.num_body_bytes < num_bytes + 2_000)

    wait_until(lambda: record.num_body_bytes == 0)


def test_a_refused_prompt_is_freed_without_the_collector(lmi: Host) -> None:
    """A cycle of an error and its frames would hold prompts of megabytes for minutes."""
    lmi.post({"inputs": "say hi"})
    gc.collect()
    gc.disable()
    try:
        lmi.post({"inputs": "x" * 500})
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()

        assert not [
            leftover
            for leftover in gc.garbage
            if isinstance(leftover, LmiError | GenerationRequest)
        ]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def test_many_bad_sequences_do_not_hold_up_the_neighbours(lmi: Host) -> None:
    words = [f"{n}" * 200 for n in range(1000)]
    for measurement in measurements():
        with ThreadPoolExecutor() as pool:
            request = pool.submit(
                lmi.post, {"inputs": "say hi", "parameters": {"bad_sequences": words}}
            )
            while not request.done():
                with measurement.within(0.25):
                    lmi.send("GET", "/ping")

            assert request.result()[0].status == 200


def test_bad_words_of_several_prompts_are_spelled_once(lmi: Host) -> None:
    lmi.tokenizer.spelled.clear()
    response, _ = lmi.post(
        {"prompt": ["say a", "say b", "say c"], "bad_words": ["no", "never"]}, "/v1/completions"
    )
    assert (response.status, lmi.tokenizer.spelled) == (200, ["no", "never"])
    words = {request.bad_words for request in lmi.executor.requests[-3:]}
    assert len(words) == 1 and tuple(b"never") in words.pop()


@pytest.mark.parametrize("more", [{}, {"stop": "x"}, {"prompt": ["run a", "run b"]}], ids=str)
def test_a_whole_answer_is_timed_as_a_stream_is(lmi: Host, more: dict[str, object]) -> None:
    record = lmi.block.frontends[0]
    views = record.time_to_first_token_s, record.inter_token_latency_s

    def ask(**options: bool) -> list[tuple[int, float]]:
        before = [(sum(view.counts), view.sum) for view in views]
        body = {"prompt": "run hi", "max_tokens": 9} | more | options
        assert lmi.post(body, "/v1/completions")[0].status == 200

        return [
            (sum(view.counts) - num, view.sum - s)
            for view, (num, s) in zip(views, before, strict=True)
        ]

    (num_firsts, first_s), (num_gaps, gaps_s) = ask()
    assert num_firsts == 1 and num_gaps == (16 if "prompt" in more else 8)
    assert first_s > 0 and gaps_s > (0 if "stop" in more else num_gaps * STEP_S)
    assert ask(stream=True)[0][0] == 1


def test_tokens_that_an_engine_gives_all_at_once_are_not_timed(lmi: Host) -> None:
    record = lmi.block.frontends[0]
    views = record.time_to_first_token_s, record.inter_token_latency_s
    before = [sum(view.counts) for view in views]
    for last_s in (2.0, 2.5):
        times = RequestPerfMetrics(arrival_time=1.0, first_token_time=2.0, last_token_time=last_s)
        with AnswerStats(record, 1.0, defaultdict(int), [], "m") as stats:
            stats.count(Delta([Token(1, "a"), Token(2, "b")], AnswerEnd.LENGTH, times=times))

    assert [sum(view.counts) - num for view, num in zip(views, before, strict=True)] == [1, 1]


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (GenerationFailed("full"), "error"),
        (ZeroDivisionError("a bug"), "error"),
        (asyncio.CancelledError(), "cancelled"),
    ],
)
def test_an_answer_that_a_bug_ends_counts_as_an_error(
    lmi: Host, error: BaseException, outcome: str
) -> None:
    stats = AnswerStats(lmi.block.frontends[0], 1.0, defaultdict(int), [], "m")
    with pytest.raises(type(error)), stats:
        raise error

    assert stats.outcome == outcome


def test_tgi_compat_answers_arrays_and_events(tmp_path: Path) -> None:
    with host(tmp_path, model={"tgi_compat": True}) as lmi:
        _, answer = lmi.post({"inputs": "say hi"})
        [whole] = json.loads(answer)

        assert whole["generated_text"] == "hi"
        assert whole["details"]["tokens"][0] == {
            "id": 104,
            "text": "h",
            "logprob": -0.5,
            "special": False,
        }

        response, answer = lmi.post({"inputs": "say hi", "stream": True})
        assert response.headers["content-type"] == "text/event-stream"
        assert records(answer, "sse")[-1]["generated_text"] == "hi"

        response, answer = lmi.post(
            {"inputs": "say hi", "parameters": {"top_p": 5, "do_sample": True}}
        )

        assert (response.status, json.loads(answer)["error_type"]) == (424, "validation")


def test_a_configured_formatter_beats_stream(tmp_path: Path) -> None:
    with host(tmp_path, model={"output_formatter": "sse"}) as lmi:
        response, answer = lmi.post({"inputs": "say hi"})
        assert response.headers["content-type"] == "text/event-stream"
        assert records(answer, "sse")[-1]["generated_text"] == "hi"


def test_a_fault_of_the_front_end_is_told_in_the_log_and_its_client_learns_only_where(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(*_: object) -> None:
        raise RuntimeError("no room in /opt/ml/secret")

    block = Block.create(tmp_path / "server", 0, 1)
    sent = []

    async def send(message: Any) -> None:
        sent.append(message)

    app = ErrorMiddleware(
        broken, Models(FrontEnd(ServerRuntime(tmp_path, ServerConfig()), block, block.frontends[0]))
    )
    headers = [(b"x-request-id", b"one")]
    asyncio.run(
        app(
            {"type": "http", "method": "POST", "path": "/invocations", "headers": headers},
            broken,
            send,
        )
    )

    assert sent[0]["status"] == 500
    assert shape_1(sent[1]["body"]) == ("internal error, see the log for request one", 500)
    assert "request one failed in the front end" in caplog.text and "/opt/ml/secret" in caplog.text
