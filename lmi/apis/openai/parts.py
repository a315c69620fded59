"""Splits the text of an answer to a chat into thoughts, text and calls, which each API writes in
its own form.

A thought is the text between two marks at the start of an answer, or in Harmony on a channel of its
own. PARSERS has the forms of calls by the names that vLLM gives them. Text that only resembles a
call stays text, and the beginning of a call that was cut is none.
"""

import re
from collections.abc import Generator, Mapping
from functools import partial
from typing import Any, NamedTuple, Self

from lmi.apis.openai import calls
from lmi.apis.openai.answer_format import HARMONY, OpenAIFormat
from lmi.apis.openai.calls import (
    AnswerBuffer,
    AnswerPart,
    Arguments,
    Read,
    Reading,
    Text,
    Thought,
    ToolCall,
    cut,
    read_rest,
)
from lmi.types import AnswerEnd

START = "<|start|>"
CHANNEL = "<|channel|>"
MESSAGE = "<|message|>"
CONSTRAIN = "<|constrain|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
# The marks of thoughts by their forms.
THOUGHT_MARKS = {
    # DeepSeek R1, Qwen 3 and most others write these.
    "think": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
}
FUNCTION = re.compile(r"to=functions\.([\w.-]+)")
# Llama 3 writes it before its calls.
PYTHON_TAG = "<|python_tag|>"
# Llama 4 writes these around its calls.
PYTHON_START = "<|python_start|>"
PYTHON_END = "<|python_end|>"


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
        read_parts = partial(read_answer, format=format, prompt=prompt)
        return cls(read_parts, format.tools, has_thoughts=format.has_thoughts)

    @property
    def has_lost_markup(self) -> bool:
        """Whether the answer was cut in the beginning of a call."""
        return self._buffer.has_lost_markup

    def feed(self, text: str, end: AnswerEnd | None = None) -> list[AnswerPart]:
        """Return the parts that this text completes or continues. With the last text the answer has
        its `end`.
        """
        self._buffer.text += text
        self._buffer.is_over = end is not None
        self._buffer.is_cut = end not in (None, AnswerEnd.EOS_TOKEN)

        parts: list[AnswerPart] = []
        while (part := next(self._reading, None)) is not None:
            if self._has_thoughts or not isinstance(part, Thought):
                parts.append(part)

        return parts


def read_answer(buffer: AnswerBuffer, format: OpenAIFormat, prompt: str) -> Reading:
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


def forced_call(buffer: AnswerBuffer, name: str) -> Reading:
    """The whole answer is the arguments of one call, whose function the request names."""
    while not (buffer.text or buffer.is_over):
        yield None

    if buffer.text:
        yield ToolCall(name)

    yield from read_rest(buffer, Arguments)


def forced_calls(buffer: AnswerBuffer) -> Reading:
    """Read a list of calls that a guide has written, and nothing else, so what is no call is no
    text either.

    An engine that follows no guide may have answered something else, which is text.
    """
    while not buffer.text.strip() and not buffer.is_over:
        yield None

    if not buffer.text.lstrip().startswith(("[", "{")):
        yield from read_rest(buffer, Text)
        return

    before = ""
    has_calls = False
    while True:
        start = buffer.text.find("{")
        between = buffer.take(start if start >= 0 else None)
        if not has_calls:
            before += between

        if start >= 0:
            no_call = yield from calls.json_call(buffer)
            if no_call is None:
                has_calls = True
            elif not has_calls and not buffer.ends_in_markup():
                yield Text(before + no_call)
                yield from read_rest(buffer, Text)
                return
        elif not buffer.is_over:
            yield None
        else:
            if not has_calls and not buffer.ends_in_markup():
                yield Text(before)

            return


