"""Readers of calls whose arguments a model writes as JSON, which is passed on as it comes."""

import json
import re
from collections.abc import Generator

from lmi.apis.openai.parts.brackets import brackets_of_json
from lmi.apis.openai.parts.buffer import AnswerBuffer, Arguments, CallReading, Text, ToolCall

# The names of the arguments in a call that is an object.
ARGUMENTS = ("arguments", "parameters")
SPACE = " \t\r\n"
# The most characters before the arguments of a call.
MAX_HEAD = 256
# What Mistral's models write before the arguments. Its group is the name.
MISTRAL_HEAD = r"\s*([\w.:-]+)(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*"


def json_call(buffer: AnswerBuffer) -> CallReading:
    """Read `{"name": "f", "arguments": {…}}`, where `parameters` is another name of `arguments`.

    The arguments are passed on as they come, once the name is known, and no fault counts then.
    """
    brackets = brackets_of_json()
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
    beginning = yield from read_head(buffer, head, "{")
    if isinstance(beginning, str):
        return beginning

    yield beginning
    brackets = brackets_of_json()
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


def _loaded(text: str) -> str | None:
    """Return the string that a text is in JSON, None for anything else."""
    try:
        value = json.loads(text)
    except ValueError:
        return None

    return value if isinstance(value, str) else None


def read_head(buffer: AnswerBuffer, head: str, stop: str) -> Generator[None, None, ToolCall | str]:
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
