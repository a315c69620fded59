"""A function that tests let a model call, and a chat about what it tells."""

from __future__ import annotations

import json
from typing import Any

import jsonschema

from tests.served import Server

USER = {"role": "user", "content": "What is the weather in Paris?"}
CITY = {"enum": ["Paris", "Oslo"]}
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}, "metric": {"type": "boolean"}},
    "required": ["city", "metric"],
    "additionalProperties": False,
    "$defs": {"City": CITY},
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
CALL_IT = {"type": "function", "function": {"name": "weather"}}  # the tool_choice
FORM = {
    "type": "json_schema",
    "json_schema": {"name": "weather", "schema": PARAMETERS},
}  # the response_format


def chat(server: Server, **fields: Any) -> dict[str, Any]:
    """The choice that a chat of one message is answered with."""
    answer = server.post(
        {"messages": [USER], "max_tokens": 200, "seed": 3, **fields}, "/v1/chat/completions"
    )
    assert answer.status == 200, answer.body
    choice: dict[str, Any] = json.loads(answer.body)["choices"][0]
    return choice


def check_arguments(text: str) -> None:
    jsonschema.validate(json.loads(text), PARAMETERS)


def check_call_of_it(choice: dict[str, Any]) -> None:
    """A choice is one call of the function, and nothing else."""
    [call] = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    assert call["function"]["name"] == "weather"
    check_arguments(call["function"]["arguments"])
