"""Splits the text of an answer to a chat into thoughts, text and calls, which each API writes in its own form."""

from __future__ import annotations

from dataclasses import dataclass

from lmi.apis.openai.reasoning import Reasoning
from lmi.apis.openai.schema import OpenAIFormat
from lmi.apis.openai.tool_calls import PARSERS, Arguments, Named, Text, ToolCall, ToolCalls


@dataclass(frozen=True, slots=True)
class Thought:
    """Text of the model's thoughts, which stand before the answer."""

    text: str


AnswerPart = Thought | Text | ToolCall | Arguments


class AnswerParts:
    """The parts of one sequence, in order, as its text arrives."""

    def __init__(self, format: OpenAIFormat, prompt: str) -> None:
        self._reasoning = Reasoning(prompt) if format.reasoning else None
        self._calls: ToolCalls | None = None
        if format.function is not None:
            self._calls = Named(format.function)
        elif format.tool_calls is not None:
            self._calls = PARSERS[format.tool_calls]()

    def feed(self, text: str, is_last: bool) -> list[AnswerPart]:
        """Return the parts that this text completes or continues."""
        thought, said = self._reasoning.feed(text) if self._reasoning else ("", text)
        if is_last and self._reasoning:
            more_thought, more_said = self._reasoning.flush()
            thought, said = thought + more_thought, said + more_said
        parts: list[AnswerPart] = [Thought(thought)] if thought else []
        if self._calls is None:
            return [*parts, Text(said)] if said else parts
        parts += self._calls.feed(said)
        if is_last:
            parts += self._calls.flush()
        return parts
