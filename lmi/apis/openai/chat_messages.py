"""Reads the messages of a chat into the form that chat templates expect: text as one string,
`developer` as `system`, and the arguments of earlier calls as objects.
"""

import re
from collections.abc import Mapping
from typing import Any

import orjson

from lmi.apis.base.parameters import ParameterValues
from lmi.apis.base.readers import an_object, check_levels, text
from lmi.apis.openai.chat_content import content
from lmi.errors import InvalidParameter

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
# A template writes a role beside its marks, so a role has no character that marks are made of.
OTHER_ROLE = re.compile("[A-Za-z0-9_.-]{1,64}")
ROLE_RULE = (
    f"one of {', '.join(ROLES)}, or the chat template's own, of 1 to 64 letters, digits, _ . and -"
)


def messages_by_place(values: ParameterValues) -> list[tuple[str, object]]:
    """Return each message with its place in the request."""
    messages = values.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidParameter("messages", "a non-empty list of messages", messages)

    return [(f"messages[{n}]", message) for n, message in enumerate(messages)]


def read_message(name: str, value: object) -> dict[str, Any]:
    """Return a message as templates expect it. Empty fields are left out: clients send whole
    objects with them, and templates ask only whether a message has a field.
    """
    fields = an_object(name, value)
    role = _read_role(f"{name}.role", fields.get("role"))
    message: dict[str, Any] = {
        "role": "system" if role == "developer" else role,
        "content": content(
            f"{name}.content",
            fields.get("content"),
            is_needed=role != "assistant",
            has_images=role in ("user", "tool"),
        ),
    }

    # These two are passed to templates unchanged.
    for key in ("name", "tool_call_id"):
        if fields.get(key) is not None and text(f"{name}.{key}", fields[key]):
            message[key] = fields[key]

    thought = _past_thought(name, fields)
    if thought:
        message["reasoning_content"] = thought

    if fields.get("tool_calls") is not None:
        calls = _past_calls(f"{name}.tool_calls", fields["tool_calls"])
        if calls:
            message["tool_calls"] = calls

    return message


def _read_role(name: str, value: object) -> str:
    """Read a role: one that every model has, or one of the template's own. The template refuses
    those that it does not know.
    """
    if isinstance(value, str) and (value in ROLES or OTHER_ROLE.fullmatch(value)):
        return value

    raise InvalidParameter(name, ROLE_RULE, value)


def _past_thought(name: str, fields: Mapping[str, object]) -> str:
    """Return the thoughts of an earlier answer, or "". They have two names, of which a client may
    send back either or both.
    """
    thoughts = ""
    for key in ("reasoning", "reasoning_content"):
        if fields.get(key) is not None:
            thoughts_under_key = str(text(f"{name}.{key}", fields[key]))
            if not thoughts:
                thoughts = thoughts_under_key

    return thoughts


def _past_calls(name: str, value: object) -> list[dict[str, Any]]:
    """Read the calls of an earlier answer. Clients send their arguments as texts, but templates
    expect objects.
    """
    if not isinstance(value, list):
        raise InvalidParameter(name, "a list of calls", value)

    calls = []
    for n, call_value in enumerate(value):
        place = f"{name}[{n}]"
        call = an_object(place, call_value)
        check_levels(place, call)
        function = an_object(f"{place}.function", call.get("function"))
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = parsed_arguments(arguments)

        calls.append(call | {"function": function | {"arguments": arguments}})

    return calls


def parsed_arguments(arguments: str) -> Any:
    """Return the arguments as an object, or as they are if that is not possible: if they are no
    object in JSON, or one that is nested too deeply to be written again inside a message.
    """
    try:
        value = orjson.loads(arguments or "{}")
        orjson.dumps([[[[value]]]])
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        return arguments

    return value if isinstance(value, dict) else arguments
