"""TGI's routes over real sockets: whole answers, streams, TGI's statuses, `/info` and `/health`."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmi.shared.state import Phase
from tests.scripted import CONTEXT, Host, host, wait_until


@pytest.fixture(scope="module")
def tgi(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with host(tmp_path_factory.mktemp("tgi")) as served:
        yield served


def events(body: bytes) -> list[dict[str, Any]]:
    *parts, tail = body.split(b"\n\n")
    assert tail == b"" and all(part.startswith(b"data:{") for part in parts)
    return [json.loads(part.removeprefix(b"data:")) for part in parts]


def refusal(answered: tuple[http.client.HTTPResponse, bytes]) -> tuple[int, str, str]:
    """Status, error_type and error."""
    response, body = answered
    fields = json.loads(body)
    assert list(fields) == ["error", "error_type"]
    assert response.headers["content-type"] == "application/json"
    return response.status, fields["error_type"], fields["error"]


def test_generate_answers_an_object_and_the_root_a_list_of_one(tgi: Host) -> None:
    for path, expected in (
        ("/generate", {"generated_text": "hi"}),
        ("/", [{"generated_text": "hi"}]),
    ):
        response, body = tgi.post({"inputs": "say hi"}, path)
        assert (response.status, response.headers["content-type"]) == (200, "application/json")
        assert response.headers["content-length"] == str(len(body))
        assert json.loads(body) == expected


def test_the_engine_is_asked_for_what_the_parameters_say(tgi: Host) -> None:
    parameters = {"max_new_tokens": 5, "temperature": 0.5, "top_k": 3, "seed": 7, "details": True}
    _, body = tgi.post({"inputs": "say hi", "parameters": parameters}, "/generate")
    engine_request = tgi.executor.requests[-1]
    assert (engine_request.max_tokens, engine_request.output_config.return_log_probs) == (5, True)

    sampling = engine_request.sampling_config
    assert (sampling.temperature, sampling.top_k, sampling.seed) == (0.5, 3, 7)

    details = json.loads(body)["details"]
    assert (details["finish_reason"], details["generated_tokens"], details["seed"]) == (
        "eos_token",
        3,
        7,
    )
    assert [token["text"] for token in details["tokens"]] == ["h", "i", ""]


def test_a_sampled_answer_tells_the_seed_that_makes_it_again(tgi: Host) -> None:
    sampled = {"do_sample": True, "details": True}
    _, body = tgi.post({"inputs": "say hi", "parameters": sampled}, "/generate")
    seed = json.loads(body)["details"]["seed"]

    assert seed == tgi.executor.requests[-1].sampling_config.seed and seed is not None

    _, answer = tgi.post({"inputs": "say hi", "parameters": sampled}, "/generate_stream")
    assert events(answer)[-1]["details"]["seed"] == tgi.executor.requests[-1].sampling_config.seed

    _, body = tgi.post({"inputs": "say hi", "parameters": {"details": True}}, "/generate")
    assert json.loads(body)["details"]["seed"] is None


@pytest.mark.parametrize("path", ["/", "/generate", "/generate_stream"])
def test_more_new_tokens_than_the_context_has_room_for_are_422(tgi: Host, path: str) -> None:
    prompt = "say hi"
    room = CONTEXT - len(prompt)
    status, kind, message = refusal(
        tgi.post({"inputs": prompt, "parameters": {"max_new_tokens": room + 1}}, path)
    )
    assert (status, kind) == (422, "validation")
    rule = f"at most {room} here (`inputs` tokens + `max_new_tokens` must be <= {CONTEXT})"
    assert message == f"parameters.max_new_tokens must be {rule}, given {room + 1}"
    for parameters in ({"max_new_tokens": room}, {}):
        assert tgi.post({"inputs": prompt, "parameters": parameters}, path)[0].status == 200


def test_the_prompt_s_tokens_come_with_decoder_input_details(tgi: Host) -> None:
    parameters = {"decoder_input_details": True, "truncate": 6}
    _, body = tgi.post({"inputs": "say hi", "parameters": parameters}, "/generate")
    prefill = json.loads(body)["details"]["prefill"]

    assert "".join(token["text"] for token in prefill) == "say hi"
    assert [token["logprob"] for token in prefill] == [None, *[-0.25] * 5]


@pytest.mark.parametrize(("path", "stream"), [("/generate_stream", None), ("/", True)])
def test_a_stream_has_an_event_for_each_token_and_the_whole_text_at_its_end(
    tgi: Host, path: str, stream: bool | None
) -> None:
    body = {"inputs": "say hé", "parameters": {"details": True}, "stream": stream}
    response, answer = tgi.post(body, path)
    assert (response.status, response.headers["content-type"]) == (200, "text/event-stream")

    *before, last = events(answer)
    assert [event["index"] for event in (*before, last)] == [1, 2, 3, 4]
    assert (
        "".join(event["token"]["text"] for event in (*before, last))
        == last["generated_text"]
        == "hé"
    )
    assert all(event["generated_text"] is None and event["details"] is None for event in before)

    num_prompt_tokens = len("say hé".encode())
    assert last["details"] == {
        "finish_reason": "eos_token",
        "generated_tokens": 4,
        "seed": None,
        "input_length": num_prompt_tokens,
    }


def test_a_stop_string_stays_in_the_text(tgi: Host) -> None:
    body = {"inputs": "say hello", "parameters": {"stop": ["el"], "details": True}}
    _, answer = tgi.post(body, "/generate")
    fields = json.loads(answer)
    assert (fields["generated_text"], fields["details"]["finish_reason"]) == (
        "hel",
        "stop_sequence",
    )
    _, answer = tgi.post(body, "/generate_stream")
    assert events(answer)[-1]["generated_text"] == "hel"


@pytest.mark.parametrize("path", ["/", "/generate", "/generate_stream"])
def test_what_a_client_gets_wrong_is_422(tgi: Host, path: str) -> None:
    for body, words in (
        (b"{", "not JSON"),
        (b"{}", "inputs must be a non-empty string"),
        (b'{"inputs": "say a", "parameters": {"top_k": 0}}', "parameters.top_k must be at least 1"),
        (
            b'{"inputs": "say a", "parameters": {"watermark": true}}',
            "parameters.watermark is not supported",
        ),
        (
            b'{"inputs": "say a", "parameters": {"adapter_id": "x"}}',
            "parameters.adapter_id is not supported",
        ),
        (
            b'{"inputs": "say a", "parameters": {"grammar": {"type": "regex", "value": "a"}}}',
            "parameters.grammar is not supported here: scripted has no such guide",
        ),
        (b'{"inputs": "%b"}' % (b"a" * CONTEXT), "inputs must be shorter"),
    ):
        status, kind, message = refusal(tgi.post(body, path))
        assert (status, kind) == (422, "validation")
        assert words in message


@pytest.mark.parametrize(("path", "order"), [("/generate", "fail"), ("/generate_stream", "fail")])
def test_a_failure_of_generation_before_the_first_byte_is_424(
    tgi: Host, path: str, order: str
) -> None:
    assert refusal(tgi.post({"inputs": order}, path)) == (424, "generation", "the script says so")


def test_a_failure_in_a_stream_is_its_last_event(tgi: Host) -> None:
    response, body = tgi.post({"inputs": "fail ab"}, "/generate_stream")
    *before, last = events(body)

    assert response.status == 200 and [event["token"]["text"] for event in before] == ["a", "b"]
    assert last == {"error": "the script says so", "error_type": "generation"}


def test_a_wrong_method_is_405_in_tgis_words(tgi: Host) -> None:
    for path in ("/generate", "/generate_stream"):
        response, body = tgi.send("GET", path)
        assert refusal((response, body))[:2] == (405, "validation")
        assert response.headers["allow"] == "POST"

    assert tgi.send("PUT", "/")[0].status == 405


def test_info_tells_the_limits_that_hold(tgi: Host) -> None:
    response, body = tgi.send("GET", "/info")
    fields = json.loads(body)
    assert response.status == 200
    assert (fields["model_id"], fields["router"], fields["model_pipeline_tag"]) == (
        "scripted",
        "lmi",
        "text-generation",
    )
    assert (fields["max_input_tokens"], fields["max_total_tokens"]) == (CONTEXT - 1, CONTEXT)
    assert fields["max_concurrent_requests"] >= 1000 and fields["kernels"] == "scripted"


def test_a_full_server_says_429_and_one_without_an_engine_503(tmp_path: Path) -> None:
    with host(tmp_path) as served:
        served.block.frontends[0].num_sequences += 10_000
        response, body = served.post({"inputs": "say hi"}, "/generate")

        assert refusal((response, body))[:2] == (429, "overloaded")
        assert int(response.headers["retry-after"]) >= 1
        assert served.send("GET", "/health")[0].status == 200

        served.block.engines[0].phase = Phase.LOST
        assert served.send("GET", "/health")[0].status == 503
        assert json.loads(served.send("GET", "/health")[1]) == {
            "error": "unhealthy",
            "error_type": "healthcheck",
        }


def test_an_engine_that_dies_leaves_the_generation_incomplete(tmp_path: Path) -> None:
    with host(tmp_path) as served:
        response, body = served.post({"inputs": "lose ab"}, "/generate_stream")
        assert response.status == 200
        assert events(body)[-1]["error_type"] == "incomplete_generation"

        wait_until(lambda: refusal(served.send("GET", "/info"))[:2] == (503, "overloaded"))
        assert refusal(served.post({"inputs": "say hi"}, "/generate"))[:2] == (503, "overloaded")


def test_an_engine_that_dies_before_the_first_byte_is_503(tmp_path: Path) -> None:
    with host(tmp_path) as served:
        assert refusal(served.post({"inputs": "lose ab"}, "/generate"))[:2] == (
            503,
            "incomplete_generation",
        )


@pytest.mark.parametrize("path", ["/invocations", "/generate"])
def test_a_body_over_the_limit_is_the_client_s_fault(tmp_path: Path, path: str) -> None:
    with host(tmp_path, server={"max_request_size": 100}, model={"tgi_compat": True}) as served:
        response, body = served.post(b"x" * 200, path)
        assert (response.status, json.loads(body)["error_type"]) == (413, "validation")


def test_under_tgi_compat_a_whole_answer_has_a_prefill_and_a_stream_has_none(
    tmp_path: Path,
) -> None:
    with host(tmp_path, model={"tgi_compat": True}) as served:
        [answer] = json.loads(served.post({"inputs": "say hi"})[1])
        assert answer["details"]["prefill"] == []
        _, body = served.post(
            {"inputs": "say hi", "stream": True, "parameters": {"output_formatter": "jsonlines"}}
        )
        assert "prefill" not in json.loads(body.splitlines()[-1])["details"]
        request_body = {"inputs": "say hi", "parameters": {"decoder_input_details": True}}
        assert len(json.loads(served.post(request_body)[1])[0]["details"]["prefill"]) == len(
            "say hi"
        )
