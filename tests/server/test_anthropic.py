"""Anthropic's API over real sockets: streams, calls, counted tokens, errors before and
in a stream.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import msgspec
import pytest

from lmi.executor import GuideType
from tests.scripted import CAPABILITIES, CONTEXT, Host, host

MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
LAST_SAID = "{{ messages[-1].content }}"
ABLE = msgspec.structs.replace(CAPABILITIES, guided_decoding=tuple(GuideType))
TOOL = {"name": "f", "input_schema": {"type": "object"}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture(scope="module")
def able(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """An engine that can guide decoding, behind a template that writes the last message."""
    settings: dict[str, object] = {
        "chat_template": LAST_SAID,
        "tool_call_parser": "hermes",
        "reasoning_parser": "think",
        "aliases": ("claude-x",),
    }
    with host(tmp_path_factory.mktemp("able"), model=settings, capabilities=ABLE) as served:
        yield served


def ask(server: Host, said: str, path: str = MESSAGES, **fields: Any) -> tuple[int, Any]:
    body = {
        "model": "claude-x",
        "max_tokens": 90,
        "messages": [{"role": "user", "content": said}],
        **fields,
    }
    response, answer = server.post(body, path)
    return response.status, events(answer) if fields.get(
        "stream"
    ) and response.status == 200 else json.loads(answer)


def events(body: bytes) -> list[dict[str, Any]]:
    """The objects of a stream, each under its name."""
    *records, tail = body.split(b"\n\n")
    assert tail == b""
    pairs = [record.split(b"\n") for record in records]
    events_sent = [json.loads(data.removeprefix(b"data: ")) for _, data in pairs]
    assert [name for name, _ in pairs] == [
        f"event: {event['type']}".encode() for event in events_sent
    ]
    return events_sent


def joined(stream: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client makes of the events of a stream."""
    message: dict[str, Any] = stream[0]["message"]
    inputs: dict[int, str] = {}
    for event in stream[1:]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
        elif event["type"] == "content_block_delta":
            [name] = event["delta"].keys() - {"type"}
            if name == "partial_json":
                inputs[event["index"]] = inputs.get(event["index"], "") + event["delta"][name]
            else:
                message["content"][event["index"]][name] += event["delta"][name]
        elif event["type"] == "message_delta":
            message |= event["delta"] | {"usage": event["usage"]}

    for index, text in inputs.items():
        message["content"][index]["input"] = json.loads(text)

    return message


def without_ids(message: dict[str, Any]) -> Any:
    blocks = [
        {name: value for name, value in block.items() if name != "id"}
        for block in message["content"]
    ]
    # The second prompt is cached
    usage = {name: message["usage"][name] for name in ("output_tokens",)}
    return {**message, "id": "", "content": blocks, "usage": usage}


@pytest.mark.parametrize(
    ("said", "fields"),
    [
        ("say Hello", {}),
        ("say two\nlines \u2028 and ½ 🦙", {}),
        ("say ", {}),
        ("run abc", {}),
        ("say one END two", {"stop_sequences": ["END"]}),
        (f"say <think>\nhm\n</think>\nI look.\n{CALL}\n{CALL}", {"tools": [TOOL]}),
        ('say {"a": 1}', {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "f"}}),
        ('say [{"name": "f", "arguments": {}}]', {"tools": [TOOL], "tool_choice": {"type": "any"}}),
    ],
)
def test_a_stream_joins_to_the_whole_message(able: Host, said: str, fields: dict[str, Any]) -> None:
    fields = {"max_tokens": 150, **fields}
    (_, whole), (_, stream) = ask(able, said, **fields), ask(able, said, stream=True, **fields)
    assert without_ids(joined(stream)) == without_ids(whole)
    assert [event["type"] for event in (stream[0], *stream[-2:])] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]


def test_a_message_tells_its_end_its_stop_string_and_its_tokens(able: Host) -> None:
    _, answer = ask(able, "say one END two", stop_sequences=["END"])
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "END")
    assert answer["content"] == [{"type": "text", "text": "one "}] and answer["model"] == "scripted"
    _, answer = ask(able, "run ab", max_tokens=4)
    assert (answer["stop_reason"], answer["content"][0]["text"]) == ("max_tokens", "abab")
    usage = answer["usage"]
    assert (
        usage["input_tokens"] + usage["cache_read_input_tokens"] == len("run ab")
        and usage["output_tokens"] == 4
    )


def test_the_tokens_of_a_prompt_are_counted_as_an_answer_counts_them(able: Host) -> None:
    num_before = len(able.executor.requests)
    assert ask(able, "say Hello", COUNT) == (200, {"input_tokens": 9})
    assert len(able.executor.requests) == num_before

    status, answer = ask(able, "say Hello", COUNT, messages=[])
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")


def test_a_prompt_over_the_context_is_refused_in_the_words_that_agents_look_for(able: Host) -> None:
    status, answer = ask(able, "a" * 300)
    assert (status, answer["type"], answer["error"]["type"]) == (
        400,
        "error",
        "invalid_request_error",
    )
    expected = (
        f"prompt is too long: messages must be shorter than the model's context of {CONTEXT} tokens"
    )
    assert answer["error"]["message"].startswith(expected)


