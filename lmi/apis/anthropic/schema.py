"""The schema of Anthropic's Messages: `{"max_tokens": 8, "messages": [{"role": "user", "content": "Hi"}]}`.

Blocks become the messages that chat templates expect: the result of a tool is a message of its own, and thoughts and
calls are fields of the assistant's. `thinking` is passed to the template as `enable_thinking`, which many know; the
model decides how long it thinks. A tool with `defer_loading` is described where a result refers to it, and not before:
so the prompt grows at its end alone. Source: the types of Anthropic's client.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from orjson import dumps

from lmi.apis.base.guides import CONTRACT_NAME, AskedGuide, an_object, check_levels, json_schema
from lmi.apis.base.parameters import Given, Parameter, ParameterTable, named, rows
from lmi.apis.base.readers import Message, Parsed, boolean, choice, takes, text
from lmi.apis.openai.chat_schema import CHAT, chat_request, content, content_text, joined, listed_messages
from lmi.apis.openai.images import read_image
from lmi.apis.openai.schema import SHARED, TOOLS, OpenAIFormat, anything, hidden
from lmi.apis.openai.tools import ToolChoice, Tools, flat_tools, function_choice, mode_choice
from lmi.errors import InvalidParameter, Unsupported, shorten

CHOICES = {"auto": "auto", "any": "required", "none": "none", "tool": "function"}  # our mode of each
THINKING = ("enabled", "adaptive", "between_tools", "disabled")
CANNOT = {"mcp_servers": "nothing here calls other servers", "container": "nothing here runs code"}
WITHOUT_EFFECT = (
    "metadata cache_control context_management diagnostics inference_geo service_tier speed user_profile_id".split()
)
FORMAT = "output_config.format"


@takes({"type": "object", "required": ["type"], "properties": {"type": {"enum": list(THINKING)}}})
def _thinking(name: str, value: object) -> dict[str, Any]:
    """Return the variable of the template. `budget_tokens` and `display` have no effect."""
    kind = choice(THINKING)(f"{name}.type", an_object(name, value).get("type"))
    return {"enable_thinking": kind != "disabled"}


MESSAGES = ParameterTable(
    {name: SHARED[name] for name in "model stream max_tokens temperature top_p top_k cache_salt priority".split()}
    | rows("stop_sequences")
    | TOOLS
    | named(Parameter("system", anything, "What the model is told before the conversation."), CHAT["messages"])
    | {"thinking": Parameter("chat_template_kwargs", _thinking, "Whether the chat template lets the model think.")}
    | named(Parameter("output_config", an_object, "The `format` that the answer must have.")),
    hidden=hidden(CANNOT, WITHOUT_EFFECT),
)


def parse(message: Message[OpenAIFormat], *, is_counted: bool = False) -> Parsed[OpenAIFormat]:
    """Return the request of a message. With `is_counted` only its prompt counts."""
    ignored: list[str] = []
    given = {"max_new_tokens": None} | MESSAGES.read(message.fields, ignored)
    tools = flat_tools(given.get("tools"), kind="custom", schema="input_schema")
    deferred = {tool["name"] for tool in given.get("tools") or () if tool.get("defer_loading") is True}
    messages = _messages(given, {name: tools[name] for name in deferred})
    if not is_counted and given["max_new_tokens"] is None:
        raise InvalidParameter("max_tokens", "an integer of at least 1", None)
    if not is_counted and messages[-1]["role"] == "assistant":
        raise Unsupported(
            "messages", "an answer begins a message of its own, so the last one cannot be the assistant's"
        )
    choice = _tool_choice(given, tools)
    guide = _read_output_config(given)
    return chat_request(given, message.format, messages, tools, choice, guide, ignored, deferred)


def _tool_choice(given: dict[str, Any], tools: Tools) -> ToolChoice:
    wanted = an_object("tool_choice", given.get("tool_choice") or {"type": "auto"})
    mode = CHOICES[choice(tuple(CHOICES))("tool_choice.type", wanted.get("type"))]
    is_single = boolean("tool_choice.disable_parallel_tool_use", wanted.get("disable_parallel_tool_use") or False)
    given["parallel_tool_calls"] = not is_single
    if mode == "function":
        return function_choice("tool_choice.name", wanted.get("name"), tools)
    return mode_choice(mode, tools)


def _read_output_config(given: dict[str, Any]) -> AskedGuide:
    """Return the guide that the field asks for. Its `effort` is passed to the template."""
    config = given.get("output_config", {})
    if config.get("effort") is not None:
        given["reasoning_effort"] = text("output_config.effort", config["effort"])
    if config.get("format") is None:
        return None, {}
    form = an_object(FORMAT, config["format"])
    choice(("json_schema",))(f"{FORMAT}.type", form.get("type"))
    return json_schema(f"{FORMAT}.schema", form.get("schema")), {CONTRACT_NAME: FORMAT}


def _messages(given: Given, deferred: Tools) -> list[dict[str, Any]]:
    messages = listed_messages(given)
    system = content_text("system", given.get("system"), is_needed=False)
    said = [{"role": "system", "content": system}] if system else []
    for name, message in messages:
        said += _read_message(name, an_object(name, message), deferred)
    return said


def _read_message(name: str, message: dict[str, Any], deferred: Tools) -> list[dict[str, Any]]:
    """Return the results of tools in a message, and the rest of it. Take what is described from `deferred`."""
    role, said = choice(tuple(BLOCKS))(f"{name}.role", message.get("role")), message.get("content")
    if isinstance(said, str):
        return [{"role": role, "content": said}]
    if not isinstance(said, list):
        raise InvalidParameter(f"{name}.content", "a string or a list of blocks", said)
    found: dict[str, list[Any]] = {kind: [] for kind in BLOCKS[role]}
    for n, item in enumerate(said):
        place = f"{name}.content[{n}]"
        block = _without_references(place, an_object(place, item), deferred)
        kind = block.get("type")
        if not isinstance(kind, str) or kind not in found:
            raise Unsupported(place, f"messages are text alone, given a block of type {shorten(kind)} ({role})")
        found["text" if kind == "image" else kind].append(BLOCKS[role][kind](place, block))
    results, parts, thoughts, calls = (found.get(kind, []) for kind in ("tool_result", "text", "thinking", "tool_use"))
    rest: dict[str, Any] = {"role": role, "content": joined(parts)}
    rest |= {"tool_calls": calls} if calls else {}
    rest |= {"reasoning_content": "\n".join(thoughts)} if thoughts else {}
    return results if results and not parts else [*results, rest]


def _without_references(place: str, block: dict[str, Any], deferred: Tools) -> dict[str, Any]:
    """Return a block with a text for each reference to a tool: its description, or its name alone where it is known."""

    def described(n: int, part: object) -> object:
        if not isinstance(part, dict) or part.get("type") != "tool_reference":
            return part
        name = text(f"{place}.content[{n}].tool_name", part.get("tool_name"))
        return {"type": "text", "text": dumps(deferred.pop(name)).decode() if name in deferred else name}

    said = block.get("content")
    return block | {"content": [described(n, part) for n, part in enumerate(said)]} if isinstance(said, list) else block


def _said(place: str, block: dict[str, Any]) -> str:
    """Return a text or a thought, which is in the field that the block's type names."""
    field = block["type"]
    return str(text(f"{place}.{field}", block.get(field)))


def _result(place: str, block: dict[str, Any]) -> dict[str, Any]:
    call_id = text(f"{place}.tool_use_id", block.get("tool_use_id"))
    said = content(f"{place}.content", block.get("content"), is_needed=False)
    return {"role": "tool", "content": said, "tool_call_id": call_id}


def _call(place: str, block: dict[str, Any]) -> dict[str, Any]:
    call_id, name = text(f"{place}.id", block.get("id")), text(f"{place}.name", block.get("name"))
    arguments = an_object(f"{place}.input", block.get("input"))
    check_levels(f"{place}.input", arguments)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


BLOCKS: dict[str, dict[str, Callable[[str, dict[str, Any]], Any]]] = {  # by role
    "user": {"text": _said, "image": read_image, "tool_result": _result},
    "assistant": {
        "text": _said,
        "thinking": _said,
        "redacted_thinking": lambda place, block: None,  # nobody here can read it
        "tool_use": _call,
    },
    "system": {"text": _said},
}