def thoughts(buffer: AnswerBuffer, form: str = "think", prompt: str = "") -> Reading:
    """Read the thought before an answer, if it has one.

    If the prompt ends with the opening mark, as some templates write it, the answer begins with the
    thought.
    """
    opening, closing = THOUGHT_MARKS[form]
    text = buffer.text.lstrip()
    while len(text) < len(opening) and opening.startswith(text) and not buffer.is_over:
        yield None
        text = buffer.text.lstrip()

    if text.startswith(opening):
        text = text.removeprefix(opening)
    elif not prompt.rstrip().endswith(opening):
        return

    buffer.text = text.lstrip()
    has_thought = False
    while True:
        before, mark, buffer.text = cut(buffer.text, closing)
        if buffer.is_over and not mark:
            before += buffer.take()

        if not has_thought:
            before = before.lstrip()

        thought = before.rstrip()
        if thought:
            has_thought = True
            yield Thought(thought)

        if mark:
            break

        if buffer.is_over:
            return

        # White space may be at the end of the thought, so it waits.
        buffer.text = before[len(thought) :] + buffer.text
        yield None

    while not buffer.text.strip() and not buffer.is_over:
        yield None

    buffer.text = buffer.text.lstrip()


def harmony(buffer: AnswerBuffer, *, has_tools: bool) -> Reading:
    """Read an answer in Harmony, the form of gpt-oss: messages on channels, each with a header.

        <|channel|>analysis<|message|>…<|end|>
        <|start|>assistant<|channel|>commentary to=functions.f
        <|constrain|>json<|message|>{…}<|call|>

    Analysis is thought, a message to a function is a call, the rest is text. So is what has no
    header at all. Calls stay text if the request has no tools (`has_tools`). Source:
    openai/harmony.
    """
    kind: type[Thought | Text | Arguments] = Text
    # The header that is read now. Inside of a message there is none.
    header: str | None = None
    while True:
        text, mark, buffer.text = cut(buffer.text, START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
        if header is not None:
            header += text
        elif text:
            yield kind(text)

        if mark == MESSAGE:
            header = header or ""
            function = FUNCTION.search(header)
            if function is not None and has_tools:
                yield ToolCall(function[1])
                kind = Arguments
            else:
                channel = header.rpartition(CHANNEL)[2].strip()
                kind = Thought if channel.startswith("analysis") else Text

            header = None
        elif mark:
            # Another header begins, or more of one follows.
            header = (header or "") + (mark if mark == CHANNEL else " ")
        elif not buffer.is_over:
            yield None
        else:
            if header is None and buffer.text:
                yield kind(buffer.text)

            return


class Marks(NamedTuple):
    """A call stands behind one of `openings`.

    If `again` is given, a block of calls begins with one of `openings` and each call in it with
    `again`, which is enough where a model leaves out the former. The marks `closings` are dropped
    between calls. If they `open_answer`, only the first thing in an answer is one. If they
    `may_be_missing`, an answer that begins with a call's JSON has it.
    """

    openings: tuple[str, ...]
    read_call: calls.ReadCall
    closings: tuple[str, ...] = ()
    again: str = ""
    open_answer: bool = False
    may_be_missing: bool = False


def marked_calls(buffer: AnswerBuffer, marks: Marks) -> Reading:
    """Read calls behind marks, with any text around them. White space next to a call is dropped."""
    while marks.may_be_missing and (yield from _find_bare_call(buffer)):
        read_call = calls.json_call_list if buffer.text.startswith("[") else calls.json_call
        bare_marks = Marks((), read_call, (*marks.closings, FENCE))
        yield from _calls(buffer, bare_marks, opening="", dropped="")

    openings = marks.openings
    if marks.again:
        openings += (marks.again,)

    while True:
        before, opening, behind = cut(buffer.text, *openings)
        text = before.rstrip()
        if text and marks.open_answer:
            openings = ()
            text = buffer.text
            opening = ""

        if text:
            yield Text(text)

        if opening:
            buffer.text = behind
            yield from _calls(buffer, marks, opening, dropped=before[len(text) :] + opening)
            if marks.open_answer:
                openings = ()

            continue

        buffer.text = buffer.text[len(text) :]
        if buffer.is_over:
            yield from read_rest(buffer, Text)
            return

        yield None


def _calls(buffer: AnswerBuffer, marks: Marks, opening: str, dropped: str) -> Reading:
    """Read calls and the marks between them. `dropped` is text after all if no call follows."""
    between = marks.closings
    if marks.again:
        between += (marks.again,)

    is_call = opening == marks.again or not marks.again
    while True:
        if is_call:
            no_call = yield from marks.read_call(buffer)
            if no_call is not None:
                if not buffer.ends_in_markup():
                    yield Text(dropped + no_call)

                return

            dropped = ""

        text = buffer.text.lstrip()
        mark = next(filter(text.startswith, between), None)
        is_call = mark == marks.again
        if mark is not None:
            if is_call or dropped:
                num_spaces = len(buffer.text) - len(text)
                dropped += buffer.text[: num_spaces + len(mark)]

            buffer.text = text[len(mark) :]
        elif text and not any(mark.startswith(text) for mark in between):
            if dropped:
                yield Text(dropped)
            else:
                buffer.text = text

            return
        elif not buffer.is_over:
            yield None
        else:
            text = buffer.take()
            if dropped and not buffer.ends_in_markup():
                yield Text(dropped + text)

            return


FENCE = "```"
BARE_CALL = re.compile(r'\s*(?:```(?:json)?\s*)?(\[?\s*\{\s*"name"\s*:\s*"([^"]+)")')
BEGINNING_OF_BARE_CALL = re.compile(
    r"\s*(?:`{0,2}|```(?:j|js|jso)?|(?:```(?:json)?\s*)?\[?\s*"
    r'(?:\{\s*(?:"n?|"na|"nam|"name"?|"name"\s*:?\s*|"name"\s*:\s*"[^"]*)?)?)'
)


def begins_call(text: str, tools: Mapping[str, Any]) -> bool:
    """Whether a text begins with the JSON of a call to one of the tools."""
    beginning = BARE_CALL.match(text)
    return beginning is not None and beginning[2] in tools


def _find_bare_call(buffer: AnswerBuffer) -> Generator[None, None, bool]:
    """Read on while the text may begin with the JSON of a call to one of the tools. Return whether
    it does.

    What stands before the JSON is then dropped.
    """
    while (beginning := BARE_CALL.match(buffer.text[: calls.MAX_HEAD])) is None:
        may_begin = len(buffer.text) < calls.MAX_HEAD and BEGINNING_OF_BARE_CALL.fullmatch(
            buffer.text
        )
        if buffer.is_over or not may_begin:
            return False

        yield None

    is_call = beginning[2] in buffer.tools
    if is_call:
        buffer.take(beginning.start(1))

    return is_call


def json_calls(buffer: AnswerBuffer) -> Reading:
    """Read an answer that is calls without marks: one, several with ; between, or a list.

    From the first character that cannot belong to one the answer is text.
    """
    allowed: tuple[str, ...] = ("[", PYTHON_TAG, PYTHON_TAG + "[")
    has_calls = False
    while True:
        start = buffer.text.find("{")
        before = buffer.text if start < 0 else buffer.text[:start]
        bare = before.strip()
        may_grow = start < 0 and any(mark.startswith(bare) for mark in allowed)
        if bare and bare not in allowed and not may_grow:
            break

        if start >= 0:
            buffer.take(start)
            no_call = yield from calls.json_call(buffer)
            if no_call is not None:
                is_call = has_calls or begins_call(no_call, buffer.tools)
                if is_call and buffer.ends_in_markup():
                    return

                buffer.text = before + no_call + buffer.text
                break

            allowed = (",", ";", "]")
            has_calls = True
        elif not buffer.is_over:
            yield None
        elif has_calls and (bare in ("", "]", ";") or buffer.is_cut):
            return
        else:
            break

    yield from read_rest(buffer, Text)


QWEN_TAGS = calls.Tags(
    head=r"\s*([^<>\s]+)\s*",
    stop=">",
    opening="<parameter=",
    argument=r"<parameter=([^>]*)>\n?(.*?)\n?</parameter>",
    closing="</parameter>",
    end="</function>",
)
GLM_TAGS = calls.Tags(
    head=r"\s*([\w.:-]+)\s*",
    stop="<",
    opening="<arg_key>",
    argument=r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>",
    closing="</arg_value>",
    end="</tool_call>",
)
MINIMAX_TAGS = calls.Tags(
    head=r"\s*\"([^\"]+)\"\s*",
    stop=">",
    opening="<parameter name=",
    argument=r"<parameter name=\"([^\"]*)\">(.*?)</parameter>",
    closing="</parameter>",
    end="</invoke>",
)
QWEN = partial(calls.tagged_call, tags=QWEN_TAGS)
GLM = partial(calls.tagged_call, tags=GLM_TAGS)
MINIMAX = partial(calls.tagged_call, tags=MINIMAX_TAGS)


DEEPSEEK = "<｜tool▁calls▁begin｜>"
DEEPSEEK_CALL = "<｜tool▁call▁begin｜>"
DEEPSEEK_ENDS = ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
DEEPSEEK_V3 = partial(calls.named_call, head=r"function<｜tool▁sep｜>([\w.:-]+)\n```json\n\s*")
DEEPSEEK_V31 = partial(calls.named_call, head=r"([\w.:-]+)<｜tool▁sep｜>\s*")
KIMI_HEAD = r"\s*(?:functions\.)?([\w.-]+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*"
# A model writes either.
KIMI_STARTS = (
    "<|tool_calls_section_begin|>",
    "<|tool_call_section_begin|>",
)
KIMI_ENDS = ("<|tool_call_end|>", "<|tool_calls_section_end|>", "<|tool_call_section_end|>")
FUNCTION_TAG = "<function="
INVOKE_TAG = "<invoke name="
MARKS = {
    "hermes": Marks(("<tool_call>",), calls.json_call, ("</tool_call>",), may_be_missing=True),
    "deepseek_v3": Marks((DEEPSEEK,), DEEPSEEK_V3, ("```", *DEEPSEEK_ENDS), DEEPSEEK_CALL),
    "deepseek_v31": Marks((DEEPSEEK,), DEEPSEEK_V31, DEEPSEEK_ENDS, DEEPSEEK_CALL),
    "glm45": Marks(("<tool_call>",), GLM, ("</tool_call>",)),
    "granite": Marks(("<|tool_call|>", "<tool_call>"), calls.json_call_list, may_be_missing=True),
    "granite-20b-fc": Marks(("<function_call>",), calls.json_call, may_be_missing=True),
    "jamba": Marks(
        ("<tool_calls>",), calls.json_call_list, ("</tool_calls>",), may_be_missing=True
    ),
    "kimi_k2": Marks(
        KIMI_STARTS, partial(calls.named_call, head=KIMI_HEAD), KIMI_ENDS, "<|tool_call_begin|>"
    ),
    "lfm2": Marks(("<|tool_call_start|>[",), calls.python_call_list, ("<|tool_call_end|>",)),
    "minimax_m2": Marks(("<minimax:tool_call>",), MINIMAX, ("</minimax:tool_call>",), INVOKE_TAG),
    "mistral": Marks(("[TOOL_CALLS]",), calls.mistral_calls, may_be_missing=True),
    "phi4_mini_json": Marks(
        ("functools", "<|tool_call|>"),
        calls.json_call_list,
        ("<|/tool_call|>",),
        may_be_missing=True,
    ),
    "pythonic": Marks(
        (PYTHON_START + "[", "["), calls.python_call_list, (PYTHON_END,), open_answer=True
    ),
    "qwen3_xml": Marks(("<tool_call>",), QWEN, ("</tool_call>",), FUNCTION_TAG),
    "seed_oss": Marks(("<seed:tool_call>",), QWEN, ("</seed:tool_call>",), FUNCTION_TAG),
}
PARSERS: dict[str, Read] = {
    **{form: partial(marked_calls, marks=marks) for form, marks in MARKS.items()},
    "json": json_calls,
}
# lmi/chats/tools.py asks for this form.
PARSERS["generic"] = PARSERS["hermes"]
