"""Tools in words, for a template that does not show them to the model: a text of the system, and
calls as texts.

The form of a call is that of Hermes and Qwen, which most models have seen.
tests/chats/test_tools.py shows each text.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

Messages = Sequence[Mapping[str, Any]]
TOLD = """\
You can call these functions:
{functions}

To call a function, answer with nothing but its name and arguments as JSON:
<tool_call>
{{"name": NAME, "arguments": {{ARGUMENT: VALUE}}}}
</tool_call>
If no function is of use, answer with text."""


def in_words(messages: Messages, tools: Messages, *, takes_system: bool) -> Messages:
    """Return messages that tell of the tools, in which calls and their results are texts.

    The system tells of them, or where the template takes no message of it, the user's first one.
    """
    functions = "\n".join(_json(tool["function"]) for tool in tools)
    told = TOLD.format(functions=functions)
    said = [_said(message) for message in messages]

    role = "system" if takes_system else "user"
    place = next((at for at, message in enumerate(said) if message["role"] == role), None)
    if place is None or (takes_system and place > 0):
        return [{"role": role, "content": told}, *said]

    content = said[place].get("content") or ""
    both = (content, told) if takes_system else (told, content)
    said[place] = {**said[place], "content": _joined(*both)}
    return said


def _said(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message without fields that only a template with tools reads."""
    content = message.get("content") or ""
    if message["role"] in ("tool", "function"):
        return {
            "role": "user",
            "content": _joined("<tool_response>", content, "</tool_response>", between="\n"),
        }

    if "tool_calls" not in message:
        return message

    functions = [call["function"] for call in message["tool_calls"]]
    named = [{name: function.get(name) for name in ("name", "arguments")} for function in functions]
    calls = [f"<tool_call>\n{_json(function)}\n</tool_call>" for function in named]
    texts = filter(None, (content, *calls))
    others = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**others, "content": _joined(*texts, between="\n")}


def _joined(*contents: Any, between: str = "\n\n") -> Any:
    """Return contents as one text, or as a list of parts if images are among them."""
    if all(isinstance(content, str) for content in contents):
        return between.join(contents)

    return [
        part
        for content in contents
        for part in (content if isinstance(content, list) else [content])
    ]


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
