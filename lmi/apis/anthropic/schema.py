"""The request of Anthropic's Messages: `{"max_tokens": 8, "messages": [{"role": "user", "content":
"Hi"}]}`.

Blocks become the messages that chat templates expect: the result of a tool is a message of its own,
and thoughts and calls are fields of the assistant's. A tool with `defer_loading` is described where
a result refers to it, and not before: so the prompt grows at its end alone. Source: the types of
Anthropic's client.
"""

from collections.abc import Callable
from typing import Any

from orjson import dumps

from lmi.apis.base.body import Message, Parsed
from lmi.apis.base.parameters import Parameter, ParameterTable, ParameterValues, named, rows
from lmi.apis.base.readers import an_object, anything, boolean, check_levels, choice, text
from lmi.apis.guides.fields import NO_GUIDE, AskedGuide, guide_of_format
from lmi.apis.openai.answer_format import OpenAIFormat
from lmi.apis.openai.chat_content import content, joined
from lmi.apis.openai.chat_images import read_image
from lmi.apis.openai.chat_messages import messages_by_place
from lmi.apis.openai.chat_schema import CHAT, chat_request, fill_in
from lmi.apis.openai.fields import CANNOT, WITHOUT_EFFECT, hidden
from lmi.apis.openai.shared_parameters import SHARED
from lmi.apis.openai.tools import TOOLS, ToolChoice, Tools, flat_tools, function_choice, mode_choice
from lmi.errors import InvalidParameter, Unsupported, shorten

# Our mode for each type of a tool choice.
MODES = {
    "auto": "auto",
    "any": "required",
    "none": "none",
    "tool": "function",
}
read_mode = choice(tuple(MODES))
read_format_type = choice(("json_schema",))
# Further fields are those of the servers that have this API too.
CANNOT_ANSWER = {
    **CANNOT,
    "mcp_servers": "nothing here calls other servers",
    "container": "nothing here runs code",
    "compaction": "no conversation is shortened here",
    "response_format": "it is called output_config.format",
    "stop": "it is called stop_sequences",
}
SILENT = (
    *WITHOUT_EFFECT,
    # The client has these for itself: what they switch on is asked for by other fields.
    "betas",
    "billing_policy",
    # Prompts share what is cached anyway.
    "cache_control",
    # A conversation that is too long is refused, not shortened.
    "context_management",
    "diagnostics",
    "fallback_credit_token",
    # Other models answer what this one declines, and it declines nothing.
    "fallbacks",
    "inference_geo",
    "speed",
    "user_profile_id",
    "workspace_id",
)
# Claude Code writes this block in front of its system prompt. It changes with each conversation, in
# some versions with each request, so with it no prompt would begin as an earlier one.
BILLING = "x-anthropic-billing-header:"


class ThreadUnsupported(Unsupported, label="unsupported"):
    """The body has only what is new of a conversation that this server should keep.

    The tool loops of Anthropic's clients begin so, and send the whole conversation once they have
    read THREAD_DETAILS.
    """


THREAD_DETAILS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


def _thread(name: str, value: object) -> None:
    raise ThreadUnsupported(name, "nothing is kept here, so messages holds the whole conversation")


MESSAGES = ParameterTable(
    {
        "model": SHARED["model"],
        "stream": SHARED["stream"],
        "max_tokens": SHARED["max_tokens"],
        "temperature": SHARED["temperature"],
        "top_p": SHARED["top_p"],
        "top_k": SHARED["top_k"],
        "cache_salt": SHARED["cache_salt"],
        "priority": SHARED["priority"],
    }
    | rows("stop_sequences")
    | TOOLS
    | named(
        Parameter("system", anything, "What the model is told before the conversation."),
        CHAT["messages"],
        CHAT["thinking"],
        CHAT["chat_template_kwargs"],
        Parameter("output_config", an_object, "The `format` that the answer must have."),
        Parameter(
            "output_format", an_object, "The `format` of `output_config`, by its first name."
        ),
    ),
    hidden=hidden(CANNOT_ANSWER, SILENT) | {"thread": Parameter("thread", _thread)},
)


def parse(message: Message[OpenAIFormat], *, is_counted: bool = False) -> Parsed[OpenAIFormat]:
    """Return the request of a message. With `is_counted` only its prompt counts."""
    ignored: list[str] = []
    values = {"max_new_tokens": None} | MESSAGES.read(message.fields, ignored)

    tools = flat_tools(values.get("tools"), kind="custom", schema="input_schema")
    deferred = set()
    for tool in values.get("tools") or ():
        if tool.get("defer_loading") is True:
            deferred.add(tool["name"])

    undescribed = {name: tools[name] for name in deferred}
    messages = _messages(values, undescribed)
    if not is_counted and values["max_new_tokens"] is None:
        raise InvalidParameter("max_tokens", "an integer of at least 1", None)

    if not is_counted and messages[-1]["role"] == "assistant":
        raise Unsupported(
            "messages",
            "an answer begins a message of its own, so the last one cannot be the assistant's",
        )

    mode_or_tool = _tool_choice(values, tools)
    guide = _read_output_config(values)
    fill_in(values, MESSAGES, message)
    return chat_request(
        values, message.format, messages, tools, mode_or_tool, guide, ignored, deferred
    )


def _tool_choice(values: dict[str, Any], tools: Tools) -> ToolChoice:
    """Return the choice. Whether calls may be parallel becomes one of the values."""
    fields = an_object("tool_choice", values.get("tool_choice") or {"type": "auto"})
    mode = MODES[read_mode("tool_choice.type", fields.get("type"))]
    is_single = boolean(
        "tool_choice.disable_parallel_tool_use", fields.get("disable_parallel_tool_use") or False
    )
    values["parallel_tool_calls"] = not is_single
    if mode == "function":
        return function_choice("tool_choice.name", fields.get("name"), tools)

    return mode_choice(mode, tools)


