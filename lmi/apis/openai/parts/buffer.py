"""The parts of an answer, and what their readers have in common.

A reader is a generator. It takes text from the front of `AnswerBuffer`, yields each part that this
completes or continues, and None where it needs more text. With the last text the answer `is_over`.
"""

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class TextPart:
    """Any text of an answer."""

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
