"""The cases of the Open Responses specification's own suite, under the names that they have there.

The suite also has seven cases of WebSocket and two of a route that compacts a conversation, which
are not served here, and one that asks no server. Images are for an engine that reads them:
tests/system/test_vllm_images.py has that case.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from types import NoneType
from typing import Any

import pytest

from tests.scripted import Host, host
from tests.server.test_responses import RESPONSES, check_growth, events

WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "The weather at a place.",
    "parameters": {
        "type": "object",
        "properties": {"place": {"type": "string"}},
        "required": ["place"],
    },
}
# The model calls the tool that it has, and else repeats what it was told.
TEMPLATE = """say {% if tools -%}
<tool_call>
{"name": "{{ tools[0].function.name }}", "arguments": {"place": "Rome"}}
</tool_call>
{%- else -%}
{% for message in messages %}{{ message.role }}: {{ message.content }}. {% endfor %}
{%- endif %}"""


def said(role: str, words: str, **more: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": words, **more}


HELLO = [said("user", "Say hello")]
# The input, and what the template makes of it
CASES = {
    "basic-response": (HELLO, "user: Say hello."),
    "system-prompt": (
        [said("system", "Be a pirate"), *HELLO],
        "system: Be a pirate. user: Say hello.",
    ),
    "multi-turn": (
        [said("user", "I am Al"), said("assistant", "Hello Al"), said("user", "Who am I?")],
        "user: I am Al. assistant: Hello Al. user: Who am I?.",
    ),
    "assistant-phase": (
        [
            said("assistant", "I add", phase="commentary"),
            said("assistant", "4", phase="final_answer"),
            *HELLO,
        ],
        "assistant: I add\n4. user: Say hello.",
    ),
}
OF_A_RESPONSE = {
    **dict.fromkeys(("background", "store", "parallel_tool_calls"), bool),
    **dict.fromkeys(("created_at", "top_logprobs"), int),
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "temperature", "top_p"), int | float),
    **dict.fromkeys(("id", "object", "status", "model", "service_tier", "truncation"), str),
    **dict.fromkeys(
        ("instructions", "previous_response_id", "prompt_cache_key", "safety_identifier"),
        str | NoneType,
    ),
    **dict.fromkeys(("completed_at", "max_output_tokens", "max_tool_calls"), int | NoneType),
    **dict.fromkeys(("error", "incomplete_details", "reasoning", "usage"), dict | NoneType),
    **dict.fromkeys(("metadata", "text"), dict),
    **dict.fromkeys(("output", "tools"), list),
    "tool_choice": str | dict,
}
PLACE = {"item_id", "output_index"}
# Of each kind of event
FIELDS = {
    **dict.fromkeys(
        ("response.created", "response.in_progress", "response.completed"), {"response"}
    ),
    **dict.fromkeys(
        ("response.output_item.added", "response.output_item.done"), {"output_index", "item"}
    ),
    **dict.fromkeys(
        ("response.content_part.added", "response.content_part.done"),
        PLACE | {"content_index", "part"},
    ),
    "response.output_text.delta": PLACE | {"content_index", "delta", "logprobs"},
    "response.output_text.done": PLACE | {"content_index", "text", "logprobs"},
    "response.function_call_arguments.delta": PLACE | {"delta"},
    "response.function_call_arguments.done": PLACE | {"arguments"},
}
OF_TEXT = ["content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
OF_A_CALL = ["function_call_arguments.delta", "function_call_arguments.done"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    settings: dict[str, object] = {"chat_template": TEMPLATE, "tool_call_parser": "hermes"}
    with host(tmp_path_factory.mktemp("served"), model=settings) as running:
        yield running


def ask(served: Host, **fields: Any) -> dict[str, Any]:
    """A whole response, which has every field that the specification wants."""
    answer, body = served.post({"model": "scripted", **fields}, RESPONSES)
    response: dict[str, Any] = json.loads(body)
    assert answer.status == 200, body
    check_response(response)
    return response


def check_response(response: dict[str, Any]) -> None:
    assert {
        name for name, kind in OF_A_RESPONSE.items() if not isinstance(response[name], kind)
    } == set()


@pytest.mark.parametrize(("conversation", "told"), CASES.values(), ids=CASES)
def test_a_conversation_is_answered(
    served: Host, conversation: list[dict[str, Any]], told: str
) -> None:
    response = ask(served, input=conversation)
    [message] = response["output"]
    [part] = message["content"]

    assert part["text"].strip() == told
    assert (response["status"], message["status"], message["role"]) == (
        "completed",
        "completed",
        "assistant",
    )
    assert part["type"] == "output_text" and part["annotations"] == []

    usage = response["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"] > 0
    assert usage["input_tokens_details"].keys() == {"cached_tokens"}
    assert usage["output_tokens_details"].keys() == {"reasoning_tokens"}


def check_stream(served: Host, told: list[str], **fields: Any) -> dict[str, Any]:
    """Check the kinds of events, without repetitions, and the fields of each. Return the last
    response.
    """
    _, body = served.post({"model": "scripted", "stream": True, **fields}, RESPONSES)
    stream = events(body)
    kinds = [
        kind.removeprefix("response.")
        for kind, _ in itertools.groupby(event["type"] for event in stream)
    ]
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        *told,
        "output_item.done",
        "completed",
    ]
    for event in stream:
        assert FIELDS[event["type"]] <= event.keys()
        if "response" in event:
            check_response(event["response"])

    check_growth(stream)
    last: dict[str, Any] = stream[-1]["response"]
    return last


def test_a_text_is_streamed_in_the_order_of_the_specification(served: Host) -> None:
    assert check_stream(served, OF_TEXT, input=HELLO)["output"][0]["type"] == "message"


def test_a_tool_is_called_whole_and_streamed(served: Host) -> None:
    fields: dict[str, Any] = {"input": HELLO, "tools": [WEATHER]}
    for response in (ask(served, **fields), check_stream(served, OF_A_CALL, **fields)):
        [call] = response["output"]
        assert (call["type"], call["status"], call["name"]) == (
            "function_call",
            "completed",
            "weather",
        )
        assert json.loads(call["arguments"]) == {"place": "Rome"} and call["call_id"]
        assert [tool["name"] for tool in response["tools"]] == ["weather"]
        assert response["tool_choice"] == "auto"


def test_image_input_of_an_engine_without_images_is_refused_by_name(served: Host) -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="}
    answer, body = served.post({"input": [{"role": "user", "content": [image]}]}, RESPONSES)
    error = json.loads(body)["error"]
    assert (answer.status, error["param"], error["code"]) == (
        400,
        "input[0].content[0]",
        "unsupported",
    )


def test_conversations_are_compacted_by_clients_and_sent_over_http(served: Host) -> None:
    answer, body = served.post({"model": "scripted", "input": HELLO}, f"{RESPONSES}/compact")
    assert answer.status == 404 and json.loads(body)["error"]["type"] == "invalid_request_error"
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    answer, _ = served.send(
        "GET", RESPONSES, headers=upgrade | {"Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ=="}
    )
    assert answer.status == 405 and answer.headers["allow"] == "POST"
