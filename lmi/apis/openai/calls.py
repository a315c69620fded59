"""Readers of the calls in an answer, whose arguments are passed on as JSON, and what all readers
have in common.

A reader is a generator. It takes text from the front of `Held`, yields each part that this
completes or continues, and None where it needs more text. With the last text the answer `is_over`.
"""

import ast
import json
import re
import warnings
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson

ARGUMENTS = ("arguments", "parameters")
SPACE = " \t\r\n"
OF_JSON = ("{[", "}]", '"')  # brackets and quotes
MISTRAL_HEAD = r"\s*([\w.:-]+)(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*"
MAX_HEAD = 256  # characters before the arguments of a call
# of a list, and of brackets in it
MAX_CHARS = 64 << 10
MAX_LEVELS = 50
KINDS: dict[type, set[str]] = {  # the types of a schema that a value has
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    type(None): {"null"},
    dict: {"object"},
    list: {"array"},
}


@dataclass(frozen=True)
class TextPart:
    text: str


class Text(TextPart):
    """Text outside calls."""


class Thought(TextPart):
    """Text of the model's thoughts, which stand before the answer."""


class Arguments(TextPart):
    """A further piece of the JSON of the last call's arguments."""


@dataclass(frozen=True)
class ToolCall:
    """The beginning of a call."""

    name: str


@dataclass
class Held:
    """The text of an answer that has come and is in no part yet. `tools` are those that it may
    call.
    """

    tools: Mapping[str, Any]
    text: str = ""
    is_over: bool = False  # no more text comes
    is_cut: bool = False  # and the model would have written more
    has_lost_markup: bool = False  # of a call that was cut, which is no text

    def ends_in_markup(self) -> bool:
        """Whether the answer was cut inside what was read last, so that it might have become a
        call.

        What a model wrote around a call is not its speech, so nobody is told of it.
        """
        is_unfinished = self.is_over and self.is_cut and not self.text
        self.has_lost_markup |= is_unfinished
        return is_unfinished

    def take(self, num_chars: int | None = None) -> str:
        """Return the beginning of the text, or all of it, which is held no more."""
        end = len(self.text) if num_chars is None else num_chars
        taken, self.text = self.text[:end], self.text[end:]
        return taken


AnswerPart = Thought | Text | ToolCall | Arguments
Reading = Generator[AnswerPart | None, None, None]
CallReading = Generator[AnswerPart | None, None, str | None]
"""Reads one call, or a list of them. Returns None once a part was made, else the text that is no
call after all.
"""
Read = Callable[[Held], Reading]
ReadCall = Callable[[Held], CallReading]


def rest(held: Held, kind: type[Text | Arguments]) -> Reading:
    """Read all that comes as parts of one kind."""
    while held.text or not held.is_over:
        yield kind(held.take()) if held.text else None


class Brackets:
    """Counts how deep a text stands in brackets, of which those inside of quotes do not count."""

    def __init__(self, opening: str, closing: str, quotes: str, depth: int = 0) -> None:
        self._opening = opening
        self._closing = closing
        self._quotes = quotes
        self.depth = depth
        self.quote = ""  # that is open
        self._is_escaped = False

    def read(self, char: str) -> int:
        """Return the depth behind the next character."""
        if self.quote:
            self.quote = "" if char == self.quote and not self._is_escaped else self.quote
            self._is_escaped = char == "\\" and not self._is_escaped
        elif char in self._quotes:
            self.quote = char
        else:
            self.depth += (char in self._opening) - (char in self._closing)

        return self.depth


def cut(text: str, *marks: str) -> tuple[str, str, str]:
    """Return the text of a stream before the first of the marks, that mark, and the rest.

    The rest is the text behind the mark. Without a mark it is the end of the text that may be the
    beginning of one.
    """
    found = [(at, mark) for mark in marks if (at := text.find(mark)) >= 0]
    if found:
        at, mark = min(found)
        return text[:at], mark, text[at + len(mark) :]

    longest = min(max(map(len, marks), default=1) - 1, len(text))
    ends = (
        num for num in range(longest, 0, -1) if any(mark.startswith(text[-num:]) for mark in marks)
    )
    at = len(text) - next(ends, 0)
    return text[:at], "", text[at:]