def _read_output_config(values: dict[str, Any]) -> AskedGuide:
    """Return the guide that the fields ask for. The `effort` is passed to the template."""
    config = values.get("output_config", {})
    if config.get("effort") is not None:
        values["reasoning_effort"] = text("output_config.effort", config["effort"])

    format = config.get("format")
    format_by_first_name = values.get("output_format")
    if format is not None and format_by_first_name is not None:
        raise InvalidParameter("output_format", "left out beside output_config.format", "both")

    if format is not None:
        return guide_of_format("output_config.format", format, read_format_type)

    if format_by_first_name is not None:
        return guide_of_format("output_format", format_by_first_name, read_format_type)

    return NO_GUIDE


def _messages(values: ParameterValues, undescribed: Tools) -> list[dict[str, Any]]:
    places = messages_by_place(values)
    messages: list[dict[str, Any]] = []
    system = _system(values.get("system"))
    if system:
        messages.append({"role": "system", "content": system})

    for name, message in places:
        messages += _read_message(name, an_object(name, message), undescribed)

    return messages


def _system(value: object) -> object:
    """Read the system prompt, and leave out the blocks that only Anthropic's billing reads."""
    prompt = content("system", value, is_needed=False, has_images=False)
    if not isinstance(value, list):
        return prompt

    blocks = [block for block in value if not str(block.get("text")).startswith(BILLING)]
    return content("system", blocks, has_images=False)


def _read_message(name: str, message: dict[str, Any], undescribed: Tools) -> list[dict[str, Any]]:
    """Return a message as templates expect it: each result of a tool is a message of its own. Take
    the tools that it describes from `undescribed`.
    """
    role = read_role(f"{name}.role", message.get("role"))
    value = message.get("content")
    if isinstance(value, str):
        return [{"role": role, "content": value}]

    if not isinstance(value, list):
        raise InvalidParameter(f"{name}.content", "a string or a list of blocks", value)

    contents = _read_blocks(f"{name}.content", value, role, undescribed)
    results = contents.get("tool_result", [])
    parts = contents["text"]
    if results and not parts:
        return results

    speech: dict[str, Any] = {"role": role, "content": joined(parts)}
    calls = contents.get("tool_use")
    if calls:
        speech["tool_calls"] = calls

    thoughts = contents.get("thinking", [])
    if any(thoughts):
        speech["reasoning_content"] = "\n".join(thoughts)

    return [*results, speech]


def _read_blocks(
    name: str, values: list[object], role: str, undescribed: Tools
) -> dict[str, list[Any]]:
    """Return what the blocks of a message hold, by their types. Images stand among the texts."""
    contents: dict[str, list[Any]] = {kind: [] for kind in BLOCKS[role]}
    for n, value in enumerate(values):
        place = f"{name}[{n}]"
        block = _without_references(place, an_object(place, value), undescribed)
        kind = block.get("type")
        if not isinstance(kind, str) or kind not in contents:
            kinds = ", ".join(contents)
            raise Unsupported(
                place,
                f"a message of the {role} has blocks of the types {kinds}, "
                f"given one of type {shorten(kind)}",
            )

        block_content = BLOCKS[role][kind](place, block)
        contents["text" if kind == "image" else kind].append(block_content)

    return contents


def _without_references(place: str, block: dict[str, Any], undescribed: Tools) -> dict[str, Any]:
    """Return a block with a text for each reference to a tool."""
    parts = block.get("content")
    if not isinstance(parts, list):
        return block

    texts = [
        _without_reference(f"{place}.content[{n}]", part, undescribed)
        for n, part in enumerate(parts)
    ]
    return block | {"content": texts}


def _without_reference(place: str, part: object, undescribed: Tools) -> object:
    """Return a part that is no reference, else a text: the description of the tool, or its name
    alone where it has been described.
    """
    if not isinstance(part, dict) or part.get("type") != "tool_reference":
        return part

    name = text(f"{place}.tool_name", part.get("tool_name"))
    if name not in undescribed:
        return {"type": "text", "text": name}

    return {"type": "text", "text": dumps(undescribed.pop(name)).decode()}


def _text(place: str, block: dict[str, Any]) -> str:
    """Return a text or a thought, which is in the field that the block's type names."""
    field = block["type"]
    return str(text(f"{place}.{field}", block.get(field)))


def _result(place: str, block: dict[str, Any]) -> dict[str, Any]:
    """Read the result of a call."""
    call_id = text(f"{place}.tool_use_id", block.get("tool_use_id"))
    result = content(f"{place}.content", block.get("content"), is_needed=False)
    return {"role": "tool", "content": result, "tool_call_id": call_id}


def _call(place: str, block: dict[str, Any]) -> dict[str, Any]:
    """Read a call of an earlier answer."""
    call_id = text(f"{place}.id", block.get("id"))
    name = text(f"{place}.name", block.get("name"))
    arguments = an_object(f"{place}.input", block.get("input"))
    check_levels(f"{place}.input", arguments)

    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


BLOCKS: dict[str, dict[str, Callable[[str, dict[str, Any]], Any]]] = {
    "user": {"text": _text, "image": read_image, "tool_result": _result},
    "assistant": {
        "text": _text,
        "thinking": _text,
        # Nobody here can read a redacted thought.
        "redacted_thinking": lambda place, block: None,
        "tool_use": _call,
    },
    "system": {"text": _text},
}
read_role = choice(tuple(BLOCKS))
