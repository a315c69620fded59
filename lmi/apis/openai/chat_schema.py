"""The schema of chat completions: `{"model": "m", "messages": [{"role": "user", "content": "Hello"}]}`.

Messages are passed to the chat template in the form that templates expect: text as one string, `developer` as `system`,
and the arguments of earlier calls as objects. If a call is forced, the answer must fit a JSON schema.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import orjson

from lmi.apis.base.guides import CONTRACT_NAME, an_object, asked_guide, check_levels, check_references, json_schema
from lmi.apis.base.parameters import MAX_IGNORED, Given, Parameter, ParameterTable
from lmi.apis.base.readers import Message, Parsed, boolean, check_size, integer, text
from lmi.apis.openai import schema
from lmi.apis.openai.schema import OpenAIFormat
from lmi.errors import InvalidParameter, Unsupported, shorten
from lmi.executor import GuidedDecodingParams
from lmi.settings.config import ModelConfig
from lmi.types import Chat, OutputFormat

MAX_TOOLS = 128
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
CANNOT_CHAT = schema.CANNOT | {
    "functions": "it is called tools now",
    "function_call": "it is called tool_choice now",
    "audio": "models here write text",
    "web_search_options": "nothing here searches",
    "add_special_tokens": "the chat template writes them",
    "echo": "an answer is a message of its own",
    "chat_template": "the server has its own (option.chat_template)",
    "documents": "templates are given messages and tools alone",
}
CHAT = ParameterTable(
    schema.SHARED
    | {name: Parameter(name, schema.anything) for name in ("tools", "tool_choice", "modalities")}
    | {
        "messages": Parameter("messages", schema.anything, fields=("inputs", "input_token_ids")),
        "max_completion_tokens": Parameter("max_completion_tokens", integer(1)),
        "top_logprobs": Parameter("top_logprobs", integer(0, schema.MAX_LOG_PROBS), fields=("num_top_log_probs",)),
        "logprobs": Parameter("logprobs", boolean, fields=("return_log_probs",)),
        "parallel_tool_calls": Parameter("parallel_tool_calls", boolean),
        "reasoning_effort": Parameter("reasoning_effort", text),
        # vLLM's
        "add_generation_prompt": Parameter("add_generation_prompt", boolean),
        "continue_final_message": Parameter("continue_final_message", boolean, (False,)),
        "chat_template_kwargs": Parameter("chat_template_kwargs", an_object),
    },
    hidden=schema.hidden(CANNOT_CHAT),
)


class _ToolChoice(NamedTuple):
    mode: str  # auto, none, required or function
    function: str | None = None  # that must be called

    @property
    def is_forced(self) -> bool:
        return self.mode in ("required", "function")


class _Part(msgspec.Struct):
    text: msgspec.Raw = msgspec.Raw()


class _Said(msgspec.Struct):
    content: msgspec.Raw = msgspec.Raw()


class _Outline(msgspec.Struct):
    """The part of a body that `check_size` measures."""

    messages: list[_Said] = []


def read(
    body: bytes, content_type: str | None, model: ModelConfig, *, stream_format: OutputFormat | None = None
) -> Message[OpenAIFormat]:
    """Decode the body and choose the format of its answer, as `schema.py: read` does."""
    check_size(body, _num_texts_bytes, "a chat", "the texts")
    return schema.message(body, model, stream_format)


def _num_texts_bytes(body: bytes) -> int:
    return sum(_num_text_bytes(bytes(said.content)) for said in msgspec.json.decode(body, type=_Outline).messages)


def _num_text_bytes(content: bytes) -> int:
    if content[:1] != b"[":
        return len(content) if content[:1] == b'"' else 0
    parts = msgspec.json.decode(content, type=list[_Part])
    return sum(len(bytes(part.text)) for part in parts if bytes(part.text)[:1] == b'"')


def parse(message: Message[OpenAIFormat]) -> Parsed[OpenAIFormat]:
    """Return the request of a chat. Raises InvalidParameter or Unsupported."""
    ignored: list[str] = []
    given = {"max_new_tokens": None} | CHAT.read(message.fields, ignored)  # what the context has room for
    given["max_new_tokens"] = given.pop("max_completion_tokens", given["max_new_tokens"])
    _check_together(given)
    schema.forget_unused(given, CHAT, message.format, ignored)
    tools = _tools(given.get("tools") or [])
    choice = _tool_choice(given.get("tool_choice"), tools)
    format = _chat_format(given, message.format, choice)
    guide, field_names = asked_guide(given)
    if choice.is_forced:
        guide = _call_guide(choice, tools, given.get("parallel_tool_calls", True))
        field_names = {CONTRACT_NAME: "tool_choice"}
    elif format.tool_calls or format.reasoning:
        given.setdefault("skip_special_tokens", False)  # some models have the marks as special tokens
    chat = _chat(given, list(tools.values()) if choice.mode != "none" else [])
    request = schema.openai_request(
        given, format, chat=chat, needs_log_probs=format.has_log_probs, guided_decoding=guide
    )
    return Parsed((request,), replace(format, field_names=field_names), tuple(ignored[:MAX_IGNORED]))


def _check_together(given: Given) -> None:
    CHAT.check_together(given)
    schema.check_whole(given)
    if given.get("modalities", ["text"]) != ["text"]:
        raise Unsupported("modalities", "models here write text alone")
    if given.get("top_logprobs") and not given.get("logprobs"):
        raise InvalidParameter("top_logprobs", "given together with logprobs true", given["top_logprobs"])
    if given.get("continue_final_message") and given.get("add_generation_prompt"):
        raise InvalidParameter("continue_final_message", "false beside add_generation_prompt true", True)


def _chat_format(given: Given, format: OpenAIFormat, choice: _ToolChoice) -> OpenAIFormat:
    return replace(
        format,
        has_usage=schema.wants_usage(given),
        has_token_ids=given.get("return_token_ids", False),
        has_log_probs=given.get("logprobs", False),
        num_prompt_log_probs=given.get("num_prompt_log_probs"),
        names_tokens_by_id=given.get("return_tokens_as_token_ids", False),
        num_top_log_probs=given.get("top_logprobs", 0),
        num_choices=given.get("n", 1),
        function=choice.function,
        tool_calls=_tool_call_form(choice, format.tool_calls),
        reasoning=None if choice.is_forced else format.reasoning,
    )


def _chat(given: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> Chat:
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidParameter("messages", "a non-empty list of messages", messages)
    variables = dict(given.get("chat_template_kwargs", {}))
    if "reasoning_effort" in given:
        variables.setdefault("reasoning_effort", given["reasoning_effort"])
    is_continued = given.get("continue_final_message", False)
    return Chat(
        messages=[_message(f"messages[{n}]", value) for n, value in enumerate(messages)],
        tools=tools or None,
        variables=variables,
        add_generation_prompt=given.get("add_generation_prompt", not is_continued),
        continue_final_message=is_continued,
    )


def _message(name: str, value: object) -> dict[str, Any]:
    fields = an_object(name, value)
    role = fields.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidParameter(f"{name}.role", "one of " + ", ".join(ROLES), role)
    known: dict[str, Any] = {
        "role": "system" if role == "developer" else role,
        "content": _content(f"{name}.content", fields.get("content"), is_needed=role != "assistant"),
    }
    for key in ("name", "tool_call_id", "reasoning_content"):  # passed to templates unchanged
        if fields.get(key) is not None:
            known[key] = text(f"{name}.{key}", fields[key])
    if fields.get("tool_calls") is not None:
        known["tool_calls"] = _past_calls(f"{name}.tool_calls", fields["tool_calls"])
    return known


def _content(name: str, value: object, *, is_needed: bool) -> str:
    """Read a text, or a list of text parts, which newlines join."""
    if isinstance(value, str):
        return value
    if value is None and not is_needed:
        return ""
    if not isinstance(value, list):
        raise InvalidParameter(name, "a string or a list of text parts", value)
    return "\n".join(_part(f"{name}[{n}]", part) for n, part in enumerate(value))


def _part(name: str, value: object) -> str:
    part = an_object(name, value)
    kind = part.get("type")
    if kind in ("text", "refusal"):
        said: str = text(f"{name}.{kind}", part.get(str(kind)))
        return said
    raise Unsupported(name, f"messages are text alone, given a part of type {shorten(kind)}")


def _past_calls(name: str, value: object) -> list[dict[str, Any]]:
    """Read the calls of an earlier answer. The wire has their arguments as text, but templates expect objects."""
    if not isinstance(value, list):
        raise InvalidParameter(name, "a list of calls", value)
    calls = []
    for n, item in enumerate(value):
        call = an_object(f"{name}[{n}]", item)
        check_levels(f"{name}[{n}]", call)
        function = an_object(f"{name}[{n}].function", call.get("function"))
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = _parsed(arguments)
        calls.append(call | {"function": function | {"arguments": arguments}})
    return calls


def _parsed(arguments: str) -> Any:
    """Return the arguments as an object if templates can walk through it, else as they are."""
    try:
        value = orjson.loads(arguments or "{}")
        orjson.dumps(value)
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):  # not JSON, or nested too deeply
        return arguments
    return value if isinstance(value, dict) else arguments


def _tools(value: object) -> dict[str, dict[str, Any]]:
    """Read the tools. Returns them by the names of their functions."""
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise InvalidParameter("tools", f"a list of at most {MAX_TOOLS} tools", value)
    tools: dict[str, dict[str, Any]] = {}
    for n, item in enumerate(value):
        tool = an_object(f"tools[{n}]", item)
        if tool.get("type", "function") != "function":
            raise Unsupported(f"tools[{n}].type", "functions are the only tools")
        function = an_object(f"tools[{n}].function", tool.get("function"))
        name = text(f"tools[{n}].function.name", function.get("name"))
        if not name or name in tools:
            raise InvalidParameter(f"tools[{n}].function.name", "a name of its own", name)
        if function.get("parameters") is not None:
            an_object(f"tools[{n}].function.parameters", function["parameters"])
        check_levels(f"tools[{n}]", tool)
        check_references(f"tools[{n}].function.parameters", function.get("parameters") or {})
        tools[name] = tool
    return tools


def _tool_choice(value: object, tools: Mapping[str, Any]) -> _ToolChoice:
    if value is None:
        return _ToolChoice("auto" if tools else "none")
    if isinstance(value, str):
        if value not in ("auto", "none", "required"):
            raise InvalidParameter("tool_choice", "auto, none, required or a named function", value)
        if value == "required" and not tools:
            raise InvalidParameter("tool_choice", "given together with tools", value)
        return _ToolChoice(value if tools else "none")
    function = an_object("tool_choice.function", an_object("tool_choice", value).get("function"))
    name = text("tool_choice.function.name", function.get("name"))
    if name not in tools:
        raise InvalidParameter("tool_choice.function.name", "the name of one of tools", name)
    return _ToolChoice("function", name)


def _tool_call_form(choice: _ToolChoice, parser: str | None) -> str | None:
    """Return the form of calls in the text, None if it has none. `parser` is the server's setting."""
    if choice.mode in ("none", "function"):
        return None
    if choice.mode == "required":
        return "json"
    if parser is None:
        raise Unsupported("tools", "tool_choice auto needs option.tool_call_parser (hermes or json) of the server")
    return None if parser == "text" else parser


