"""Splits the text of an answer to a chat into thoughts, text and calls, which each API writes in its own form.

A thought is the text between two marks at the start of an answer, or in Harmony on a channel of its own.
"""

from __future__ import annotations

import enum
import re

from lmi.apis.openai.calls.parsers import PARSERS
from lmi.apis.openai.calls.reader import AnswerPart, Arguments, Part, Text, Thought, ToolCall, ToolCalls, cut
from lmi.apis.openai.schema import HARMONY, OpenAIFormat

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
MARKS = {  # of thoughts, by form
    "think": ("<think>", "</think>"),  # DeepSeek R1, Qwen 3 and most others
    "mistral": ("[THINK]", "[/THINK]"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
}
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


class ForcedCall:
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


class _Place(enum.Enum):
    START = enum.auto()  # only white space so far, or the beginning of a mark
    THINKING = enum.auto()
    BEHIND = enum.auto()  # directly after the closing mark
    ANSWER = enum.auto()


class Reasoning:
    """`feed` returns (thought, said) for each piece of text, and `flush` the text that was held back.

    If the prompt ends with the opening mark, as some templates write it, the answer begins with the thought.
    """

    def __init__(self, prompt: str = "", form: str = "think") -> None:
        self._opening, self._closing = MARKS[form]
        self._is_opened = prompt.rstrip().endswith(self._opening)
        self._place = _Place.START
        self._has_thought = False
        self._held = ""

    def feed(self, text: str) -> tuple[str, str]:
        self._held += text
        thought = ""
        if self._place is _Place.START:
            self._find_opening()
        if self._place is _Place.THINKING:
            thought = self._think()
        if self._place is _Place.BEHIND:
            self._held = self._held.lstrip()
            if self._held:
                self._place = _Place.ANSWER
        if self._place is not _Place.ANSWER:
            return thought, ""
        said, self._held = self._held, ""
        return thought, said

    def flush(self) -> tuple[str, str]:
        """Return (thought, said) at the end of the answer: the rest of an open thought, or of an incomplete mark."""
        held, self._held = self._held, ""
        if self._place is _Place.THINKING or (self._place is _Place.START and self._is_opened):
            return held.rstrip(), ""
        return "", "" if self._place is _Place.BEHIND else held

    def _find_opening(self) -> None:
        text = self._held.lstrip()
        if text.startswith(self._opening):
            self._place, self._held = _Place.THINKING, text[len(self._opening) :].lstrip()
        elif not self._opening.startswith(text):
            self._place = _Place.THINKING if self._is_opened else _Place.ANSWER
            self._held = text if self._is_opened else self._held

    def _think(self) -> str:
        """Return the thought that is certain. White space at its end is held back, because the mark may follow."""
        before, is_found, behind = cut(self._held, self._closing)
        if is_found:
            self._place, self._held = _Place.BEHIND, behind
            return before.strip() if not self._has_thought else before.rstrip()
        if not self._has_thought:
            before = before.lstrip()
        thought = before.rstrip()
        self._has_thought = self._has_thought or bool(thought)
        self._held = before[len(thought) :] + behind
        return thought


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
