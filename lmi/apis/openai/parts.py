"""Splits the text of an answer to a chat into thoughts, text and calls, which each API writes in its own form."""

from __future__ import annotations

from lmi.apis.openai.calls.harmony import Harmony
from lmi.apis.openai.calls.json_calls import ForcedCall
from lmi.apis.openai.calls.parsers import PARSERS
from lmi.apis.openai.calls.reader import AnswerPart, Text, Thought, ToolCalls
from lmi.apis.openai.reasoning import Reasoning
from lmi.apis.openai.schema import HARMONY, OpenAIFormat


class AnswerParts:
    """The parts of one sequence, in order, as its text arrives."""

    def __init__(self, format: OpenAIFormat, prompt: str) -> None:
        is_harmony = HARMONY in (format.reasoning, format.tool_calls)
        self._reasoning = Reasoning(prompt, format.reasoning) if format.reasoning and not is_harmony else None
        self._calls: ToolCalls | None = None
        if format.function is not None:
            self._calls = ForcedCall(format.function)
        elif is_harmony:
            self._calls = Harmony(has_tools=format.tool_calls is not None)
        elif format.tool_calls is not None:
            self._calls = PARSERS[format.tool_calls](format.tools)

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
