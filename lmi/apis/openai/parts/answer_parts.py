"""Splits the text of an answer to a chat into thoughts, text and calls, which each API writes in
its own form.

A thought is the text between two marks at the start of an answer, or in Harmony on a channel of its
own. Text that only resembles a call stays text, and the beginning of a call that was cut is none.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Self

from lmi.apis.openai.answer_format import HARMONY, OpenAIFormat
from lmi.apis.openai.parts.buffer import (
    AnswerBuffer,
    AnswerPart,
    Read,
    Reading,
    Text,
    Thought,
    read_rest,
)
from lmi.apis.openai.parts.forced_calls import forced_call, forced_calls
from lmi.apis.openai.parts.forms import PARSERS
from lmi.apis.openai.parts.harmony import harmony
from lmi.apis.openai.parts.thoughts import thoughts
from lmi.types import AnswerEnd


class AnswerParts:
    """The parts of one sequence, in order, as its text arrives."""

    def __init__(
        self, read_parts: Read, tools: Mapping[str, Any], *, has_thoughts: bool = True
    ) -> None:
        self._buffer = AnswerBuffer(tools)
        self._has_thoughts = has_thoughts
        self._reading = read_parts(self._buffer)

    @classmethod
    def of(cls, format: OpenAIFormat, prompt: str) -> Self:
        """Return the parts of an answer of this format, which follows the text of its prompt."""
        read_parts = partial(read_answer, format=format, prompt=prompt)
        return cls(read_parts, format.tools, has_thoughts=format.has_thoughts)

    @property
    def has_lost_markup(self) -> bool:
        """Whether the answer was cut in the beginning of a call."""
        return self._buffer.has_lost_markup

    @property
    def num_unread(self) -> int:
        """The number of characters that have come behind the part that was read last."""
        return len(self._buffer.text)

    def feed(self, text: str, end: AnswerEnd | None = None) -> list[AnswerPart]:
        """Return the parts that this text completes or continues. With the last text the answer has
        its `end`.
        """
        return list(self.read(text, end))

    def read(self, text: str, end: AnswerEnd | None = None) -> Iterator[AnswerPart]:
        """Yield the parts that `feed` returns, each before what stands behind it is read."""
        self._buffer.text += text
        self._buffer.is_over = end is not None
        self._buffer.is_cut = end not in (None, AnswerEnd.EOS_TOKEN)

        while (part := next(self._reading, None)) is not None:
            if self._has_thoughts or not isinstance(part, Thought):
                yield part


def read_answer(buffer: AnswerBuffer, format: OpenAIFormat, prompt: str) -> Reading:
    """Read a whole answer in the forms that its format names."""
    is_harmony = HARMONY in (format.reasoning, format.tool_calls)
    if format.reasoning and not is_harmony:
        yield from thoughts(buffer, format.reasoning, prompt)

    if format.function is not None:
        yield from forced_call(buffer, format.function)
    elif format.is_forced:
        yield from forced_calls(buffer)
    elif is_harmony:
        yield from harmony(buffer, has_tools=format.tool_calls is not None)
    elif format.tool_calls is not None:
        yield from PARSERS[format.tool_calls](buffer)
    else:
        yield from read_rest(buffer, Text)
