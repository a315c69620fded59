"""Triton's API over real sockets: both URLs, streams, errors before and in them, and the routes
around the API.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from lmi import __version__
from lmi.apis.triton.inputs import INPUTS
from lmi.shared.state import Phase
from tests.scripted import CONTEXT, Host, host

GENERATE = "/v2/models/scripted/generate"
STREAM = "/v2/models/scripted/generate_stream"
SSE = "text/event-stream; charset=utf-8"
HEAD = {"model_name": "scripted", "model_version": "1"}


@pytest.fixture(scope="module")
def lmi(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with host(tmp_path_factory.mktemp("triton"), model={"aliases": ("ensemble",)}) as served:
        yield served


def events(body: bytes) -> list[dict[str, Any]]:
    parts = body.split(b"\n\n")
    assert parts.pop() == b""
    assert all(part.startswith(b"data: ") and b"\n" not in part for part in parts)
    return [json.loads(part.removeprefix(b"data: ")) for part in parts]


def error(body: bytes) -> str:
    fields = json.loads(body)
    assert list(fields) == ["error"]
    return str(fields["error"])


def test_generate_answers_one_object(lmi: Host) -> None:
    response, body = lmi.post(
        {"id": "42", "text_input": "say hi", "parameters": {"temperature": 0}}, GENERATE
    )
    assert (response.status, response.headers["content-type"]) == (200, "application/json")
    assert body == b'{"id":"42","model_name":"scripted","model_version":"1","text_output":"hi"}'
    assert lmi.post({"text_input": "say hi", "stream": True}, GENERATE)[1] == body.replace(
        b'"id":"42",', b""
    )


def test_generate_stream_answers_an_event_for_each_piece_and_no_end_mark(lmi: Host) -> None:
    response, body = lmi.post({"id": "42", "text_input": "say hé"}, STREAM)
    assert (response.status, response.headers["content-type"]) == (200, SSE)
    events_read = events(body)
    assert [event["text_output"] for event in events_read] == ["h", "", "é", ""]
    assert all(
        {**event, "text_output": ""} == {"id": "42", **HEAD, "text_output": ""}
        for event in events_read
    )


def test_a_stream_that_is_not_wanted_is_one_event_with_the_whole_text(lmi: Host) -> None:
    for body in ({"stream": False}, {"parameters": {"stream": False}}, {"streaming": [False]}):
        response, answer = lmi.post({"text_input": "say hi", **body}, STREAM)
        assert (response.status, response.headers["content-type"]) == (200, SSE)
        assert events(answer) == [{**HEAD, "text_output": "hi"}]


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"max_tokens": 3},
        {"stop_words": ["lo"]},
        {"parameters": {"stop": "xyz"}},
        {"return_log_probs": True, "return_finish_reason": True},
    ],
)
def test_the_text_of_a_stream_is_the_text_of_the_whole_answer(
    lmi: Host, asked: dict[str, Any]
) -> None:
    body = {"text_input": "say hello wörld", **asked}
    whole = json.loads(lmi.post(body, GENERATE)[1])
    streamed = events(lmi.post(body, STREAM)[1])

    assert "".join(event["text_output"] for event in streamed) == whole["text_output"]
    assert streamed[-1].get("finish_reason") == whole.get("finish_reason")
    assert streamed[-1].get("cum_log_probs") == whole.get("cum_log_probs")


def test_an_event_arrives_before_the_next_exists(lmi: Host) -> None:
    body = json.dumps({"text_input": "hang ab"}).encode()
    with socket.create_connection(("127.0.0.1", lmi.port), timeout=60) as raw:
        raw.sendall(
            b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b"
            % (STREAM.encode(), len(body), body)
        )
        data_read = b""
        while data_read.count(b"data: ") < 2:
            data_read += raw.recv(4096)

        assert b'"text_output":"b"}\n\n' in data_read


FAULTS = {
    "not JSON": (b"{'text_input': 1}", "failed to parse the request JSON buffer: "),
    "no text_input": (b"{}", "missing required input(s) ['text_input']"),
    "a prompt over the context": (
        b'{"text_input": "say %b"}' % (b"a" * CONTEXT),
        "input 'text_input' must be",
    ),
    "too many log-probs": (
        b'{"text_input": "say a", "return_logprobs": true, "logprobs": 6}',
        "input 'logprobs' must",
    ),
    "a token that is not there": (
        b'{"text_input": "say a", "stop_token_ids": [999]}',
        "input 'stop_token_ids' must",
    ),
    "a guide": (
        b'{"text_input": "say a", "guided_decoding_guide_type": "json"}',
        "input 'guided_decoding_guide_type'",
    ),
}


@pytest.mark.parametrize("path", [GENERATE, STREAM])
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_client_is_400_on_both_urls(lmi: Host, path: str, name: str) -> None:
    body, words = FAULTS[name]
    response, answer = lmi.post(body, path)
    assert (response.status, response.headers["content-type"]) == (400, "application/json")
    assert words in error(answer)


@pytest.mark.parametrize("path", [GENERATE, STREAM])
@pytest.mark.parametrize(("prompt", "status"), [("fail", 500), ("oom", 507)])
def test_a_failure_before_the_first_token_has_a_real_status_on_both_urls(
    lmi: Host, path: str, prompt: str, status: int
) -> None:
    response, answer = lmi.post({"text_input": prompt}, path)
    assert (response.status, response.headers["content-type"]) == (status, "application/json")
    assert error(answer) == "the script says so"


@pytest.mark.parametrize(("prompt", "status"), [("fail ab", 500), ("oom ab", 507)])
def test_a_later_failure_is_the_last_event_of_a_stream_and_the_status_of_a_whole_answer(
    lmi: Host, prompt: str, status: int
) -> None:
    response, answer = lmi.post({"text_input": prompt, "id": "1"}, STREAM)
    *good, last = events(answer)

    assert (response.status, last) == (200, {"error": "the script says so"})
    assert [event["text_output"] for event in good] == ["a", "b"]

    response, answer = lmi.post({"text_input": prompt}, GENERATE)
    assert (response.status, error(answer)) == (status, "the script says so")


@pytest.mark.parametrize("path", [GENERATE, STREAM])
@pytest.mark.parametrize(("prompt", "status"), [("lose", 503), ("lose ab", 200)])
def test_a_lost_engine_is_told_as_json_before_the_first_event_and_as_an_event_after_it(
    tmp_path: Path, path: str, prompt: str, status: int
) -> None:
    with host(tmp_path) as served:
        response, answer = served.post({"text_input": prompt}, path)
        if path == GENERATE or status == 503:
            assert (response.status, response.headers["content-type"]) == (503, "application/json")
            assert "engine" in error(answer)
        else:
            assert (response.status, list(events(answer)[-1])) == (200, ["error"])


def test_a_full_server_tells_when_to_come_back(tmp_path: Path) -> None:
    with host(tmp_path, server={"job_queue_size": 1}) as served:
        served.block.engines[0].max_num_sequences = 0
        served.block.frontends[0].num_sequences = 1
        response, answer = served.post({"text_input": "say a"}, STREAM)
        served.block.frontends[0].num_sequences = 0
        assert (response.status, response.headers["retry-after"]) == (503, "1")
        assert "in flight" in error(answer)


@pytest.mark.parametrize(
    ("method", "path", "status", "words"),
    [
        ("GET", GENERATE, 405, "Method Not Allowed"),
        ("PUT", STREAM, 405, "Method Not Allowed"),
        ("GET", "/v2/models/other/generate", 405, "Method Not Allowed"),
        ("POST", "/v2", 405, "Method Not Allowed"),
        ("POST", "/v2/models/other/generate", 404, "Request for unknown model: no model 'other'"),
        (
            "POST",
            "/v2/models/other/generate_stream",
            404,
            "Request for unknown model: no model 'other'",
        ),
        (
            "POST",
            "/v2/models/scripted/versions/7/generate",
            404,
            "Request for unknown model: no version '7'",
        ),
        (
            "POST",
            "/v2/models/scripted/versions/x/generate_stream",
            404,
            "Request for unknown model: no version 'x'",
        ),
        ("GET", "/v2/models/other", 404, "Request for unknown model"),
        ("GET", "/v2/models/other/ready", 404, "Request for unknown model"),
        ("GET", "/v2/models/scripted/versions/2/stats", 404, "Request for unknown model"),
        (
            "POST",
            "/v2/models/scripted/infer",
            404,
            "infer is not served here, generate and generate_stream are",
        ),
        ("GET", "/v2/models/scripted/config", 404, "config is not served here"),
        ("POST", f"{GENERATE}/", 404, "Not Found"),
        ("GET", "/v2/models", 404, "Not Found"),
    ],
)
def test_what_is_not_there_is_told_in_the_api_s_own_form(
    lmi: Host, method: str, path: str, status: int, words: str
) -> None:
    response, answer = lmi.send(method, path, b'{"text_input": "say hi"}')
    assert (response.status, response.headers["content-type"]) == (status, "application/json")
    assert words in error(answer)
    assert (response.headers["allow"] is not None) == (status == 405)


@pytest.mark.parametrize("name", ["scripted", "model", "ensemble"])
@pytest.mark.parametrize("version", ["", "/versions/1"])
def test_the_model_answers_by_the_name_that_the_path_has(
    lmi: Host, name: str, version: str
) -> None:
    for route in ("generate", "generate_stream"):
        response, answer = lmi.post(
            {"text_input": "say a", "stream": False}, f"/v2/models/{name}{version}/{route}"
        )
        fields = json.loads(answer.removeprefix(b"data: "))
        assert (response.status, fields["model_name"], fields["model_version"]) == (200, name, "1")


@pytest.mark.parametrize(
    "content_type", [None, "application/x-www-form-urlencoded", "text/plain", "image/png"]
)
def test_the_content_type_of_a_request_is_not_looked_at(
    lmi: Host, content_type: str | None
) -> None:
    headers = {"content-type": content_type, "accept": "text/html"} if content_type else {}
    response, answer = lmi.post(b'\xef\xbb\xbf {"text_input": "say hi"}\n', GENERATE, headers)
    assert (response.status, json.loads(answer)["text_output"]) == (200, "hi")


def test_the_server_and_the_model_tell_what_they_are(lmi: Host) -> None:
    for path in ("/v2", "/v2/"):
        answer = json.loads(lmi.send("GET", path)[1])
        assert answer == {
            "name": "lmi",
            "version": __version__,
            "extensions": ["generate", "statistics"],
        }

    model = json.loads(lmi.send("GET", "/v2/models/scripted/versions/1")[1])
    assert (model["name"], model["versions"], model["platform"]) == ("scripted", ["1"], "lmi-dist")

    inputs = {tensor.pop("name"): tensor for tensor in model["inputs"]}
    assert inputs["text_input"] == {"datatype": "BYTES", "shape": [1]}
    assert inputs["stop_words"] == {"datatype": "BYTES", "shape": [-1]}
    assert inputs["stop_token_ids"] == {"datatype": "INT32", "shape": [-1]}
    assert inputs["random_seed"] == {"datatype": "UINT64", "shape": [1]}
    assert inputs["top_p"]["datatype"] == "FP32" and inputs["stream"]["datatype"] == "BOOL"
    assert inputs.keys() == set(INPUTS)
    assert {"name": "text_output", "datatype": "BYTES", "shape": [-1]} in model["outputs"]
    assert json.loads(lmi.send("POST", "/v2/repository/index")[1]) == [
        {"name": "scripted", "version": "1", "state": "READY"}
    ]


@pytest.mark.parametrize(
    "path", ["/v2/health/live", "/v2/health/ready", "/v2/models/ensemble/ready"]
)
def test_health_is_an_empty_200(lmi: Host, path: str) -> None:
    for method in ("GET", "HEAD"):
        response, body = lmi.send(method, path)
        assert (response.status, body) == (200, b"")


def test_health_says_what_ping_says(tmp_path: Path) -> None:
    with host(tmp_path) as served:
        states = [(Phase.LOADING, Phase.READY, 503, 200), (Phase.READY, Phase.DRAINING, 503, 200)]
        for engine, supervisor, ready, live in [*states, (Phase.FAILED, Phase.FAILED, 500, 500)]:
            served.block.engines[0].phase = engine
            served.server_block.supervisor.phase = supervisor
            for path, status in (
                ("/ping", ready),
                ("/v2/health/ready", ready),
                ("/v2/models/model/ready", ready),
                ("/v2/health/live", live),
            ):
                assert served.send("GET", path)[0].status == status

        [entry] = json.loads(served.send("POST", "/v2/repository/index")[1])
        assert entry["state"] == "UNAVAILABLE"


def test_statistics_count_what_ended_and_how(tmp_path: Path) -> None:
    with host(tmp_path) as served:
        for prompt in ("say a", "say b", "fail"):
            served.post({"text_input": prompt}, GENERATE)

        for _ in range(20):
            served.send("GET", "/v2/health/ready")

        [counts] = json.loads(served.send("GET", "/v2/models/model/stats")[1])["model_stats"]
        assert (counts["name"], counts["version"], counts["inference_count"]) == ("model", "1", 2)
        [of_all] = json.loads(served.send("GET", "/v2/models/stats")[1])["model_stats"]
        # The engine's last step may end between the two.
        assert of_all.pop("execution_count") >= counts.pop("execution_count") > 0
        assert of_all == {**counts, "name": "scripted"}
        assert counts["inference_stats"] == {
            "success": {"count": 2},
            "fail": {"count": 1},
            "cancel": {"count": 0},
        }
        # A health check does not count as one
        assert dict(served.server_block.frontends[0].num_requests.items())["200"] < 10


def test_outputs_that_are_asked_for_come_as_further_keys(lmi: Host) -> None:
    flags = {
        f"return_{name}": True
        for name in ("finish_reason", "num_input_tokens", "num_output_tokens", "log_probs")
    }
    body = {"text_input": "say ab", **flags}

    assert json.loads(lmi.post(body, GENERATE)[1]) == {
        **HEAD,
        "text_output": "ab",
        "finish_reason": "stop",
        "num_input_tokens": 6,
        "num_output_tokens": 3,
        "cum_log_probs": -1.5,
        "output_log_probs": [-0.5, -0.5, -0.5],
    }

    events_read = events(lmi.post(body, STREAM)[1])
    assert [event["finish_reason"] for event in events_read] == ["None", "None", "stop"]
    assert [event["cum_log_probs"] for event in events_read] == [-0.5, -1.0, -1.5]
    assert {
        (event["num_input_tokens"], event["num_output_tokens"], event["output_log_probs"])
        for event in events_read
    } == {(6, 1, -0.5)}


def test_a_client_may_stay_for_its_next_request_after_every_kind_of_answer(lmi: Host) -> None:
    connection = HTTPConnection("127.0.0.1", lmi.port, timeout=60)
    try:
        for prompt, path in (
            ("say a", GENERATE),
            ("say a", STREAM),
            ("fail a", STREAM),
            ("", GENERATE),
        ) * 2:
            connection.request("POST", path, json.dumps({"text_input": prompt}))
            connection.getresponse().read()

            # http.client drops it where the server said that it closes
            assert connection.sock is not None
    finally:
        connection.close()


def test_thirty_tokens_are_the_answer_when_none_are_named(lmi: Host) -> None:
    assert len(json.loads(lmi.post({"text_input": "run a"}, GENERATE)[1])["text_output"]) == 30


def test_the_engine_is_asked_the_same_as_by_the_lmi_api(lmi: Host) -> None:
    sampled = {"temperature": 0.5, "top_k": 5, "top_p": 0.9, "seed": 7, "repetition_penalty": 1.5}
    for triton, lmi_fields in (
        ({}, {}),
        (
            {"max_tokens": 7, "stop_words": "x", "bad_words": ["y"]},
            {"stop": ["x"], "bad_sequences": ["y"]},
        ),
        ({"max_tokens": 7, **sampled}, {"do_sample": True, **sampled}),
    ):
        limit = {"max_new_tokens": 7} if "max_tokens" in triton else {}
        first = lmi.post({"text_input": "say hello", **triton}, GENERATE)[1]
        second = lmi.post({"inputs": "say hello", "parameters": {**limit, **lmi_fields}})[1]
        engine_request, asked_by_lmi = lmi.executor.requests[-2:]

        assert engine_request == asked_by_lmi
        assert json.loads(first)["text_output"] == json.loads(second)["generated_text"]
