"""OpenAI's Responses over real sockets: streams, calls, errors before and in a stream."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from lmi.executor import GuideType
from tests.scripted import CAPABILITIES, Host, host

RESPONSES = "/v1/responses"
LAST_SAID = "{{ messages[-1].content }}"
ABLE = msgspec.structs.replace(CAPABILITIES, guided_decoding=tuple(GuideType))
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture(scope="module")
def able(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """An engine that can guide decoding, behind a template that writes the last message."""
    settings: dict[str, object] = {
        "chat_template": LAST_SAID,
        "tool_call_parser": "hermes",
        "reasoning_parser": "think",
    }
    with host(tmp_path_factory.mktemp("able"), model=settings, capabilities=ABLE) as served:
        yield served


def ask(server: Host, said: str, **fields: Any) -> tuple[int, Any]:
    response, answer = server.post({"input": said, **fields}, RESPONSES)
    return response.status, events(answer) if fields.get(
        "stream"
    ) and response.status == 200 else json.loads(answer)


def events(body: bytes) -> list[dict[str, Any]]:
    """The objects of a stream, each under its name and with its number."""
    *records, tail = body.split(b"\n\n")
    assert tail == b""
    pairs = [record.split(b"\n") for record in records]
    events_sent = [json.loads(data.removeprefix(b"data: ")) for _, data in pairs]
    assert [name for name, _ in pairs] == [
        f"event: {event['type']}".encode() for event in events_sent
    ]
    assert [event["sequence_number"] for event in events_sent] == list(range(len(events_sent)))
    return events_sent


def settled(response: dict[str, Any]) -> Any:
    """A response without what is new in each: ids, times, and how much of the prompt was cached."""
    text = re.sub(
        r'"((?:call_)?id|created_at|completed_at|cached_tokens)": ?("[^"]*"|\d+)',
        r'"\1": 0',
        json.dumps(response),
    )
    return json.loads(text)


def check_growth(stream: list[dict[str, Any]]) -> None:
    """Check that each item begins, grows to what it is in the end, and ends, one after
    the other.
    """
    last = stream[-1]["response"]
    for index, output_item in enumerate(last["output"]):
        events_of_item = [event for event in stream if event.get("output_index") == index]
        assert (
            events_of_item[0]["type"] == "response.output_item.added"
            and events_of_item[-1]["type"] == "response.output_item.done"
        )
        assert events_of_item[-1]["item"] == output_item and all(
            event.get("item_id", output_item["id"]) == output_item["id"] for event in events_of_item
        )
        whole = (
            output_item["arguments"]
            if output_item["type"] == "function_call"
            else output_item["content"][0]["text"]
        )
        assert (
            "".join(event["delta"] for event in events_of_item if event["type"].endswith(".delta"))
            == whole
        )

    indexes = [event["output_index"] for event in stream if "output_index" in event]
    assert indexes == sorted(indexes)


@pytest.mark.parametrize(
    ("said", "fields"),
    [
        ("say Hello", {}),
        ("say two\nlines \u2028 and ½ 🦙", {}),
        ("say ", {}),
        ("run abc", {"max_output_tokens": 9}),
        (f"say <think>\nhm\n</think>\nI look.\n{CALL}\n{CALL}", {"tools": [TOOL]}),
        ('say {"a": 1}', {"tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}}),
        ('say [{"name": "f", "arguments": {}}]', {"tools": [TOOL], "tool_choice": "required"}),
    ],
)
def test_a_stream_ends_with_the_whole_response(
    able: Host, said: str, fields: dict[str, Any]
) -> None:
    (_, whole), (_, stream) = ask(able, said, **fields), ask(able, said, stream=True, **fields)
    assert settled(stream[-1]["response"]) == settled(whole)
    assert [event["type"] for event in stream[:2]] == ["response.created", "response.in_progress"]
    assert stream[-1]["type"] == f"response.{whole['status']}"

    check_growth(stream)


def test_a_response_repeats_the_settings_of_its_request(able: Host) -> None:
    fields = {
        "instructions": "Be brief.",
        "metadata": {"a": "b"},
        "temperature": 0.5,
        "tools": [TOOL],
    }
    _, answer = ask(able, "say Hello", **fields)

    assert {name: answer[name] for name in ("instructions", "metadata", "temperature")} == {
        name: fields[name] for name in ("instructions", "metadata", "temperature")
    }
    assert answer["tools"] == [TOOL | {"description": None, "strict": None}]
    assert (answer["store"], answer["previous_response_id"], answer["model"]) == (
        False,
        None,
        "scripted",
    )


def test_a_failure_in_a_stream_is_the_response_s_last_event(able: Host) -> None:
    _, stream = ask(able, "fail abc", stream=True)
    assert (
        "".join(event["delta"] for event in stream if event["type"] == "response.output_text.delta")
        == "abc"
    )

    last = stream[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"] == {
        "code": "generation_failed",
        "message": "the script says so",
    }
    assert last["response"]["id"] == stream[0]["response"]["id"]


def test_a_refusal_has_openai_s_form(able: Host) -> None:
    for fields, status, param, code in (
        ({"store": True}, 400, "store", "unsupported"),
        ({"model": "nobody"}, 404, "model", "model_not_found"),
        ({"input": "a" * 300}, 400, "input", "context_length_exceeded"),
    ):
        response_status, answer = ask(able, "say Hello", **fields)
        assert (response_status, answer["error"]["param"], answer["error"]["code"]) == (
            status,
            param,
            code,
        )


INCLUDED = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}


@pytest.mark.parametrize("said", ["say Hello", "say <think>hm</think>Hello"])
def test_texts_have_the_log_probs_of_their_tokens_where_a_client_includes_them(
    able: Host, said: str
) -> None:
    _, whole = ask(able, said, **INCLUDED)
    _, stream = ask(able, said, stream=True, **INCLUDED)
    check_growth(stream)
    assert settled(stream[-1]["response"]) == settled(whole)

    [part] = whole["output"][-1]["content"]
    assert "".join(entry["token"] for entry in part["logprobs"]).startswith(part["text"])

    for entry in part["logprobs"]:
        assert (
            set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
            and len(entry["top_logprobs"]) <= 2
        )

    deltas = [event for event in stream if event["type"] == "response.output_text.delta"]
    log_probs_sent = [entry for event in deltas for entry in event["logprobs"]]
    assert part["logprobs"][: len(log_probs_sent)] == log_probs_sent and log_probs_sent

    [done] = [event for event in stream if event["type"] == "response.output_text.done"]
    assert done["logprobs"] == part["logprobs"]


def test_texts_have_no_log_probs_otherwise(able: Host) -> None:
    for fields in ({}, {"include": ["reasoning.encrypted_content"]}, {"top_logprobs": 0}):
        _, whole = ask(able, "say Hello", **fields)
        assert whole["output"][0]["content"][0]["logprobs"] == []


def test_the_tokens_of_a_conversation_are_counted_as_an_answer_counts_them(able: Host) -> None:
    num_before = len(able.executor.requests)
    response, body = able.post({"input": "say Hello"}, f"{RESPONSES}/input_tokens")

    assert (response.status, json.loads(body)) == (
        200,
        {"object": "response.input_tokens", "input_tokens": 9},
    )
    assert len(able.executor.requests) == num_before

    response, body = able.post(
        {"input": "say Hello", "previous_response_id": "resp_1"}, f"{RESPONSES}/input_tokens"
    )

    assert (response.status, json.loads(body)["error"]["param"]) == (400, "previous_response_id")
