"""Tools in words, as a template that does not show them to the model gets them."""

from typing import Any

import pytest

from lmi.chats.template import ChatTemplate
from lmi.types import Chat, Image

PLAIN = (
    "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}{{ "
    "tools }}"
)
WITHOUT_SYSTEM = (
    "{% for message in messages %}{% if message.role == 'system' %}{{ raise_exception('no system') "
    "}}{% endif %}"
    "[{{ message.role }}] {{ message.content }}\n{% endfor %}"
)
IN_TURNS = (
    "{% for message in messages %}{% if loop.index0 and message.role == messages[loop.index0 - "
    "1].role %}"
    "{{ raise_exception('turns') }}{% endif %}[{{ message.role }}] {{ message.content }}\n{% "
    "endfor %}"
)
TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "é"}},
    {"type": "function", "function": {"name": "g"}},
]
TOLD = """\
You can call these functions:
{"name": "f", "description": "é"}
{"name": "g"}

To call a function, answer with nothing but its name and arguments as JSON:
<tool_call>
{"name": NAME, "arguments": {ARGUMENT: VALUE}}
</tool_call>
If no function is of use, answer with text."""
HELLO = {"role": "user", "content": "Hi"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": "ü"}}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "7", "tool_call_id": "1"}
CALL_TEXT = '<tool_call>\n{"name": "f", "arguments": {"a": "ü"}}\n</tool_call>'
RESULT_TEXT = "<tool_response>\n7\n</tool_response>"


def render(messages: list[dict[str, Any]], template: str = PLAIN, **fields: Any) -> str:
    chat_template = ChatTemplate({"default": template}, {}, tells_tools=True)
    return chat_template.render(Chat(messages=messages, **{"tools": TOOLS, **fields}))


def test_the_system_tells_of_the_tools() -> None:
    assert render([HELLO]) == f"[system] {TOLD}\n[user] Hi\nNone"


def test_what_the_system_says_already_stands_before_it() -> None:
    system = {"role": "system", "content": "Be kind."}
    assert render([system, HELLO]) == f"[system] Be kind.\n\n{TOLD}\n[user] Hi\nNone"


def test_the_user_tells_of_the_tools_where_the_template_takes_no_system() -> None:
    assert render([HELLO], WITHOUT_SYSTEM) == f"[user] {TOLD}\n\nHi\n"


def test_earlier_calls_and_their_results_are_texts() -> None:
    text = render([HELLO, CALLED, RESULT])
    assert (
        text == f"[system] {TOLD}\n[user] Hi\n[assistant] {CALL_TEXT}\n[user] {RESULT_TEXT}\nNone"
    )


def test_a_call_stands_behind_the_text_of_its_message() -> None:
    text = render([HELLO, CALLED | {"content": "I look."}, RESULT])
    assert f"[assistant] I look.\n{CALL_TEXT}\n" in text


def test_two_results_are_one_turn_where_the_template_wants_turns() -> None:
    text = render([HELLO, CALLED, RESULT, RESULT], IN_TURNS)
    assert text.endswith(f"[user] {RESULT_TEXT}\n{RESULT_TEXT}\n")


@pytest.mark.parametrize("tools", [None, []])
def test_without_tools_nothing_is_told(tools: list[Any] | None) -> None:
    assert "functions" not in render([HELLO], tools=tools)


def test_a_result_keeps_its_image() -> None:
    image = Image(b"", "messages[2]", "image_url")
    chat_template = ChatTemplate({"default": PLAIN}, {}, tells_tools=True)
    chat = Chat(messages=[HELLO, CALLED, RESULT | {"content": ["seen", image]}], tools=TOOLS)

    text = chat_template.render(chat, image_placeholder="<image>")

    assert "<tool_response>\nseen\n<image>\n</tool_response>" in text


def test_the_last_message_can_be_continued() -> None:
    text = render([HELLO, {"role": "assistant", "content": "I lo"}], continue_final_message=True)
    assert text.endswith("[assistant] I lo")
