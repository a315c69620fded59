"""Tools at a model whose chat template does not show them, over real sockets at each
API of chats.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.scripted import Host, host

FUNCTION = {"name": "f", "description": "finds"}
CALL = '{"name": "f", "arguments": {"a": 1}}'
# It writes what the system says beside one word alone, as the context of the scripted engine is
# short.
TEMPLATE = (
    "{% if messages[-1].content == 'Hi' %}{{ messages[0].content }}{% endif %}{{ "
    "messages[-1].content }}"
)
CALLS = [f"<tool_call>\n{CALL}\n</tool_call>", CALL, f"```json\n{CALL}\n```"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    settings: dict[str, object] = {
        "chat_template": TEMPLATE,
        "tool_call_parser": "generic",
        "tells_tools": True,
    }
    with host(tmp_path_factory.mktemp("generic"), model=settings) as served:
        yield served


def ask(server: Host, path: str, body: dict[str, Any]) -> Any:
    response, answer = server.post(body, path)
    assert response.status == 200, answer
    return json.loads(answer)


@pytest.mark.parametrize("said", CALLS)
def test_a_chat_has_the_call(server: Host, said: str) -> None:
    tools = [{"type": "function", "function": FUNCTION}]
    body = {"messages": [{"role": "user", "content": f"say {said}"}], "tools": tools}
    [choice] = ask(server, "/v1/chat/completions", body)["choices"]

    [call] = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")


def test_a_message_of_anthropic_s_has_the_call(server: Host) -> None:
    tools = [FUNCTION | {"input_schema": {}}]
    body = {
        "messages": [{"role": "user", "content": f"say {CALL}"}],
        "tools": tools,
        "max_tokens": 99,
    }
    [block] = ask(server, "/v1/messages", body)["content"]

    assert (block["type"], block["name"], block["input"]) == ("tool_use", "f", {"a": 1})


def test_a_response_has_the_call(server: Host) -> None:
    body = {"input": f"say {CALL}", "tools": [FUNCTION | {"type": "function"}]}
    [call] = ask(server, "/v1/responses", body)["output"]

    assert (call["type"], call["name"], json.loads(call["arguments"])) == (
        "function_call",
        "f",
        {"a": 1},
    )


def test_an_answer_without_a_call_is_text(server: Host) -> None:
    tools = [{"type": "function", "function": FUNCTION}]
    body = {"messages": [{"role": "user", "content": "say It rains."}], "tools": tools}
    [choice] = ask(server, "/v1/chat/completions", body)["choices"]

    assert (choice["message"]["content"], choice["finish_reason"]) == ("It rains.", "stop")
