"""One path for the bodies of several doors: which door a body, a route and an Accept choose."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmi.dialects import DIALECTS, DYNAMIC_BATCH, LMI, LMI_EVENTS, Dialect
from lmi.server.exchange import CUSTOM_ATTRIBUTES
from lmi.server.routes.invocations import attribute, door_of_body, door_of_inputs
from tests.scripted import Host, host

PATHS = ["/invocations", "/predictions/scripted", "/predictions/model/1", "/models/scripted/invoke"]


@pytest.fixture(scope="module")
def lmi(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with host(tmp_path_factory.mktemp("union")) as served:
        yield served


CHAT, COMPLETIONS = DIALECTS["openai_chat"], DIALECTS["openai_completions"]


@pytest.mark.parametrize(
    ("body", "door"),
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
def test_a_body_goes_to_the_door_whose_field_it_has(body: bytes, door: Dialect) -> None:
    assert door_of_body(body, usual=LMI).name == door.name


def test_a_door_that_is_not_there_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(DIALECTS, "openai_chat")
    assert door_of_body(b'{"messages": []}', usual=LMI) is LMI
    assert door_of_body(b'{"messages": [], "prompt": ""}', usual=LMI) is COMPLETIONS


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
    assert attribute(attributes, "route") == value


@pytest.mark.parametrize("path", PATHS)
def test_every_path_takes_the_bodies_of_all_doors(lmi: Host, path: str) -> None:
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
    response, body = lmi.post({"prompt": "say hi"}, path, {CUSTOM_ATTRIBUTES: "route=/v1/completions"})
    assert (response.status, json.loads(body)["object"]) == (200, "text_completion")


@pytest.mark.parametrize("route", ["/ping", "/metrics", "/models", "/v1/models", "", "generate", "/invocations"])
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
        ({"parameters": {"output_formatter": "jsonlines"}}, "text/event-stream", "application/jsonlines"),
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
        assert door_of_inputs(served.config.model, "text/event-stream") is LMI_EVENTS


def test_under_tgi_compat_the_same_path_answers_with_tgis_list(tmp_path: Path) -> None:
    with host(tmp_path, model={"tgi_compat": True}) as served:
        _, body = served.post({"inputs": "say hi", "parameters": {"details": False}})
        assert json.loads(body) == [{"generated_text": "hi"}]


def test_without_a_rolling_batch_inputs_are_of_the_dynamic_batch_schema_and_other_bodies_are_not(
    tmp_path: Path,
) -> None:
    with host(tmp_path, model={"dynamic_batch": True}) as served:
        assert door_of_inputs(served.config.model, "text/event-stream") is DYNAMIC_BATCH
        _, body = served.post({"inputs": "say hi"}, "/models/model/invoke")
        assert json.loads(body) == [{"generated_text": "hi"}]
        _, body = served.post({"prompt": "say hi"})
        assert json.loads(body)["object"] == "text_completion"
