"""Finds calls of tools in the text of an answer while it arrives.

    hermes    any text, and calls as <tool_call>{"name": "f", "arguments": {…}}</tool_call> (Hermes, Qwen)
    json      the whole answer is one such object, several with ; between, or a list of them (Llama 3, forced calls);
              `parameters` is another name of `arguments`

A call begins when its name is known and its arguments begin, which are passed on as the model writes them. Text that
only resembles a call stays text.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from lmi.apis.openai.reasoning import cut

OPENING, CLOSING = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"  # of Llama 3, before its calls
ARGUMENTS = ("arguments", "parameters")
SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class Text:
    """Text outside calls."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """The beginning of a call."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A further piece of the JSON of the last call's arguments."""

    text: str


Part = Text | ToolCall | Arguments


class ToolCalls(Protocol):
    """`feed` text, and `flush` at the end of the answer."""

    def feed(self, text: str) -> list[Part]: ...

    def flush(self) -> list[Part]: ...


class CallReader:
    """Reads the JSON object of one call character by character.

    `is_over` becomes True when its last brace was read. `is_broken` becomes True if it is not a call, and `text` holds
    all characters that were read. A call is never broken after its first part was passed on.
    """

    def __init__(self) -> None:
        self.text = ""
        self.is_over = False
        self.is_broken = False
        self.has_begun = False
        self._name = ""
        self._depth = 0
        self._in_string = self._is_escaped = False
        self._key: str | None = None
        self._from = 0  # where the key or value of the outer object that is being read begins
        self._arguments_from = self._arguments_to = -1
        self._num_released = 0

    def feed(self, text: str) -> tuple[list[Part], str]:
        """Return the new parts, and the text after the call."""
        parts: list[Part] = []
        start = len(self.text)
        self.text += text
        position = start
        while position < len(self.text) and not (self.is_over or self.is_broken):
            self._read(position, self.text[position])
            position += 1
        rest, self.text = self.text[position:], self.text[:position]
        if self.is_over and not self._can_begin:
            self.is_over, self.is_broken = False, True
        if not self.is_broken:
            parts = self._release()
        return parts, rest

    def _read(self, at: int, char: str) -> None:
        if self._in_string:
            self._read_in_string(at, char)
        elif char == '"':
            self._in_string = True
            if self._depth == 1 and self._key is None:
                self._from = at
        elif char in "{[":
            self.is_broken = self._depth == 0 and char == "["
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            if self._depth == 1 and self._key in ARGUMENTS and self._arguments_to < 0 <= self._arguments_from:
                self._arguments_to = at + 1
            elif self._depth == 0:
                self._end_value(at)
                self.is_over = True
        elif char == ":" and self._depth == 1:
            self._from = at + 1
        elif char == "," and self._depth == 1:
            self._end_value(at)
        if self._depth == 2 and self._key in ARGUMENTS and char == "{" and self._arguments_from < 0:
            self._arguments_from = at
        self.is_broken = self.is_broken or (self._depth <= 0 and not self.is_over and char not in SPACE)
        self.is_broken = self.is_broken and not self._can_begin  # parts that were passed on cannot be taken back

    def _read_in_string(self, at: int, char: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._in_string = False
            if self._depth == 1 and self._key is None:
                self._key = _loaded(self.text[self._from : at + 1])
                self.is_broken = self._key is None

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


class Hermes:
    """Calls between marks, with any text around them. White space next to a call is dropped."""

    def __init__(self) -> None:
        self._held = ""
        self._opening = ""  # of the call that is read: its mark and the white space before it
        self._reader: CallReader | None = None
        self._is_behind_call = False

    def feed(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        while self._step(parts):
            pass
        return parts

    def _step(self, parts: list[Part]) -> bool:
        """Read one element. Returns False when more text is needed."""
        if self._reader is not None:
            return self._read_call(self._reader, parts)
        if self._is_behind_call and not self._skip_closing():
            return False
        before, is_found, behind = cut(self._held, OPENING)
        said = before.rstrip()
        if said:
            parts.append(Text(said))
        if is_found:
            self._opening = before[len(said) :] + OPENING
            self._held, self._reader = behind, CallReader()
        else:
            self._held = before[len(said) :] + behind
        return is_found

    def _read_call(self, reader: CallReader, parts: list[Part]) -> bool:
        new, self._held = reader.feed(self._held)
        parts += new
        if reader.is_broken:
            parts.append(Text(self._opening + reader.text))
        if not (reader.is_broken or reader.is_over):
            return False
        self._reader, self._is_behind_call = None, reader.is_over
        return True

    def _skip_closing(self) -> bool:
        """Drop the closing mark if there is one. Returns False while it may still come."""
        self._held = self._held.lstrip()
        if not self._held or (len(self._held) < len(CLOSING) and CLOSING.startswith(self._held)):
            return False
        if self._held.startswith(CLOSING):
            self._held = self._held[len(CLOSING) :].lstrip()
            return bool(self._held)
        self._is_behind_call = False
        return True

    def flush(self) -> list[Part]:
        reader, held = self._reader, self._held
        if reader is not None:
            return [] if reader.has_begun else [Text(self._opening + reader.text)]
        return [Text(held)] if held and not (self._is_behind_call and CLOSING.startswith(held)) else []


class JsonCalls:
    """Calls without marks. From the first character that cannot belong to one the answer is text."""

    def __init__(self) -> None:
        self._held = ""
        self._reader: CallReader | None = None
        self._before = ""  # the text before the call that is read
        self._num_calls = 0
        self._is_text = False

    def feed(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        while self._held and not self._is_text and self._step(parts):
            pass
        if self._is_text and self._held:
            parts.append(Text(self._held))
            self._held = ""
        return parts

    def _step(self, parts: list[Part]) -> bool:
        if self._reader is None:
            return self._find_call()
        new, self._held = self._reader.feed(self._held)
        parts += new
        if self._reader.is_broken:
            self._held = self._before + self._reader.text + self._held
            self._is_text = True
        if self._reader.is_broken or self._reader.is_over:
            self._num_calls += self._reader.is_over
            self._reader = None
        return True

    def _find_call(self) -> bool:
        """Find the beginning of the next call. Returns False if the text has none, or not yet."""
        start = self._held.find("{")
        before = self._held if start < 0 else self._held[:start]
        is_first = not self._num_calls
        bare = before.strip()
        allowed = ("", "[", PYTHON_TAG, PYTHON_TAG + "[") if is_first else ("", ",", ";", "]")
        if bare not in allowed and not (start < 0 and any(mark.startswith(bare) for mark in allowed)):
            self._is_text = True
            return False
        if start < 0:
            return False
        self._before, self._held = before, self._held[start:]
        self._reader = CallReader()
        return True

    def flush(self) -> list[Part]:
        if self._reader is not None:
            return [] if self._reader.has_begun else [Text(self._before + self._reader.text)]
        is_end = self._num_calls and self._held.strip() in ("", "]", ";")
        return [Text(self._held)] if self._held and not is_end else []


class Named:
    """The whole answer is the arguments of one call, whose function the request names."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def feed(self, text: str) -> list[Part]:
        if not text:
            return []
        begun: list[Part] = [] if self._name is None else [ToolCall(self._name)]
        self._name = None
        return [*begun, Arguments(text)]

    def flush(self) -> list[Part]:
        return []


PARSERS: dict[str, Callable[[], ToolCalls]] = {"hermes": Hermes, "json": JsonCalls}


def _loaded(text: str) -> str | None:
    """Return the value of a JSON string, or None if the text is not one."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
