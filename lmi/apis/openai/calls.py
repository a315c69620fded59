"""Readers of the calls in an answer, whose arguments are passed on as JSON, and what all readers
have in common.

A reader is a generator. It takes text from the front of `AnswerBuffer`, yields each part that this
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
# The brackets and quotes of JSON.
OF_JSON = ("{[", "}]", '"')
MISTRAL_HEAD = r"\s*([\w.:-]+)(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*"
# The most characters before the arguments of a call.
MAX_HEAD = 256
# The bounds of a list of calls in Python's form, and of the brackets in it.
MAX_CHARS = 64 << 10
MAX_LEVELS = 50
# The types of a schema that a value of each type has.
KINDS: dict[type, set[str]] = {
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
class AnswerBuffer:
    """The text of an answer that has come and is in no part yet. `tools` are those that it may
    call.
    """

    tools: Mapping[str, Any]
    text: str = ""
    # No more text comes.
    is_over: bool = False
    # The answer is over, and the model would have written more.
    is_cut: bool = False
    # The answer ended in the marks of a call, which are no text.
    has_lost_markup: bool = False

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
        if num_chars is None:
            num_chars = len(self.text)

        text = self.text[:num_chars]
        self.text = self.text[num_chars:]
        return text


AnswerPart = Thought | Text | ToolCall | Arguments
Reading = Generator[AnswerPart | None, None, None]
CallReading = Generator[AnswerPart | None, None, str | None]
"""Reads one call, or a list of them. Returns None once a part was made, else the text that is no
call after all.
"""
Read = Callable[[AnswerBuffer], Reading]
ReadCall = Callable[[AnswerBuffer], CallReading]


def read_rest(buffer: AnswerBuffer, kind: type[Text | Arguments]) -> Reading:
    """Read all that comes as parts of one kind."""
    while buffer.text or not buffer.is_over:
        yield kind(buffer.take()) if buffer.text else None


class Brackets:
    """Counts how deep a text stands in brackets, of which those inside of quotes do not count."""

    def __init__(self, opening: str, closing: str, quotes: str, depth: int = 0) -> None:
        self._opening = opening
        self._closing = closing
        self._quotes = quotes
        self.depth = depth
        # The quote that is open.
        self.quote = ""
        self._is_escaped = False

    def read(self, char: str) -> int:
        """Return the depth behind the next character."""
        if self.quote:
            if char == self.quote and not self._is_escaped:
                self.quote = ""

            self._is_escaped = char == "\\" and not self._is_escaped
        elif char in self._quotes:
            self.quote = char
        else:
            self.depth += (char in self._opening) - (char in self._closing)

        return self.depth


class Cut(NamedTuple):
    """A text around a mark. Without one, `behind` is what may be the beginning of a mark."""

    before: str
    mark: str
    behind: str


def cut(text: str, *marks: str) -> Cut:
    """Cut the text of a stream at the first of the marks."""
    places = []
    for mark in marks:
        place = text.find(mark)
        if place >= 0:
            places.append((place, mark))

    if places:
        place, mark = min(places)
        return Cut(text[:place], mark, text[place + len(mark) :])

    max_mark_chars = max(map(len, marks), default=1)
    for num_chars in range(min(max_mark_chars - 1, len(text)), 0, -1):
        end = text[-num_chars:]
        if any(mark.startswith(end) for mark in marks):
            return Cut(text[:-num_chars], "", end)

    return Cut(text, "", "")


def json_call(buffer: AnswerBuffer) -> CallReading:
    """Read `{"name": "f", "arguments": {…}}`, where `parameters` is another name of `arguments`.

    The arguments are passed on as they come, once the name is known, and no fault counts then.
    """
    brackets = Brackets(*OF_JSON)
    name = ""

    # The key whose value is read, and the place where that key or its value begins.
    key = None
    start = 0

    # The places where the arguments begin and end, and up to which they have been passed on.
    first = -1
    end = -1
    passed_on = -1

    place = 0
    while True:
        is_over = False
        is_fault = False
        while place < len(buffer.text) and not (is_over or is_fault):
            char = buffer.text[place]
            was_quoted = bool(brackets.quote)
            depth = brackets.read(char)
            place += 1
            is_over = depth == 0 and char in "}]" and not was_quoted
            is_fault = depth <= 0 and not is_over and char not in SPACE

            if was_quoted:
                if depth == 1 and key is None and not brackets.quote:
                    key = _loaded(buffer.text[start:place])
                    is_fault = key is None
            elif is_over or (char == "," and depth == 1):
                if key == "name" and not name:
                    name = _loaded(buffer.text[start : place - 1]) or ""
                    is_fault = not name
                elif key in ARGUMENTS and first < 0:
                    # The arguments are no object.
                    is_fault = True

                key = None
            elif char == '"' and depth == 1 and key is None:
                start = place - 1
            elif char == ":" and depth == 1:
                start = place
            elif char == "[" and depth == 1:
                is_fault = True
            elif key in ARGUMENTS and char == "{" and depth == 2 and first < 0:
                first = place - 1
                passed_on = first
            elif key in ARGUMENTS and char in "}]" and depth == 1 and end < 0 <= first:
                end = place

            is_fault = is_fault and not (name and first >= 0)

        has_begun = name and first >= 0
        if has_begun:
            if passed_on == first:
                yield ToolCall(name)

            until = end if end >= 0 else place
            if until > passed_on:
                yield Arguments(buffer.text[passed_on:until])
                passed_on = until

        if is_over or is_fault or buffer.is_over:
            text = buffer.take(place)
            return None if has_begun else text

        yield None


def json_call_list(buffer: AnswerBuffer) -> CallReading:
    """Read a list of objects, each as `json_call` reads it."""
    # What stands before the first call, as far as it has come.
    before = ""
    has_begun = False
    while True:
        while not buffer.text:
            if buffer.is_over:
                return None if has_begun else before

            yield None

        char = buffer.text[0]
        if char == "{" and before.strip():
            no_call = yield from json_call(buffer)
            if no_call is not None and not has_begun:
                return before + no_call

            if no_call is not None and buffer.is_over and not buffer.text:
                yield Text(no_call)
            elif no_call is not None:
                buffer.text = no_call + buffer.text
                return None

            has_begun = True
            continue

        marks = SPACE
        if has_begun:
            marks += ",]"
        elif not before.strip():
            marks += "["

        # What follows the calls is text.
        if char not in marks:
            return None if has_begun else before + buffer.take(1)

        before += buffer.take(1)
        if char == "]":
            return None


def named_call(buffer: AnswerBuffer, head: str) -> CallReading:
    """Read a name, marks and arguments. `head` matches what stands before these; its first group is
    the name.
    """
    beginning = yield from _beginning(buffer, head, "{")
    if isinstance(beginning, str):
        return beginning

    yield beginning
    brackets = Brackets(*OF_JSON)
    while True:
        end = len(buffer.text)
        for place, char in enumerate(buffer.text):
            if brackets.read(char) == 0:
                end = place + 1
                break

        if end:
            yield Arguments(buffer.take(end))

        if brackets.depth == 0 or buffer.is_over:
            return None

        yield None


def mistral_calls(buffer: AnswerBuffer) -> CallReading:
    """Read a list of JSON objects, or one call by name, as the first character says."""
    while not buffer.text.strip():
        if buffer.is_over:
            return buffer.take()

        yield None

    if buffer.text.lstrip().startswith("["):
        return (yield from json_call_list(buffer))

    return (yield from named_call(buffer, MISTRAL_HEAD))


def _beginning(buffer: AnswerBuffer, head: str, stop: str) -> Generator[None, None, ToolCall | str]:
    """Read on to `stop`. What stands before it matches `head`, whose first group is the name of the
    call.

    Returns the beginning of the call, or the text that is no call.
    """
    while (place := buffer.text.find(stop, 0, MAX_HEAD)) < 0 and len(buffer.text) < MAX_HEAD:
        if buffer.is_over:
            return buffer.take()

        yield None

    if place < 0:
        return buffer.take(MAX_HEAD)

    text = buffer.take(place)
    beginning = re.fullmatch(head, text)
    return text if beginning is None else ToolCall(beginning[1])


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


def tagged_call(buffer: AnswerBuffer, tags: Tags) -> CallReading:
    """Read a name and arguments between tags, each passed on when it is whole.

    The type of an argument is that of the function's schema; without one it is a text.
    """
    call = yield from _beginning(buffer, tags.head, tags.stop)
    if isinstance(call, str):
        return call

    yield call
    schemas = _schemas_of_arguments(buffer.tools.get(call.name, {}))
    buffer.text = buffer.text.removeprefix(">")
    before = "{"
    while True:
        text = buffer.text.lstrip()
        may_end = text == tags.end or not tags.end.startswith(text)
        if text.startswith(tags.opening):
            argument = _argument(text, tags)
            if argument is not None:
                name = argument[1].strip()
                buffer.text = text[argument.end() :]
                value = _typed(argument[2], schemas.get(name))
                yield Arguments(f"{before}{json.dumps(name, ensure_ascii=False)}: {value}")
                before = ", "
                continue
        elif may_end and not tags.opening.startswith(text):
            # Without its end the text goes on.
            buffer.text = text.removeprefix(tags.end)
            yield Arguments("{}" if before == "{" else "}")
            return None

        if buffer.is_over:
            buffer.take()
            return None

        yield None


def _schemas_of_arguments(tool: Mapping[str, Any]) -> Mapping[str, object]:
    parameters = tool.get("function", {}).get("parameters") or {}
    schemas = parameters.get("properties")
    return schemas if isinstance(schemas, dict) else {}


def _argument(text: str, tags: Tags) -> re.Match[str] | None:
    """Return the whole argument that the text begins with."""
    if tags.closing not in text:
        return None

    return re.match(tags.argument, text, re.DOTALL)


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
    """Return the types that a schema has, or one of its choices."""
    if not isinstance(schema, dict):
        return set()

    kinds = schema.get("type")
    if not isinstance(kinds, list):
        kinds = [kinds]

    types = {kind for kind in kinds if isinstance(kind, str)}
    for key in ("anyOf", "oneOf"):
        choices = schema.get(key)
        if isinstance(choices, list):
            types.update(*map(_types, choices))

    return types


def python_call_list(buffer: AnswerBuffer) -> CallReading:
    """Read `[f(a=1, b="x"), g()]`, behind its opening bracket. It is passed on when it is whole."""
    brackets = Brackets("[({", "])}", "'\"", depth=1)
    end = 0
    while True:
        text = buffer.text[:MAX_CHARS]
        while end < len(text) and 0 < brackets.depth <= MAX_LEVELS:
            brackets.read(text[end])
            end += 1

        if end == MAX_CHARS or buffer.is_over or not 0 < brackets.depth <= MAX_LEVELS:
            text = buffer.take(end)
            calls = [] if brackets.depth else _python_calls("[" + text)
            yield from calls
            return None if calls else text

        yield None


def _python_calls(text: str) -> list[AnswerPart]:
    """Return the calls of a list in Python's form, or none if it holds anything else."""
    parts: list[AnswerPart] = []
    try:
        # Python warns about escapes in strings.
        with warnings.catch_warnings(action="ignore"):
            calls = ast.parse(text.strip(), mode="eval").body

        if not isinstance(calls, ast.List):
            return []

        for call in calls.elts:
            if not isinstance(call, ast.Call) or call.args:
                return []

            if not isinstance(call.func, ast.Name | ast.Attribute):
                return []

            values = {}
            for keyword in call.keywords:
                # `**names` has no name.
                if keyword.arg is None:
                    return []

                values[keyword.arg] = ast.literal_eval(keyword.value)

            arguments = json.dumps(values, ensure_ascii=False, allow_nan=False)
            parts += [ToolCall(ast.unparse(call.func)), Arguments(arguments)]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return []

    return parts
