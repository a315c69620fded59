"""Calls whose arguments a model does not write as JSON, but between tags or as Python. They are passed on as JSON.

TaggedCall      a name and arguments between tags; an argument is passed on when it is whole
PythonCallList  a list as Python writes it, [f(a=1, b="x"), g()]; it is passed on when it is whole
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from typing import Any, NamedTuple

import orjson

from lmi.apis.openai.calls.reader import Arguments, Brackets, CallReader, Part, ToolCall, read_name
from lmi.apis.openai.tools import Tools

MAX_CHARS, MAX_LEVELS = 64 << 10, 50  # of a list, and of brackets in it
KINDS: dict[type, set[str]] = {  # the types of a schema that a value has
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    type(None): {"null"},
    dict: {"object"},
    list: {"array"},
}


class Tags(NamedTuple):
    """`head` matches up to `stop`, which ends it (`>`) or begins what follows; its first group is the name.

    `argument` matches one argument, its groups are name and value, and `closing` is its end.
    """

    head: str
    stop: str
    opening: str
    argument: str
    closing: str
    end: str


class TaggedCall(CallReader):
    """The type of an argument is that of the function's schema; without one it is a text."""

    def __init__(self, tags: Tags, tools: Tools) -> None:
        super().__init__()
        self._tags, self._tools = tags, tools
        self._head, self._argument = re.compile(tags.head), re.compile(tags.argument, re.DOTALL)
        self._schemas: dict[str, Any] = {}
        self._held = ""
        self._num_arguments = 0

    def feed(self, text: str) -> tuple[list[Part], str]:
        parts: list[Part] = []
        if not self.has_begun:
            found, text = read_name(self, text, self._tags.stop, self._head)
            if found is None:
                return [], text
            function = self._tools.get(found.name, {}).get("function", {})
            schemas = (function.get("parameters") or {}).get("properties")
            self._schemas = schemas if isinstance(schemas, dict) else {}
            parts.append(found)
            text = text.removeprefix(">")
        self._held += text
        while not self.is_over and self._read_argument(parts):
            pass
        rest, self._held = (self._held, "") if self.is_over else ("", self._held)
        return parts, rest

    def _read_argument(self, parts: list[Part]) -> bool:
        """Read the next argument, or the end of the call. Returns False when more text is needed."""
        held, tags = self._held.lstrip(), self._tags
        if held.startswith(tags.opening):
            if tags.closing not in held or (found := self._argument.match(held)) is None:
                return False
            name, value = found[1].strip(), found[2]
            before, key = ", " if self._num_arguments else "{", json.dumps(name, ensure_ascii=False)
            self._num_arguments += 1
            parts.append(Arguments(f"{before}{key}: {_typed(value, self._schemas.get(name))}"))
            self._held = held[found.end() :]
        elif tags.opening.startswith(held) or (tags.end.startswith(held) and held != tags.end):
            return False
        else:  # without its end the text goes on
            self._held, self.is_over = held.removeprefix(tags.end), True
            parts.append(Arguments("}" if self._num_arguments else "{}"))
        return True


def _typed(text: str, schema: object) -> str:
    """Return the JSON of an argument that a model wrote as text: of a type that the schema has, else a text."""
    literal = {"True": "true", "False": "false", "None": "null"}.get(text.strip(), text.strip())
    try:
        kinds = KINDS.get(type(orjson.loads(literal)), set())
    except ValueError:
        kinds = set()
    return literal if kinds & _types(schema) else json.dumps(text, ensure_ascii=False)


def _types(schema: object) -> set[str]:
    if not isinstance(schema, dict):
        return set()
    given = schema.get("type")
    types = {each for each in (given if isinstance(given, list) else [given]) if isinstance(each, str)}
    choices = [each for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list) for each in schema[key]]
    return types.union(*map(_types, choices))


class PythonCallList(CallReader):
    """Begins behind the opening bracket."""

    def __init__(self) -> None:
        super().__init__()
        self._brackets = Brackets("[({", "])}", "'\"", depth=1)

    def feed(self, text: str) -> tuple[list[Part], str]:
        room = MAX_CHARS - len(self.text)
        read = self._brackets.read
        ends = (at + 1 for at, char in enumerate(text[:room]) if not 0 < read(char) <= MAX_LEVELS)
        end = next(ends, min(room, len(text)))
        self.text += text[:end]
        if self._brackets.depth == 0:
            parts = _python_calls("[" + self.text)
            self.is_over = self.has_begun = bool(parts)
            self.is_broken = not parts
            return parts, text[end:]
        self.is_broken = self._brackets.depth > MAX_LEVELS or end == room
        return [], text[end:]


def _python_calls(text: str) -> list[Part]:
    """Return the calls of a list in Python's form, or none if it holds anything else."""
    parts: list[Part] = []
    try:
        with warnings.catch_warnings(action="ignore"):  # about escapes
            calls = ast.parse(text.strip(), mode="eval").body
        if not isinstance(calls, ast.List):
            return []
        for call in calls.elts:
            if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name | ast.Attribute):
                return []
            if any(each.arg is None for each in call.keywords):  # **names
                return []
            values = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
            arguments = json.dumps(values, ensure_ascii=False, allow_nan=False)
            parts += [ToolCall(ast.unparse(call.func)), Arguments(arguments)]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return []
    return parts
