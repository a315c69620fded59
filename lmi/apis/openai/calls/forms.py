"""The forms of a call, whose arguments are passed on as JSON, and of an answer that is calls without marks.

JsonCall        {"name": "f", "arguments": {…}}; `parameters` is another name of `arguments`
JsonCallList    a list of them
NamedCall       the name, marks, and the arguments
MistralCalls    one of the last two
TaggedCall      a name and arguments between tags; an argument is passed on when it is whole
PythonCallList  a list as Python writes it, [f(a=1, b="x"), g()]; it is passed on when it is whole
JsonCalls       an answer that is one JsonCall, several with ; between, or a list
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from typing import Any, NamedTuple

import orjson

from lmi.apis.openai.calls.reader import Arguments, Brackets, CallReader, Part, Text, ToolCall, read_name
from lmi.apis.openai.tools import Tools

ARGUMENTS = ("arguments", "parameters")
SPACE = " \t\r\n"
OF_JSON = ("{[", "}]", '"')  # brackets and quotes
PYTHON_TAG = "<|python_tag|>"  # of Llama 3, before its calls
MISTRAL_HEAD = r"\s*([\w.:-]+)(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*"
MAX_CHARS, MAX_LEVELS = 64 << 10, 50  # of a list, and of brackets in it
KINDS: dict[type, set[str]] = {  # the types of a schema that a value has
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    type(None): {"null"},
    dict: {"object"},
    list: {"array"},
}


class JsonCall(CallReader):
    def __init__(self) -> None:
        super().__init__()
        self._name = ""
        self._brackets = Brackets(*OF_JSON)
        self._key: str | None = None
        self._from = 0  # where the key or value of the outer object that is being read begins
        self._arguments_from = self._arguments_to = -1
        self._num_released = 0

    def feed(self, text: str) -> tuple[list[Part], str]:
        position = len(self.text)
        self.text += text
        while position < len(self.text) and not (self.is_over or self.is_broken):
            self._read(position, self.text[position])
            position += 1
        rest, self.text = self.text[position:], self.text[:position]
        if self.is_over and not self._can_begin:
            self.is_over, self.is_broken = False, True
        return [] if self.is_broken else self._release(), rest

    def _read(self, at: int, char: str) -> None:
        was_quoted, depth = bool(self._brackets.quote), self._brackets.read(char)
        if was_quoted:
            if depth == 1 and self._key is None and not self._brackets.quote:
                self._key = _loaded(self.text[self._from : at + 1])
                self.is_broken = self._key is None
        elif char == '"' and depth == 1 and self._key is None:
            self._from = at
        elif char == "[" and depth == 1:
            self.is_broken = True
        elif char in "}]":
            if depth == 1 and self._key in ARGUMENTS and self._arguments_to < 0 <= self._arguments_from:
                self._arguments_to = at + 1
            elif depth == 0:
                self._end_value(at)
                self.is_over = True
        elif char == ":" and depth == 1:
            self._from = at + 1
        elif char == "," and depth == 1:
            self._end_value(at)
        if depth == 2 and self._key in ARGUMENTS and char == "{" and self._arguments_from < 0:
            self._arguments_from = at
        self.is_broken = self.is_broken or (depth <= 0 and not self.is_over and char not in SPACE)
        self.is_broken = self.is_broken and not self._can_begin  # parts that were passed on cannot be taken back

    def _end_value(self, at: int) -> None:
        if self._key == "name" and not self._name:
            self._name = _loaded(self.text[self._from : at]) or ""
            self.is_broken = not self._name
        elif self._key in ARGUMENTS and self._arguments_from < 0:
            self.is_broken = True  # not an object
        self._key = None

    @property
    def _can_begin(self) -> bool:
        return bool(self._name) and self._arguments_from >= 0

    def _release(self) -> list[Part]:
        if not self._can_begin:
            return []
        parts: list[Part] = []
        if not self.has_begun:
            self.has_begun, self._num_released = True, self._arguments_from
            parts.append(ToolCall(self._name))
        end = self._arguments_to if self._arguments_to >= 0 else len(self.text)
        if end > self._num_released:
            parts.append(Arguments(self.text[self._num_released : end]))
            self._num_released = end
        return parts


class JsonCallList(CallReader):
    def __init__(self) -> None:
        super().__init__()
        self._call: JsonCall | None = None

    @property
    def left(self) -> str:
        return super().left if self._call is None or not self.has_begun else self._call.left

    def feed(self, text: str) -> tuple[list[Part], str]:
        parts: list[Part] = []
        while text and not (self.is_over or self.is_broken):
            if self._call is None:
                text = self._read_between(text)
            else:
                text = self._read_call(self._call, text, parts)
        return parts, text

    def _read_between(self, text: str) -> str:
        char = text[0]
        if char == "{" and self.text.strip():
            self._call = JsonCall()
            return text
        is_known = char in SPACE or (char in ",]" if self.has_begun else char == "[" and not self.text.strip())
        if not is_known and self.has_begun:  # what follows the calls is text
            self.is_over = True
            return text
        self.text += char
        self.is_broken, self.is_over = not is_known, is_known and char == "]"
        return text[1:]

    def _read_call(self, call: JsonCall, text: str, parts: list[Part]) -> str:
        new, rest = call.feed(text)
        parts += new
        self.text += text[: len(text) - len(rest)]
        if call.is_broken and self.has_begun:
            self.is_over = True
            return call.text + rest
        self.is_broken, self.has_begun = call.is_broken, self.has_begun or call.has_begun
        if call.is_over:
            self._call = None
        return rest


class NamedCall(CallReader):
    """`head` matches what stands before the arguments; its first group is the name."""

    def __init__(self, head: str) -> None:
        super().__init__()
        self._head = re.compile(head)
        self._brackets = Brackets(*OF_JSON)

    def feed(self, text: str) -> tuple[list[Part], str]:
        if self.has_begun:
            parts: list[Part] = []
        else:
            found, text = read_name(self, text, "{", self._head)
            if found is None:
                return [], text
            parts = [found]
        end = next((at + 1 for at, char in enumerate(text) if self._brackets.read(char) == 0), len(text))
        self.is_over = self._brackets.depth == 0
        return [*parts, Arguments(text[:end])] if end else parts, text[end:]


class MistralCalls(CallReader):
    """A list of JSON objects, or one call by name, as the first character says."""

    def __init__(self) -> None:
        super().__init__()
        self._reader: CallReader | None = None

    @property
    def left(self) -> str:
        return super().left if self._reader is None else self._reader.left

    def feed(self, text: str) -> tuple[list[Part], str]:
        if self._reader is None:
            text = self.text = self.text + text
            if not text.strip():
                return [], ""
            is_list = text.lstrip().startswith("[")
            self._reader = JsonCallList() if is_list else NamedCall(MISTRAL_HEAD)
        reader = self._reader
        parts, rest = reader.feed(text)
        self.text, self.is_over, self.is_broken = reader.text, reader.is_over, reader.is_broken
        self.has_begun = reader.has_begun
        return parts, rest


def _loaded(text: str) -> str | None:
    """Return the value of a JSON string, or None if the text is not one."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


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