def json_call(held: Held) -> CallReading:
    """Read `{"name": "f", "arguments": {…}}`, where `parameters` is another name of `arguments`.

    The arguments are passed on as they come, once the name is known, and no fault counts then.
    """
    brackets = Brackets(*OF_JSON)
    # key: whose value is read
    name = ""
    key = None
    at = start = 0  # start: of the key or the value
    told = first = end = -1  # of the arguments
    while True:
        is_over = is_fault = False
        while at < len(held.text) and not (is_over or is_fault):
            char = held.text[at]
            was_quoted = bool(brackets.quote)
            depth, at = brackets.read(char), at + 1
            is_over = depth == 0 and char in "}]" and not was_quoted
            is_fault = depth <= 0 and not is_over and char not in SPACE
            if was_quoted:
                if depth == 1 and key is None and not brackets.quote:
                    key = _loaded(held.text[start:at])
                    is_fault = key is None
            elif is_over or (char == "," and depth == 1):
                if key == "name" and not name:
                    name = _loaded(held.text[start : at - 1]) or ""
                    is_fault = not name
                elif key in ARGUMENTS and first < 0:
                    is_fault = True  # not an object

                key = None
            elif char == '"' and depth == 1 and key is None:
                start = at - 1
            elif char == ":" and depth == 1:
                start = at
            elif char == "[" and depth == 1:
                is_fault = True
            elif key in ARGUMENTS and char == "{" and depth == 2 and first < 0:
                first = told = at - 1
            elif key in ARGUMENTS and char in "}]" and depth == 1 and end < 0 <= first:
                end = at

            is_fault = is_fault and not (name and first >= 0)

        has_begun = name and first >= 0
        if has_begun:
            if told == first:
                yield ToolCall(name)

            until = end if end >= 0 else at
            if until > told:
                yield Arguments(held.text[told:until])
                told = until

        if is_over or is_fault or held.is_over:
            text = held.take(at)
            return None if has_begun else text

        yield None


def json_call_list(held: Held) -> CallReading:
    """Read a list of objects, each as `json_call` reads it."""
    # read: before the first call has begun
    read = ""
    has_begun = False
    while True:
        while not held.text:
            if held.is_over:
                return None if has_begun else read

            yield None

        char = held.text[0]
        if char == "{" and read.strip():
            left = yield from json_call(held)
            if left is not None and not has_begun:
                return read + left

            if left is not None and held.is_over and not held.text:
                yield Text(left)
            elif left is not None:
                held.text = left + held.text
                return None

            has_begun = True
        elif char in SPACE or char in (",]" if has_begun else "[" if not read.strip() else ""):
            read += held.take(1)
            if char == "]":
                return None
        else:  # what follows the calls is text
            return None if has_begun else read + held.take(1)


def named_call(held: Held, head: str) -> CallReading:
    """Read a name, marks and arguments. `head` matches what stands before these; its first group is
    the name.
    """
    found = yield from _beginning(held, head, "{")
    if isinstance(found, str):
        return found

    yield found
    brackets = Brackets(*OF_JSON)
    while True:
        end = next(
            (at + 1 for at, char in enumerate(held.text) if brackets.read(char) == 0),
            len(held.text),
        )
        if end:
            yield Arguments(held.take(end))

        if brackets.depth == 0 or held.is_over:
            return None

        yield None


def mistral_calls(held: Held) -> CallReading:
    """Read a list of JSON objects, or one call by name, as the first character says."""
    while not held.text.strip():
        if held.is_over:
            return held.take()

        yield None

    is_list = held.text.lstrip().startswith("[")
    return (yield from json_call_list(held) if is_list else named_call(held, MISTRAL_HEAD))


