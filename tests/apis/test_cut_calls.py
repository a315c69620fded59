"""A forced call that max_tokens cuts: what is written around calls is no text, in any
API of chats.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from lmi.apis.table import APIS
from lmi.settings.config import ModelConfig
from lmi.types import AnswerEnd, Delta, Token

MODEL = ModelConfig(path="demo", name="demo")
CALL = '{"name":"get_weather","arguments":{"city":"Paris"}}'
ANSWER = f"[{CALL},{CALL}]"
FUNCTION = {"name": "get_weather"}
HELLO = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "openai_chat": {
        "messages": HELLO,
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": "required",
    },
    "anthropic": {
        "messages": HELLO,
        "max_tokens": 9,
        "tools": [FUNCTION | {"input_schema": {}}],
        "tool_choice": {"type": "any"},
    },
    "responses": {
        "input": "Hi",
        "tools": [FUNCTION | {"type": "function"}],
        "tool_choice": "required",
    },
}


def answer(api_name: str, text: str, *, is_streamed: bool) -> list[dict[str, Any]]:
    """Return the records of an answer that is cut behind the text, whose pieces are short."""
    api = APIS[api_name]
    body = json.dumps(BODIES[api_name] | {"stream": is_streamed})
    formatter = api.formatter(api.parse(api.read(body.encode(), "application/json", MODEL)))

    records: list[bytes] = []
    pieces = [text[at : at + 3] for at in range(0, len(text), 3)]
    for number, piece in enumerate(pieces, start=1):
        end = AnswerEnd.LENGTH if number == len(pieces) else None
        written_part = formatter.feed(Delta([Token(5, piece)], end))

        assert isinstance(written_part, list)

        records += written_part

    lines = b"".join(records).decode().splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith(("data: {", "{"))]
    return [json.loads(line) for line in data]


def texts(value: Any) -> Iterator[str]:
    """Yield what clients show as the model's words, wherever it stands."""
    if isinstance(value, list):
        for value_part in value:
            yield from texts(value_part)

    if isinstance(value, dict):
        names = ["content", "text"]
        if value.get("type") == "response.output_text.delta":
            names.append("delta")

        yield from (
            value[name] for name in names if value.get(name) and isinstance(value[name], str)
        )

        for value_part in value.values():
            yield from texts(value_part)


def calls_of(record: dict[str, Any]) -> list[str]:
    """Return the names of the calls in a whole answer."""
    if "choices" in record:
        message = record["choices"][0]["message"]
        return [call["function"]["name"] for call in message.get("tool_calls", [])]

    items = record["content"] if "content" in record else record["output"]
    return [output_item["name"] for output_item in items]


@pytest.mark.parametrize("api_name", BODIES)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_forced_call_has_no_text_wherever_it_is_cut(api_name: str, is_streamed: bool) -> None:
    for length in range(1, len(ANSWER)):
        records = answer(api_name, ANSWER[:length], is_streamed=is_streamed)

        assert list(texts(records)) == [], ANSWER[:length]


@pytest.mark.parametrize("api_name", BODIES)
@pytest.mark.parametrize(
    ("length", "num_calls"),
    [(1, 0), (9, 0), (len(CALL), 1), (len(CALL) + 2, 1), (len(CALL) + 9, 1), (len(ANSWER), 2)],
)
def test_the_calls_before_the_cut_are_told(api_name: str, length: int, num_calls: int) -> None:
    [whole] = answer(api_name, ANSWER[:length], is_streamed=False)

    assert calls_of(whole) == ["get_weather"] * num_calls


@pytest.mark.parametrize("length", [3, len(CALL), len(ANSWER)])
def test_the_content_of_a_forced_call_is_null_in_each_delta(length: int) -> None:
    chunks = answer("openai_chat", ANSWER[:length], is_streamed=True)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]

    assert deltas[0] == {"role": "assistant", "content": None}
    assert deltas[-1] == {"content": None}
    assert not any(delta.get("content") for delta in deltas)


def test_the_content_of_a_call_that_was_cut_is_null() -> None:
    [whole] = answer("openai_chat", ANSWER[:4], is_streamed=False)
    message = whole["choices"][0]["message"]

    assert message["content"] is None and "tool_calls" not in message
    assert whole["choices"][0]["finish_reason"] == "length"


def test_a_response_says_of_each_call_whether_it_is_whole() -> None:
    [cut_inside] = answer("responses", ANSWER[: len(CALL) - 3], is_streamed=False)
    [cut_behind] = answer("responses", ANSWER[: len(CALL) + 5], is_streamed=False)

    assert [output_item["status"] for output_item in cut_inside["output"]] == ["incomplete"]
    assert [output_item["status"] for output_item in cut_behind["output"]] == ["completed"]
    assert cut_inside["status"] == cut_behind["status"] == "incomplete"