class JsonCalls:
    """Calls without marks. From the first character that cannot belong to one the answer is text."""

    def __init__(self) -> None:
        self._held = ""
        self._reader: JsonCall | None = None
        self._before = ""  # the text before the call that is read
        self._num_calls = 0
        self._is_text = False

    def feed(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        while self._held and not self._is_text and (reader := self._reader or self._next_call()) is not None:
            self._reader = reader
            new, self._held = reader.feed(self._held)
            parts += new
            if reader.is_broken:
                self._held, self._is_text = self._before + reader.text + self._held, True
            if reader.is_broken or reader.is_over:
                self._num_calls += reader.is_over
                self._reader = None
        if self._is_text and self._held:
            parts.append(Text(self._held))
            self._held = ""
        return parts

    def _next_call(self) -> JsonCall | None:
        """Return a reader of the next call, None if the text has none, or not yet."""
        start = self._held.find("{")
        before = self._held if start < 0 else self._held[:start]
        bare = before.strip()
        allowed = (",", ";", "]") if self._num_calls else ("[", PYTHON_TAG, PYTHON_TAG + "[")
        if bare and bare not in allowed and not (start < 0 and any(mark.startswith(bare) for mark in allowed)):
            self._is_text = True
        if start < 0 or self._is_text:
            return None
        self._before, self._held = before, self._held[start:]
        return JsonCall()

    def flush(self) -> list[Part]:
        if self._reader is not None:
            return [] if self._reader.has_begun else [Text(self._before + self._reader.text)]
        is_end = self._num_calls and self._held.strip() in ("", "]", ";")
        return [Text(self._held)] if self._held and not is_end else []
