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

    The arguments are passed on as they come, once the name is known. From then on no fault counts.
    """
    call = _CallObject()
    # Up to where the arguments have been passed on.
    passed_on = -1
    while True:
        call.read(buffer.text)
        if call.has_begun:
            if passed_on < 0:
                yield ToolCall(call.name)
                passed_on = call.arguments_start

            until = call.arguments_end if call.arguments_end >= 0 else call.place
            if until > passed_on:
                yield Arguments(buffer.text[passed_on:until])
                passed_on = until

        if call.is_over or call.is_fault or buffer.is_over:
            text = buffer.take(call.place)
            return None if call.has_begun else text

        yield None


class _CallObject:
    """What has been read of a call that is an object."""

    def __init__(self) -> None:
        # The place of the next character.
        self.place = 0
        self.is_over = False
        # Whether the text is no such object.
        self.is_fault = False
        self.name = ""
        # The places where the arguments begin and end. -1: they have not yet.
        self.arguments_start = -1
        self.arguments_end = -1

        self._brackets = brackets_of_json()
        # The key whose value is read, and the place where that key or its value begins.
        self._key: str | None = None
        self._start = 0

    @property
    def has_begun(self) -> bool:
        """Whether the name is known, and the arguments have begun."""
        return self.name != "" and self.arguments_start >= 0

    def read(self, text: str) -> None:
        """Read on in the text, to its end, to the end of the object, or to a fault."""
        while self.place < len(text) and not (self.is_over or self.is_fault):
            is_fault = not self._read_character(text)
            self.is_fault = is_fault and not self.has_begun

    def _read_character(self, text: str) -> bool:
        """Read a character. Returns whether it may be there."""
        char = text[self.place]
        was_quoted = bool(self._brackets.quote)
        depth = self._brackets.read(char)
        self.place += 1
        if was_quoted:
            ends_key = depth == 1 and self._key is None and not self._brackets.quote
            if ends_key:
                self._key = _loaded(text[self._start : self.place])
                return self._key is not None

            return depth > 0

        self.is_over = depth == 0 and char in "}]"
        if self.is_over or (char == "," and depth == 1):
            return self._end_member(text)

        if depth <= 0:
            return char in SPACE

        if depth == 1:
            if char == '"' and self._key is None:
                self._start = self.place - 1
            elif char == ":":
                self._start = self.place
            elif char == "[":
                # The object is a list.
                return False
            elif self._key in ARGUMENTS and char in "}]" and self.arguments_end < 0:
                if self.arguments_start >= 0:
                    self.arguments_end = self.place
        elif depth == 2 and char == "{" and self._key in ARGUMENTS and self.arguments_start < 0:
            self.arguments_start = self.place - 1

        return True

    def _end_member(self, text: str) -> bool:
        """End a key and its value. Returns whether they may be there."""
        key = self._key
        self._key = None
        if key == "name" and not self.name:
            self.name = _loaded(text[self._start : self.place - 1]) or ""
            return self.name != ""

        # Arguments that have not begun are no object.
        return key not in ARGUMENTS or self.arguments_start >= 0


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
