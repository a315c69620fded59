"""The parts of an answer, and what their readers have in common.

A reader is a generator. It takes text from the front of `AnswerBuffer`, yields each part that this
completes or continues, and None where it needs more text. With the last text the answer `is_over`.
When it yields a Text, the buffer begins right behind it.
"""

from collections.abc import Callable, Generator, Mapping
from typing import Any, NamedTuple

from msgspec import Struct


class TextPart(Struct, frozen=True):
    """Any text of an answer."""

    text: str


class Text(TextPart, frozen=True):
    """Text outside calls."""


class Thought(TextPart, frozen=True):
    """Text of the model's thoughts, which stand before the answer."""


class Arguments(TextPart, frozen=True):
    """A further piece of the JSON of the last call's arguments."""


class ToolCall(Struct, frozen=True):
    """The beginning of a call."""

    name: str


class AnswerBuffer(Struct):
    """The text of an answer that has come and is in no part yet."""

    # Those that the answer may call, by name.
    tools: Mapping[str, Any]
    text: str = ""
    # Whether no more text comes.
    is_over: bool = False
    # Whether the answer is over although the model would have written more.
    is_cut: bool = False
    # Whether the answer ended in the marks of a call, which are no text.
    has_lost_markup: bool = False

    def ends_in_markup(self) -> bool:
        """Whether the answer was cut inside what was read last, so that this might have become a
        call. Then it is no text: what a model writes around a call is not meant for people.
        """
        is_unfinished = self.is_over and self.is_cut and not self.text
        self.has_lost_markup |= is_unfinished
        return is_unfinished

    def take(self, num_chars: int | None = None) -> str:
        """Take so many characters from the front of the text, or all, and return them."""
        if num_chars is None:
            num_chars = len(self.text)

        text = self.text[:num_chars]
        self.text = self.text[num_chars:]
        return text


AnswerPart = Thought | Text | ToolCall | Arguments
Reading = Generator[AnswerPart | None, None, None]
CallReading = Generator[AnswerPart | None, None, str | None]
"""Reads one call, or a list of them. Returns None if a part was made, or else the text that was
read and is no call.
"""
Read = Callable[[AnswerBuffer], Reading]
ReadCall = Callable[[AnswerBuffer], CallReading]


def read_rest(buffer: AnswerBuffer, kind: type[Text | Arguments]) -> Reading:
    """Read all that comes as parts of one kind."""
    while buffer.text or not buffer.is_over:
        if buffer.text:
            yield kind(buffer.take())
        else:
            yield None


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
