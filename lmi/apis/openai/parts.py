"""Splits the text of an answer to a chat into thoughts, text and calls, which each API writes in its own form.

A thought is the text between two marks at the start of an answer, or in Harmony on a channel of its own.
"""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any, Self

from lmi.apis.openai.calls.parsers import PARSERS
from lmi.apis.openai.calls.reader import AnswerPart, Arguments, Held, Read, Reading, Text, Thought, ToolCall, cut, rest
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

    def __init__(self, read: Read, tools: Mapping[str, Any]) -> None:
        self._held = Held(tools)
        self._reading = read(self._held)

    @classmethod
    def of(cls, format: OpenAIFormat, prompt: str) -> Self:
        return cls(partial(read_answer, format=format, prompt=prompt), format.tools)

    def feed(self, text: str, is_last: bool = False) -> list[AnswerPart]:
        """Return the parts that this text completes or continues."""
        self._held.text += text
        self._held.is_over = is_last
        parts: list[AnswerPart] = []
        while (part := next(self._reading, None)) is not None:
            parts.append(part)
        return parts


def read_answer(held: Held, format: OpenAIFormat, prompt: str) -> Reading:
    is_harmony = HARMONY in (format.reasoning, format.tool_calls)
    if format.reasoning and not is_harmony:
        yield from thoughts(held, format.reasoning, prompt)
    if format.function is not None:
        yield from forced_call(held, format.function)
    elif is_harmony:
        yield from harmony(held, has_tools=format.tool_calls is not None)
    elif format.tool_calls is not None:
        yield from PARSERS[format.tool_calls](held)
    else:
        yield from rest(held, Text)


def forced_call(held: Held, name: str) -> Reading:
    """The whole answer is the arguments of one call, whose function the request names."""
    while not (held.text or held.is_over):
        yield None
    if held.text:
        yield ToolCall(name)
    yield from rest(held, Arguments)


def thoughts(held: Held, form: str = "think", prompt: str = "") -> Reading:
    """Read the thought before an answer, if it has one.

    If the prompt ends with the opening mark, as some templates write it, the answer begins with the thought.
    """
    opening, closing = MARKS[form]
    while len(text := held.text.lstrip()) < len(opening) and opening.startswith(text) and not held.is_over:
        yield None
    if text.startswith(opening):
        text = text.removeprefix(opening)
    elif not prompt.rstrip().endswith(opening):
        return
    held.text = text.lstrip()
    has_thought = False
    while True:
        before, mark, held.text = cut(held.text, closing)
        if held.is_over and not mark:
            before += held.take()
        before = before if has_thought else before.lstrip()
        thought = before.rstrip()
        if thought:
            has_thought = True
            yield Thought(thought)
        if mark:
            break
        if held.is_over:
            return
        held.text = before[len(thought) :] + held.text  # white space may be at its end, so it waits
        yield None
    while not (text := held.text.lstrip()) and not held.is_over:
        yield None
    held.text = text


def harmony(held: Held, *, has_tools: bool) -> Reading:
    """Read an answer in Harmony, the form of gpt-oss: messages on channels, each with a header.

        <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json
        <|message|>{…}<|call|>

    Analysis is thought, a message to a function is a call, the rest is text. So is what has no header at all. Calls
    stay text if the request has no tools (`has_tools`). Source: openai/harmony.
    """
    kind: type[Thought | Text | Arguments] = Text
    header: str | None = None  # None: inside of a message
    while True:
        said, mark, held.text = cut(held.text, START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
        if header is not None:
            header += said
        elif said:
            yield kind(said)
        if mark == MESSAGE:
            header, function = header or "", FUNCTION.search(header or "")
            if function is not None and has_tools:
                yield ToolCall(function[1])
                kind = Arguments
            else:
                kind = Thought if header.rpartition(CHANNEL)[2].strip().startswith("analysis") else Text
            header = None
        elif mark:  # another header, or more of one
            header = (header or "") + (mark if mark == CHANNEL else " ")
        elif not held.is_over:
            yield None
        else:
            if header is None and held.text:
                yield kind(held.text)
            return
