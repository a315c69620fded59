"""Describes tools, calls and their results as texts of a chat, for a template without tools.

The form of a call is that of Hermes and Qwen, which most models have seen.
tests/chats/test_tools.py shows each text.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

Messages = Sequence[Mapping[str, Any]]
# Tells the model which tools it has, and how it calls one.
ABOUT_TOOLS = """\
You can call these functions:
{functions}

To call a function, answer with nothing but its name and arguments as JSON:
<tool_call>
{{"name": NAME, "arguments": {{ARGUMENT: VALUE}}}}
</tool_call>
If no function is of use, answer with text."""


def in_words(messages: Messages, tools: Messages, *, takes_system: bool) -> Messages:
    """Return messages in which tools, calls and their results are texts.

    The tools stand in the system message, or in the first message of the user if the template
    refuses messages of the system (`takes_system` is false). Without such a message, one is added.
    """
    functions = [_json(tool["function"]) for tool in tools]
    about_tools = ABOUT_TOOLS.format(functions="\n".join(functions))
    plain_messages = [_plain(message) for message in messages]

    role = "system" if takes_system else "user"
    roles = [message["role"] for message in plain_messages]
    place = roles.index(role) if role in roles else None
    if place is None or (takes_system and place > 0):
        return [{"role": role, "content": about_tools}, *plain_messages]

    message = plain_messages[place]
    content = message.get("content") or ""
    if takes_system:
        content = _joined(content, about_tools)
    else:
        content = _joined(about_tools, content)

    plain_messages[place] = {**message, "content": content}
    return plain_messages


def _plain(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message in which a call or the result of one is a text."""
    content = message.get("content") or ""
    if message["role"] in ("tool", "function"):
        response = _joined("<tool_response>", content, "</tool_response>", between="\n")
        return {"role": "user", "content": response}

    if "tool_calls" not in message:
        return message

    texts = [content] if content else []
    for call in message["tool_calls"]:
        name = call["function"].get("name")
        arguments = call["function"].get("arguments")
        function = _json({"name": name, "arguments": arguments})
        texts.append(f"<tool_call>\n{function}\n</tool_call>")

    plain_message = dict(message)
    del plain_message["tool_calls"]
    plain_message["content"] = _joined(*texts, between="\n")
    return plain_message


def _joined(*contents: Any, between: str = "\n\n") -> Any:
    """Return contents as one text, or as a list of parts if images are among them."""
    if all(isinstance(content, str) for content in contents):
        return between.join(contents)

    parts = []
    for content in contents:
        if isinstance(content, list):
            parts += content
        else:
            parts.append(content)

    return parts


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
