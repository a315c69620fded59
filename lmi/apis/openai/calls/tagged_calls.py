"""Calls whose name and arguments stand between tags. An argument is passed on as JSON when it is whole."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

import orjson

from lmi.apis.openai.calls.reader import Arguments, CallReader, Part, read_name
from lmi.apis.openai.tools import Tools

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