def _beginning(held: Held, head: str, stop: str) -> Generator[None, None, ToolCall | str]:
    """Read on to `stop`. What stands before it matches `head`, whose first group is the name of the
    call.

    Returns the beginning of the call, or the text that is no call.
    """
    while (at := held.text.find(stop, 0, MAX_HEAD)) < 0 and len(held.text) < MAX_HEAD:
        if held.is_over:
            return held.take()

        yield None

    text = held.take(MAX_HEAD if at < 0 else at)
    found = None if at < 0 else re.fullmatch(head, text)
    return text if found is None else ToolCall(found[1])


def _loaded(text: str) -> str | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None

    return value if isinstance(value, str) else None


class Tags(NamedTuple):
    """`head` matches up to `stop`, which ends it (`>`) or begins what follows; its first group is
    the name.

    `argument` matches one argument, its groups are name and value, and `closing` is its end.
    """

    head: str
    stop: str
    opening: str
    argument: str
    closing: str
    end: str


def tagged_call(held: Held, tags: Tags) -> CallReading:
    """Read a name and arguments between tags, each passed on when it is whole.

    The type of an argument is that of the function's schema; without one it is a text.
    """
    found = yield from _beginning(held, tags.head, tags.stop)
    if isinstance(found, str):
        return found

    yield found
    function = held.tools.get(found.name, {}).get("function", {})
    schemas = (function.get("parameters") or {}).get("properties")
    held.text, before = held.text.removeprefix(">"), "{"
    while True:
        text = held.text.lstrip()
        if text.startswith(tags.opening):
            argument = re.match(tags.argument, text, re.DOTALL) if tags.closing in text else None
            if argument is not None:
                name = argument[1].strip()
                held.text = text[argument.end() :]
                value = _typed(
                    argument[2], schemas.get(name) if isinstance(schemas, dict) else None
                )
                yield Arguments(f"{before}{json.dumps(name, ensure_ascii=False)}: {value}")
                before = ", "
                continue
        elif not tags.opening.startswith(text) and (
            text == tags.end or not tags.end.startswith(text)
        ):
            held.text = text.removeprefix(tags.end)  # without its end the text goes on
            yield Arguments("{}" if before == "{" else "}")
            return None

        if held.is_over:
            held.take()
            return None

        yield None


def _typed(text: str, schema: object) -> str:
    """Return the JSON of an argument that a model wrote as text: of a type that the schema has,
    else a text.
    """
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
    types = {
        each for each in (given if isinstance(given, list) else [given]) if isinstance(each, str)
    }
    choices = [
        each
        for key in ("anyOf", "oneOf")
        if isinstance(schema.get(key), list)
        for each in schema[key]
    ]
    return types.union(*map(_types, choices))


def python_call_list(held: Held) -> CallReading:
    """Read `[f(a=1, b="x"), g()]`, behind its opening bracket. It is passed on when it is whole."""
    brackets = Brackets("[({", "])}", "'\"", depth=1)
    at = 0
    while True:
        text = held.text[:MAX_CHARS]
        ends = (n + 1 for n in range(at, len(text)) if not 0 < brackets.read(text[n]) <= MAX_LEVELS)
        at = next(ends, len(text))
        if at == MAX_CHARS or held.is_over or not 0 < brackets.depth <= MAX_LEVELS:
            text = held.take(at)
            calls = [] if brackets.depth else _python_calls("[" + text)
            yield from calls
            return None if calls else text

        yield None


def _python_calls(text: str) -> list[AnswerPart]:
    """Return the calls of a list in Python's form, or none if it holds anything else."""
    parts: list[AnswerPart] = []
    try:
        with warnings.catch_warnings(action="ignore"):  # about escapes
            calls = ast.parse(text.strip(), mode="eval").body

        if not isinstance(calls, ast.List):
            return []

        for call in calls.elts:
            if (
                not isinstance(call, ast.Call)
                or call.args
                or not isinstance(call.func, ast.Name | ast.Attribute)
            ):
                return []

            if any(each.arg is None for each in call.keywords):  # **names
                return []

            values = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
            arguments = json.dumps(values, ensure_ascii=False, allow_nan=False)
            parts += [ToolCall(ast.unparse(call.func)), Arguments(arguments)]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return []

    return parts
