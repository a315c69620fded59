"""What readers of an answer have in common: the text that they hold, and the parts that they make of it.

A reader is a generator. It takes text from the front of `Held`, yields each part that this completes or continues, and
None where it needs more text. With the last text the answer `is_over`.
"""

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any


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
    """The text of an answer that has come and is in no part yet. `tools` are those that it may call."""

    tools: Mapping[str, Any]
    text: str = ""
    is_over: bool = False  # no more text comes

    def take(self, num_chars: int | None = None) -> str:
        """Return the beginning of the text, or all of it, which is held no more."""
        end = len(self.text) if num_chars is None else num_chars
        taken, self.text = self.text[:end], self.text[end:]
        return taken


AnswerPart = Thought | Text | ToolCall | Arguments
Reading = Generator[AnswerPart | None, None, None]
CallReading = Generator[AnswerPart | None, None, str | None]
"""Reads one call, or a list of them. Returns None once a part was made, else the text that is no call after all."""
Read = Callable[[Held], Reading]
ReadCall = Callable[[Held], CallReading]


def rest(held: Held, kind: type[Text | Arguments]) -> Reading:
    """Read all that comes as parts of one kind."""
    while held.text or not held.is_over:
        yield kind(held.take()) if held.text else None


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