def _call_guide(choice: _ToolChoice, tools: Mapping[str, Mapping[str, Any]], is_parallel: bool) -> GuidedDecodingParams:
    """Return a guide for the arguments of a named function, or for a list of calls (one call unless parallel)."""
    if choice.function is not None:
        return json_schema("tools", _parameters(tools[choice.function]) or {"type": "object"})
    definitions: dict[str, Any] = {}
    calls = [_call_schema(name, tool, definitions) for name, tool in tools.items()]
    wanted: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if not is_parallel:
        wanted["maxItems"] = 1
    return json_schema("tools", wanted | ({"$defs": definitions} if definitions else {}))


def _call_schema(name: str, tool: Mapping[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of one function's call. Its definitions move to the root, where references look for them."""
    parameters = dict(_parameters(tool) or {"type": "object"})
    for key, definition in an_object("tools.parameters.$defs", parameters.pop("$defs", {})).items():
        if definitions.setdefault(key, definition) != definition:
            raise InvalidParameter("tools", "without two definitions of one name", key)
    return {
        "type": "object",
        "properties": {"name": {"type": "string", "enum": [name]}, "arguments": parameters},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _parameters(tool: Mapping[str, Any]) -> dict[str, Any] | None:
    parameters: dict[str, Any] | None = tool["function"].get("parameters")
    return parameters
