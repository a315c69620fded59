"""The OpenAI API over an engine that can guide decoding, the real vLLM: forced calls and
structures.
"""

from __future__ import annotations

import json
import re

import pytest

from tests.served import Server
from tests.system.weather import (
    CALL_IT,
    FORM,
    PARAMETERS,
    USER,
    WEATHER,
    chat,
    check_arguments,
    check_call_of_it,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

CLOCK = {"type": "function", "function": {"name": "clock", "parameters": PARAMETERS}}
TOOLS = [WEATHER, CLOCK]


def test_a_forced_call_has_the_form_of_its_function_s_parameters(wide: Server) -> None:
    check_call_of_it(chat(wide, tools=TOOLS, tool_choice=CALL_IT))

    choice = chat(wide, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    [call] = choice["message"]["tool_calls"]

    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    assert call["function"]["name"] in ("weather", "clock")

    check_arguments(call["function"]["arguments"])

    check_arguments(chat(wide, response_format=FORM)["message"]["content"])
    assert chat(wide, guided_choice=["so (a+b)", "no.t"])["message"]["content"] in (
        "so (a+b)",
        "no.t",
    )
    assert re.fullmatch("[ab]{3}", chat(wide, guided_regex="[ab]{3}")["message"]["content"])


def test_the_lmi_api_applies_structures_too(wide: Server) -> None:
    for name, value, form in (
        ("guided_regex", "[ab]{3}", "[ab]{3}"),
        ("guided_choice", ["so (a+b)", "no.t"], r"so \(a\+b\)|no\.t"),
        ("guided_grammar", 'root ::= "yes" | "no"', "yes|no"),
    ):
        answer = wide.post(
            {"inputs": "Say", "parameters": {"max_new_tokens": 60, name: value}}, "/invocations"
        )
        assert answer.status == 200, answer.body
        assert re.fullmatch(form, json.loads(answer.body)["generated_text"])


@pytest.mark.parametrize(
    "structure",
    [
        {"guided_regex": "(a"},
        {"guided_regex": r"\p{L}{1,500}" * 20},
        {"guided_json": {"$ref": "#"}},
        {"guided_json": {"$ref": "http://127.0.0.1:9/x"}},
        {"guided_json": {"$ref": "file:///etc/passwd"}},
    ],
    ids=lambda structure: str(structure)[:40],
)
def test_a_structure_that_vllm_cannot_make_is_the_client_s_fault(
    wide: Server, structure: dict[str, object]
) -> None:
    answer = wide.post({"messages": [USER], "max_tokens": 8, **structure}, "/v1/chat/completions")
    assert (
        answer.status == 400 and json.loads(answer.body)["error"]["type"] == "invalid_request_error"
    ), answer.body