@pytest.mark.parametrize("path", [MESSAGES, COUNT])
@pytest.mark.parametrize(
    "thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}]
)
def test_a_part_of_a_conversation_is_refused_in_the_way_that_tool_loops_act_on(
    able: Host, path: str, thread: dict[str, str]
) -> None:
    num_before = len(able.executor.requests)
    status, answer = ask(able, "say Hello", path, thread=thread)

    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert answer["error"]["details"] == {
        "error_code": "thread_unsupported_request",
        "unsupported": ["thread"],
    }
    assert answer["error"]["message"].startswith(
        "thread is not supported here: nothing is kept here"
    )
    assert len(able.executor.requests) == num_before

    status, answer = ask(able, "say Hello", path, thread=None)
    assert status == 200


@pytest.mark.parametrize("path", [MESSAGES, COUNT])
def test_an_unknown_model_is_not_found(able: Host, path: str) -> None:
    status, answer = ask(able, "say Hello", path, model="claude-y")
    assert (status, answer["error"]["type"]) == (404, "not_found_error") and "claude-y" in answer[
        "error"
    ]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", MESSAGES, 405), ("POST", "/v1/messages/batches", 404)]
)
def test_an_error_of_http_has_the_form_of_this_api_below_its_path(
    able: Host, method: str, path: str, status: int
) -> None:
    response, body = able.send(method, path, b"{}" if method == "POST" else None)
    assert response.status == status and json.loads(body)["type"] == "error"
    assert json.loads(body)["request_id"] == response.headers["x-request-id"]


def test_a_failure_in_a_stream_is_an_event_that_the_client_raises(able: Host) -> None:
    _, stream = ask(able, "fail abc", stream=True)
    assert joined(stream[:-1])["content"] == [{"type": "text", "text": "abc"}]
    assert stream[-1]["error"] == {"type": "api_error", "message": "the script says so"}


def test_a_full_server_says_when_to_come_back_with_the_status_that_its_clients_know(
    able: Host,
) -> None:
    record = able.block.frontends[0]
    record.num_sequences += 10_000
    try:
        response, body = able.post(
            {"max_tokens": 9, "messages": [{"role": "user", "content": "say a"}]}, MESSAGES
        )
    finally:
        record.num_sequences -= 10_000

    assert (response.status, response.headers["retry-after"]) == (529, "1")
    assert json.loads(body)["error"]["type"] == "overloaded_error"
    assert json.loads(body)["request_id"] == response.headers["x-request-id"]
    assert b'lmi_requests_total{code="529"}' in able.send("GET", "/metrics")[1]


VERSION = {"anthropic-version": "2023-06-01"}


def test_anthropic_s_clients_get_the_list_of_models_in_their_form(able: Host) -> None:
    response, body = able.send("GET", "/v1/models", headers=VERSION)
    listing = json.loads(body)

    assert response.status == 200
    assert (listing["has_more"], listing["first_id"], listing["last_id"]) == (
        False,
        "scripted",
        "claude-x",
    )
    assert [entry["id"] for entry in listing["data"]] == ["scripted", "claude-x"]

    first = listing["data"][0]
    assert {name: first[name] for name in ("type", "id", "display_name")} == {
        "type": "model",
        "id": "scripted",
        "display_name": "scripted",
    }
    assert datetime.fromisoformat(first["created_at"]).tzinfo is not None

    response, body = able.send("GET", "/v1/models/claude-x", headers=VERSION)
    assert json.loads(body) == first | {"id": "claude-x", "display_name": "claude-x"}

    response, body = able.send("GET", "/v1/models/nobody", headers=VERSION)
    assert (response.status, json.loads(body)["error"]["type"]) == (404, "not_found_error")


def test_other_clients_get_the_list_of_models_in_openai_s_form(able: Host) -> None:
    assert json.loads(able.send("GET", "/v1/models")[1])["object"] == "list"
    assert json.loads(able.send("GET", "/v1/models/claude-x")[1])["object"] == "model"


@pytest.mark.parametrize(
    ("method", "path", "headers", "has_id"),
    [
        ("POST", MESSAGES, {}, True),
        ("POST", COUNT, {}, True),
        ("GET", "/v1/models", VERSION, True),
        ("GET", "/v1/models", {}, False),
        ("POST", "/v1/chat/completions", {}, False),
    ],
)
@pytest.mark.parametrize("said", ["say Hello", None])
def test_anthropic_s_clients_read_the_name_of_a_request_in_their_header(
    able: Host, method: str, path: str, headers: dict[str, str], has_id: bool, said: str | None
) -> None:
    messages = [] if said is None else [{"role": "user", "content": said}]
    body = json.dumps({"model": "claude-x", "max_tokens": 9, "messages": messages}).encode()
    response, _ = able.send(method, path, body if method == "POST" else None, headers=headers)
    request_id = response.headers["x-request-id"]

    assert request_id and response.headers["request-id"] == (request_id if has_id else None)
