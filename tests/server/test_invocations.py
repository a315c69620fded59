"""One path for the bodies of several APIs: the API that a body, a route and an Accept choose."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from lmi.apis.base.api import AnyApi
from lmi.apis.base.body import MARK, MAX_VALUES_BYTES
from lmi.apis.batch import DYNAMIC_BATCH
from lmi.apis.lmi.api import LMI
from lmi.apis.table import APIS, api_of_inputs
from lmi.executor import GuidedDecodingParams, GuideType
from lmi.http.exchange import CUSTOM_ATTRIBUTES, Exchange
from lmi.server.routes.invocations import api_of_body
from tests.scripted import CAPABILITIES, Host, host

PATHS = ["/invocations", "/predictions/scripted", "/predictions/model/1", "/models/scripted/invoke"]


@pytest.fixture(scope="module")
def lmi(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with host(tmp_path_factory.mktemp("union")) as served:
        yield served


CHAT = APIS["openai_chat_lines"]
COMPLETIONS = APIS["openai_completions_lines"]


@pytest.mark.parametrize(
    ("body", "api"),
    [
        (b'{"inputs": "a"}', LMI),
        (b'{"messages": []}', CHAT),
        (b'{"model": "x", "prompt": "a"}', COMPLETIONS),
        (b'{"messages": [], "prompt": "a"}', CHAT),
        (b'{"inputs": "a", "messages": [], "prompt": "b"}', LMI),
        (b'{"inputs": null, "prompt": "b"}', COMPLETIONS),
        (b'{"inputs": "say \\"messages\\" and \\"prompt\\""}', LMI),
        (b'{"x": {"prompt": "a"}}', LMI),
        (b'{"x": "prompt"}', LMI),
        (b'["messages"]', LMI),
        (b'{"messages": [', LMI),
        (b'{"messages": "\xff"', LMI),
        (b"[" * 5000 + b'"prompt"', LMI),
        (b"", LMI),
    ],
)
def test_a_body_goes_to_the_api_whose_field_it_has(body: bytes, api: AnyApi) -> None:
    assert api_of_body(body, default=LMI, accept="*/*") is api


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"inputs": "say hi"}, "/invocations"),
        ({"prompt": "say hi"}, "/invocations"),
        ({"prompt": "say hi"}, "/models/scripted/invoke"),
        ({"prompt": "say hi" * MAX_VALUES_BYTES, "truncate_prompt_tokens": 6}, "/v1/completions"),
        ({"prompt": "say hi"}, "/tokenize"),
        ({"tokens": [104, 105]}, "/detokenize"),
        ({"input": "say hi"}, "/v1/responses"),
        ({"messages": [{"role": "user", "content": "say hi"}], "max_tokens": 9}, "/v1/messages"),
        ({"messages": [{"role": "user", "content": "say hi"}]}, "/v1/messages/count_tokens"),
        ({"messages": [{"role": "user", "content": "say hi"}]}, "/v1/chat/completions"),
        ({"text_input": "say hi"}, "/v2/models/scripted/generate"),
        ({"inputs": "say hi"}, "/generate"),
        ({"inputs": "say hi"}, "/"),
        ({"requestType": "NEW_SESSION"}, "/invocations"),
    ],
)
def test_the_byte_order_mark_of_windows_is_skipped_on_every_route(
    tmp_path: Path, body: dict[str, Any], path: str
) -> None:
    with host(tmp_path, model={"chat_template": "{{ messages[0]['content'] }}"}) as served:
        response, answer = served.post(MARK + json.dumps(body).encode(), path)
        assert response.status == 200, answer


@pytest.mark.parametrize(
    ("attributes", "value"),
    [
        ("route=/v1/completions", "/v1/completions"),
        ("a=1; route = /generate ;b", "/generate"),
        ("route=", ""),
        ("routes=/generate", None),
        ("route", ""),
        ("", None),
    ],
)
def test_a_route_is_read_among_other_attributes(attributes: str, value: str | None) -> None:
    headers = [(CUSTOM_ATTRIBUTES.encode(), attributes.encode())]
    exchange = Exchange({"type": "http", "headers": headers}, cast(Any, None), cast(Any, None))
    assert exchange.attribute("route") == value


@pytest.mark.parametrize("path", PATHS)
def test_every_path_takes_the_bodies_of_all_apis(lmi: Host, path: str) -> None:
    response, body = lmi.post({"inputs": "say hi"}, path)
    assert (response.status, json.loads(body)) == (200, {"generated_text": "hi"})

    response, body = lmi.post({"prompt": "say hi", "max_tokens": 5}, path)
    assert (response.status, json.loads(body)["choices"][0]["text"]) == (200, "hi")

    response, body = lmi.post({"messages": 5}, path)
    assert (response.status, list(json.loads(body))) == (400, ["error"])


@pytest.mark.parametrize("path", PATHS)
def test_a_route_in_custom_attributes_beats_the_body_and_is_echoed(lmi: Host, path: str) -> None:
    headers = {CUSTOM_ATTRIBUTES: "trace=1;route=/generate_stream"}
    response, body = lmi.post({"inputs": "say hi"}, path, headers)
    assert (response.status, response.headers["content-type"]) == (200, "text/event-stream")
    assert body.startswith(b'data:{"index":1,')
    assert response.headers[CUSTOM_ATTRIBUTES] == headers[CUSTOM_ATTRIBUTES]
    response, body = lmi.post(
        {"prompt": "say hi"}, path, {CUSTOM_ATTRIBUTES: "route=/v1/completions"}
    )
    assert (response.status, json.loads(body)["object"]) == (200, "text_completion")


@pytest.mark.parametrize(
    "route", ["/ping", "/metrics", "/models", "/v1/models", "", "generate", "/invocations"]
)
def test_only_inference_routes_are_reached(lmi: Host, route: str) -> None:
    num_requests = len(lmi.executor.requests)
    response, body = lmi.post({"inputs": "say hi"}, headers={CUSTOM_ATTRIBUTES: f"route={route}"})
    assert response.status == 404
    assert "route must be one of /v1/chat/completions, " in json.loads(body)["error"]
    assert len(lmi.executor.requests) == num_requests


def test_a_model_that_is_not_served_is_404_whatever_the_route(lmi: Host) -> None:
    headers = {CUSTOM_ATTRIBUTES: "route=/generate"}
    assert lmi.post({"inputs": "say hi"}, "/predictions/other", headers)[0].status == 404


@pytest.mark.parametrize(
    ("fields", "accept", "media_type"),
    [
        ({}, "text/event-stream", "text/event-stream"),
        ({}, "application/json, Text/Event-Stream;q=0.9", "text/event-stream"),
        ({"stream": True}, "text/event-stream", "text/event-stream"),
        ({"stream": False}, "text/event-stream", "application/json"),
        (
            {"parameters": {"output_formatter": "jsonlines"}},
            "text/event-stream",
            "application/jsonlines",
        ),
        ({"stream": True}, "*/*", "application/jsonlines"),
        ({}, "*/*", "application/json"),
    ],
)
def test_accept_asks_for_events_where_the_body_does_not_say(
    lmi: Host, fields: dict[str, object], accept: str, media_type: str
) -> None:
    response, _ = lmi.post({"inputs": "say hi"} | fields, headers={"accept": accept})
    assert (response.status, response.headers["content-type"]) == (200, media_type)


def test_a_configured_formatter_beats_accept(tmp_path: Path) -> None:
    with host(tmp_path, model={"output_formatter": "json"}) as served:
        response, _ = served.post({"inputs": "say hi"}, headers={"accept": "text/event-stream"})
        assert response.headers["content-type"] == "application/json"
        assert api_of_inputs(served.config.model) is LMI


def test_under_tgi_compat_the_same_path_answers_with_tgis_list(tmp_path: Path) -> None:
    with host(tmp_path, model={"tgi_compat": True}) as served:
        _, body = served.post({"inputs": "say hi", "parameters": {"details": False}})
        assert json.loads(body) == [{"generated_text": "hi"}]


def test_without_a_rolling_batch_inputs_are_of_the_dynamic_batch_schema_and_other_bodies_are_not(
    tmp_path: Path,
) -> None:
    with host(tmp_path, model={"dynamic_batch": True}) as served:
        assert api_of_inputs(served.config.model).for_accept("text/event-stream") is DYNAMIC_BATCH
        _, body = served.post({"inputs": "say hi"}, "/models/model/invoke")
        assert json.loads(body) == [{"generated_text": "hi"}]
        _, body = served.post({"prompt": "say hi"})
        assert json.loads(body)["object"] == "text_completion"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("body", "attributes", "status"),
    [
        ({"inputs": "say hi"}, "", 200),
        ({"inputs": "say hi", "parameters": {"top_p": 2}}, "", 424),
        ({"inputs": 5}, "", 424),
        ({"inputs": "fail"}, "", 424),
        ({"prompt": "say hi"}, "", 200),
        ({"prompt": "say hi", "top_p": 2}, "", 400),
        ({"messages": 5}, "", 400),
        ({"prompt": "say hi"}, "route=/v1/completions", 200),
        ({"inputs": "say hi"}, "route=/generate", 200),
        ({"inputs": 5}, "route=/generate", 422),
        ({"inputs": "say hi"}, "route=/ping", 404),
    ],
)
def test_an_answer_that_is_one_json_value_ends_with_one_newline(
    lmi: Host, path: str, body: dict[str, object], attributes: str, status: int
) -> None:
    response, answer = lmi.post(body, path, {CUSTOM_ATTRIBUTES: attributes} if attributes else {})
    assert (response.status, response.headers["content-type"]) == (status, "application/json")
    assert answer == answer.strip() + b"\n" and json.loads(answer)
    assert response.headers["content-length"] == str(len(answer))


def test_what_http_alone_refuses_ends_with_a_newline_too(lmi: Host) -> None:
    for method, path, status in [("GET", "/invocations", 405), ("POST", "/predictions/other", 404)]:
        response, answer = lmi.send(method, path, b"{}")
        assert (response.status, answer) == (status, answer.strip() + b"\n")
        assert response.headers["content-length"] == str(len(answer))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "say hi"}),
        ("/v1/completions", {"prompt": 5.5}),
        ("/generate", {"inputs": "say hi"}),
        ("/generate", {}),
        ("/", {"inputs": "say hi"}),
        ("/v2/models/scripted/generate", {"text_input": "say hi"}),
    ],
)
def test_other_paths_write_nothing_behind_their_json(
    lmi: Host, path: str, body: dict[str, object]
) -> None:
    assert lmi.post(body, path)[1][-1:] in (b"}", b"]")


STREAMED = {"prompt": "say hi", "stream": True}


@pytest.mark.parametrize("path", PATHS)
def test_a_streamed_completion_is_a_chunk_a_line(lmi: Host, path: str) -> None:
    response, answer = lmi.post(STREAMED, path)
    assert (response.status, response.headers["content-type"]) == (200, "application/jsonlines")
    assert answer.endswith(b"\n") and b"\n\n" not in answer

    chunks = [json.loads(line) for line in answer.splitlines()]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hi"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("more", "headers", "is_events"),
    [
        ({"output_formatter": "sse"}, {}, True),
        ({}, {"accept": "text/event-stream"}, True),
        ({"output_formatter": "jsonlines"}, {"accept": "text/event-stream"}, False),
        ({"output_formatter": "json"}, {}, False),
        ({"output_formatter": None}, {"accept": "application/jsonlines"}, False),
        ({}, {CUSTOM_ATTRIBUTES: "route=/v1/completions"}, True),
        ({"output_formatter": "jsonlines"}, {CUSTOM_ATTRIBUTES: "route=/v1/completions"}, True),
    ],
)
def test_a_streamed_completion_is_events_with_their_end_where_they_are_asked_for(
    lmi: Host, more: dict[str, object], headers: dict[str, str], is_events: bool
) -> None:
    response, answer = lmi.post(STREAMED | more, headers=headers)
    media_type = "text/event-stream" if is_events else "application/jsonlines"
    assert (response.headers["content-type"], answer.endswith(b"data: [DONE]\n\n")) == (
        media_type,
        is_events,
    )


def test_at_v1_a_stream_is_events_whatever_body_and_accept_say(lmi: Host) -> None:
    body = STREAMED | {"output_formatter": "jsonlines"}
    headers = {"accept": "application/jsonlines"}
    response, answer = lmi.post(body, "/v1/completions", headers)
    assert response.headers["content-type"] == "text/event-stream"
    assert answer.endswith(b"data: [DONE]\n\n")


def test_an_output_formatter_that_nobody_knows_is_refused_by_name(lmi: Host) -> None:
    response, answer = lmi.post(STREAMED | {"output_formatter": "xml"})
    assert (response.status, json.loads(answer)["error"]["param"]) == (400, "output_formatter")


def test_a_configured_formatter_is_that_of_completions_too(tmp_path: Path) -> None:
    with host(tmp_path, model={"output_formatter": "sse"}) as served:
        assert served.post(STREAMED)[0].headers["content-type"] == "text/event-stream"
        lines = served.post(STREAMED | {"output_formatter": "jsonlines"})[0]
        assert lines.headers["content-type"] == "application/jsonlines"


@pytest.mark.parametrize("accept", ["*/*", "text/event-stream"])
def test_a_failure_in_a_stream_has_the_stream_s_framing(lmi: Host, accept: str) -> None:
    response, answer = lmi.post({"prompt": "fail ab", "stream": True}, headers={"accept": accept})
    assert response.status == 200
    if accept == "*/*":
        last = answer.splitlines()[-1]
    else:
        *_, last, done, tail = answer.split(b"\n\n")
        assert (done, tail) == (b"data: [DONE]", b"")

    assert json.loads(last.removeprefix(b"data: "))["error"]["message"] == "the script says so"


def test_under_the_dynamic_batch_schema_what_http_alone_refuses_has_its_three_keys(
    tmp_path: Path,
) -> None:
    with host(tmp_path, model={"dynamic_batch": True}) as served:
        for method, path, status in [
            ("GET", "/invocations", 405),
            ("POST", "/predictions/other", 404),
        ]:
            response, answer = served.send(method, path, b"{}")
            fields = json.loads(answer)

            assert (response.status, list(fields), fields["code"]) == (
                status,
                ["code", "message", "error"],
                status,
            )
            assert answer.endswith(b"}\n")

        assert list(json.loads(served.send("GET", "/v1/completions")[1])) == ["error"]


GUIDES = {"guided_json": {}, "guided_regex": "a", "guided_choice": ["a"], "guided_grammar": "g"}


@pytest.mark.parametrize("is_batch", [False, True])
def test_a_structure_is_applied_or_refused_under_the_client_s_name_for_it(
    tmp_path: Path, is_batch: bool
) -> None:
    able = msgspec.structs.replace(CAPABILITIES, guided_decoding=(GuideType.JSON,))
    with host(tmp_path, model={"dynamic_batch": is_batch}, capabilities=able) as served:
        response, body = served.post(
            {"inputs": "say hi", "parameters": {"response_format": {"type": "json_object"}}}
        )

        assert response.status == 200
        assert served.executor.requests[-1].guided_decoding_params == GuidedDecodingParams(
            GuideType.JSON
        )

        for name, value in GUIDES.items():
            response, body = served.post({"inputs": "say hi", "parameters": {name: value}})
            expected = f"parameters.{name} is not supported here: scripted has no such guide"
            assert (response.status, json.loads(body)["error"]) == (424, expected)
