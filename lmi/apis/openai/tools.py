"""The tools of a chat: the functions that the model may call, the one that it must call, and the
guide of such a call.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from lmi.apis.base.parameters import Parameter, named
from lmi.apis.base.readers import an_object, anything, check_levels, text
from lmi.apis.guides.fields import json_schema
from lmi.apis.guides.references import checked_references
from lmi.errors import InvalidParameter, Unsupported
from lmi.executor import GuidedDecodingParams

MAX_TOOLS = 128
MODES = ("auto", "none", "required")
ONLY_TOOLS = "functions are the only tools"
TOOLS = named(
    Parameter("tools", anything, "Functions that the model may call."),
    Parameter("tool_choice", anything, "Which of the tools the answer calls, if it must."),
)
# Tools in OpenAI's form, by the names of their functions.
Tools = dict[str, dict[str, Any]]


class ToolChoice(NamedTuple):
    """Which of its tools an answer calls, if it must call one."""

    # The mode is auto, none, required or function.
    mode: str
    # The function that must be called.
    function: str | None = None

    @property
    def is_forced(self) -> bool:
        """Whether the answer must be calls alone."""
        return self.mode in ("required", "function")


def nested_tools(value: object) -> Tools:
    """Read tools in the form of a chat, each with its function in a field of its own."""
    tools: Tools = {}
    for place, tool in _tools_by_place(value):
        if tool.get("type") not in ("function", None):
            raise Unsupported(f"{place}.type", ONLY_TOOLS)

        function = an_object(f"{place}.function", tool.get("function"))
        _add(tools, f"{place}.function", function, "parameters", tool)

    return tools


def flat_tools(value: object, kind: str, schema: str, ignored: list[str] | None = None) -> Tools:
    """Read tools of other APIs, which have the fields of their function themselves: name,
    description, and in the field `schema` the JSON schema of the parameters.

    Tools of another `kind` are left out with a line in `ignored`, or refused if that is None.
    """
    tools: Tools = {}
    for place, tool in _tools_by_place(value):
        if tool.get("type") not in (kind, None):
            if ignored is None:
                raise Unsupported(f"{place}.type", ONLY_TOOLS)

            ignored.append(f"{place}: no effect, {ONLY_TOOLS}")
            continue

        fields = {
            "name": tool.get("name"),
            "description": tool.get("description"),
            "parameters": tool.get(schema),
        }
        function = {name: value for name, value in fields.items() if value is not None}
        _add(tools, place, tool, schema, {"type": "function", "function": function})

    return tools


def _tools_by_place(value: object) -> list[tuple[str, dict[str, Any]]]:
    """Return each tool with its place in the request."""
    if value is None:
        return []

    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise InvalidParameter("tools", f"a list of at most {MAX_TOOLS} tools", value)

    return [(f"tools[{n}]", an_object(f"tools[{n}]", tool)) for n, tool in enumerate(value)]


def _add(
    tools: Tools, place: str, function: Mapping[str, Any], schema: str, tool: dict[str, Any]
) -> None:
    """Check a tool and add it to `tools`. Its `function`, at this place of the request, has the
    parameters in the field `schema`. Raises InvalidParameter.
    """
    name = text(f"{place}.name", function.get("name"))
    if not name or name in tools:
        raise InvalidParameter(f"{place}.name", "a name of its own", name)

    parameters = function.get(schema)
    parameters = {} if parameters is None else an_object(f"{place}.{schema}", parameters)
    check_levels(place.removesuffix(".function"), tool)
    checked_references(f"{place}.{schema}", parameters)
    tools[name] = tool


def tool_choice(value: object, tools: Tools, *, is_flat: bool = False) -> ToolChoice:
    """Read which tool is called: `auto`, `none`, `required`, or a function's name.

    The name is bare, as TGI and huggingface_hub send it, or in an object: inside its field
    `function`, unless it `is_flat`.
    """
    if value is None or value in MODES:
        return mode_choice(str(value or "auto"), tools)

    if isinstance(value, str):
        if value not in tools:
            rule = "auto, none, required or the name of one of tools"
            raise InvalidParameter("tool_choice", rule, value)

        return ToolChoice("function", value)

    place = "tool_choice"
    function = an_object(place, value)
    if not is_flat:
        place = "tool_choice.function"
        function = an_object(place, function.get("function"))

    return function_choice(f"{place}.name", function.get("name"), tools)


def mode_choice(mode: str, tools: Tools) -> ToolChoice:
    """Return the choice of a mode. Without tools it is none. Raises InvalidParameter."""
    if mode == "required" and not tools:
        raise InvalidParameter("tool_choice", "given together with tools", mode)

    return ToolChoice(mode if tools else "none")


def function_choice(place: str, name: object, tools: Tools) -> ToolChoice:
    """Return the choice of one function. Raises InvalidParameter for one that is no tool."""
    if text(place, name) not in tools:
        raise InvalidParameter(place, "the name of one of tools", name)

    return ToolChoice("function", str(name))


def tool_call_form(choice: ToolChoice, parser: str | None) -> str | None:
    """Return the form of calls in the text of an answer, or None if it has none. `parser` is
    `option.tool_call_parser`. Raises Unsupported if the form is not known.
    """
    if choice.mode == "none" or choice.is_forced:
        return None

    if parser is None:
        raise Unsupported(
            "tools",
            "tool_choice auto needs option.tool_call_parser (hermes, json, generic …) of the "
            "server: the chat template tells no form that is known, or it is switched off",
        )

    return None if parser == "text" else parser


def call_guide(choice: ToolChoice, tools: Tools, is_parallel: bool) -> GuidedDecodingParams:
    """Return the guide of an answer that must call: for the arguments of the named function, else
    for a list of calls, which has one call unless several are allowed (`is_parallel`).
    """
    if choice.function is not None:
        return json_schema("tools", _parameters(tools[choice.function]))

    definitions: dict[str, Any] = {}
    calls = [_call_schema(name, tool, definitions) for name, tool in tools.items()]
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if not is_parallel:
        schema["maxItems"] = 1

    if definitions:
        schema["$defs"] = definitions

    return json_schema("tools", schema)


def _call_schema(name: str, tool: Mapping[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of one function's call. The definitions of its parameters are added to
    `definitions`, which stand at the root, where references look for them.
    """
    parameters = dict(checked_references("tools.parameters", dict(_parameters(tool))))
    # References would be resolved against it, and not against the root.
    parameters.pop("$id", None)

    definitions_of_tool = an_object("tools.parameters.$defs", parameters.pop("$defs", {}))
    for key, definition in definitions_of_tool.items():
        if definitions.setdefault(key, definition) != definition:
            raise InvalidParameter("tools", "without two definitions of one name", key)

    return {
        "type": "object",
        "properties": {"name": {"type": "string", "enum": [name]}, "arguments": parameters},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _parameters(tool: Mapping[str, Any]) -> dict[str, Any]:
    return tool["function"].get("parameters") or {"type": "object"}
