"""Splits the text of an answer to a chat into thoughts, text and calls, which each API writes in its own form."""

from __future__ import annotations

import re

from lmi.apis.openai.calls.json_calls import ForcedCall
from lmi.apis.openai.calls.parsers import PARSERS
from lmi.apis.openai.calls.reader import AnswerPart, Arguments, Text, Thought, ToolCall, ToolCalls
from lmi.apis.openai.reasoning import Reasoning, cut
from lmi.apis.openai.schema import HARMONY, OpenAIFormat

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
FUNCTION = re.compile(r"to=functions\.([\w.-]+)")


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


class Harmony:
    """Answers in Harmony, the form of gpt-oss: messages on channels, each with a header.

        <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json
        <|message|>{…}<|call|>

    Analysis is thought, a message to a function is a call, the rest is text. So is what has no header at all. Calls
    stay text if the request has no tools (`has_tools`). Source: openai/harmony.
    """

    def __init__(self, *, has_tools: bool) -> None:
        self._has_tools = has_tools
        self._held = ""
        self._header: str | None = None  # None: inside of a message
        self._kind: type[Thought | Text | Arguments] = Text

    def feed(self, text: str) -> list[AnswerPart]:
        self._held += text
        parts: list[AnswerPart] = []
        mark = "first"
        while mark:
            before, mark, self._held = cut(self._held, START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
            self._take(before, parts)
            if mark == MESSAGE:
                self._begin(parts)
            elif mark:  # another header, or more of one
                self._header = (self._header or "") + (mark if mark == CHANNEL else " ")
        return parts

    def flush(self) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        self._take(self._held, parts)
        return parts

    def _take(self, text: str, parts: list[AnswerPart]) -> None:
        if self._header is not None:
            self._header += text
        elif text:
            parts.append(self._kind(text))

    def _begin(self, parts: list[AnswerPart]) -> None:
        header, self._header = self._header or "", None
        function = FUNCTION.search(header)
        if function is not None and self._has_tools:
            parts.append(ToolCall(function[1]))
            self._kind = Arguments
        else:
            self._kind = Thought if header.rpartition(CHANNEL)[2].strip().startswith("analysis") else Text
