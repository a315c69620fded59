"""What readers of tool calls have in common: the parts of an answer, and the way to a call's name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

MAX_HEAD = 256  # characters before the arguments of a call


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


Part = Text | ToolCall | Arguments
AnswerPart = Thought | Part


class ToolCalls(Protocol):
    def feed(self, text: str) -> Sequence[AnswerPart]: ...

    def flush(self) -> Sequence[AnswerPart]: ...


class Brackets:
    """Counts how deep a text stands in brackets, of which those inside of quotes do not count."""

    def __init__(self, opening: str, closing: str, quotes: str, depth: int = 0) -> None:
        self._opening, self._closing, self._quotes = opening, closing, quotes
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


class CallReader:
    """Reads one call, or a list of them, from its first character on.

    `is_over` becomes True when its last character was read. `is_broken` becomes True if it is no call, which never
    happens once its first part was passed on, as `has_begun` says.
    """

    def __init__(self) -> None:
        self.text = ""  # all that was read, at least until it has begun
        self.is_over = self.is_broken = self.has_begun = False

    @property
    def left(self) -> str:
        return "" if self.has_begun else self.text

    def feed(self, text: str) -> tuple[list[Part], str]:
        """Return the new parts, and the text behind the call."""
        raise NotImplementedError


def read_name(call: CallReader, text: str, stop: str, head: re.Pattern[str]) -> tuple[ToolCall | None, str]:
    """Read on to `stop`. What stands before it matches `head`, whose first group is the name of the call.

    Returns the beginning of the call, or None while there is none, and the text from `stop` on.
    """
    whole = call.text + text
    at = whole.find(stop, 0, MAX_HEAD)
    if at < 0 and len(whole) < MAX_HEAD:
        call.text = whole
        return None, ""
    end = MAX_HEAD if at < 0 else at
    call.text, rest = whole[:end], whole[end:]
    found = None if at < 0 else head.fullmatch(call.text)
    call.has_begun, call.is_broken = found is not None, found is None
    return None if found is None else ToolCall(found[1]), rest


def cut(text: str, *marks: str) -> tuple[str, str, str]:
    """Return the text of a stream before the first of the marks, that mark, and the rest.

    The rest is the text behind the mark. Without a mark it is the end of the text that may be the beginning of one.
    """
    found = [(at, mark) for mark in marks if (at := text.find(mark)) >= 0]
    if found:
        at, mark = min(found)
        return text[:at], mark, text[at + len(mark) :]
    longest = min(max(map(len, marks), default=1) - 1, len(text))
    ends = (num for num in range(longest, 0, -1) if any(mark.startswith(text[-num:]) for mark in marks))
    at = len(text) - next(ends, 0)
    return text[:at], "", text[at:]
