"""Answers in Harmony, the form of gpt-oss: messages on channels, each with a header.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json
    <|message|>{…}<|call|>

Source: openai/harmony.
"""

from __future__ import annotations

import re

from lmi.apis.openai.calls.reader import AnswerPart, Arguments, Text, Thought, ToolCall
from lmi.apis.openai.reasoning import cut

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
FUNCTION = re.compile(r"to=functions\.([\w.-]+)")


class Harmony:
    """Analysis is thought, a message to a function is a call, the rest is text. So is what has no header at all.

    Calls stay text if the request has no tools (`has_tools`).
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
