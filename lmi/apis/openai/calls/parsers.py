"""Finds calls of tools in the text of an answer while it arrives.

PARSERS has the forms by the names that vLLM gives them. Text that only resembles a call stays text.
"""

from functools import partial
from typing import NamedTuple

from lmi.apis.openai.calls import forms
from lmi.apis.openai.calls.reader import Held, Read, ReadCall, Reading, Text, cut, rest

PYTHON_TAG = "<|python_tag|>"  # of Llama 3, before its calls
PYTHON_START, PYTHON_END = "<|python_start|>", "<|python_end|>"  # of Llama 4


class Marks(NamedTuple):
    """A call stands behind one of `openings`, or behind `again` if that is given.

    The marks `closings` are dropped between calls. If they `open_answer`, only the first thing in an answer is one.
    """

    openings: tuple[str, ...]
    read_call: ReadCall
    closings: tuple[str, ...] = ()
    again: str = ""
    open_answer: bool = False


def marked_calls(held: Held, marks: Marks) -> Reading:
    """Read calls behind marks, with any text around them. White space next to a call is dropped."""
    openings = marks.openings
    while True:
        before, opening, behind = cut(held.text, *openings)
        said = before.rstrip()
        if said and marks.open_answer:
            openings, said, opening = (), held.text, ""
        if said:
            yield Text(said)
        if opening:
            held.text = behind
            yield from _calls(held, marks, before[len(said) :] + opening)
            openings = () if marks.open_answer else openings
            continue
        held.text = held.text[len(said) :]
        if held.is_over:
            yield from rest(held, Text)
            return
        yield None


def _calls(held: Held, marks: Marks, dropped: str) -> Reading:
    """Read calls and the marks between them. `dropped` is text after all if no call follows."""
    between = (*marks.closings, marks.again) if marks.again else marks.closings
    is_call = not marks.again
    while True:
        if is_call:
            left = yield from marks.read_call(held)
            if left is not None:
                yield Text(dropped + left)
                return
            dropped = ""
        text = held.text.lstrip()
        mark = next(filter(text.startswith, between), None)
        is_call = mark == marks.again
        if mark is not None:
            if is_call or dropped:
                dropped += held.text[: len(held.text) - len(text) + len(mark)]
            held.text = text[len(mark) :]
        elif text and not any(mark.startswith(text) for mark in between):
            if dropped:
                yield Text(dropped)
            else:
                held.text = text
            return
        elif not held.is_over:
            yield None
        else:
            text = held.take()
            if dropped:
                yield Text(dropped + text)
            return


def json_calls(held: Held) -> Reading:
    """Read an answer that is calls without marks: one, several with ; between, or a list.

    From the first character that cannot belong to one the answer is text.
    """
    allowed: tuple[str, ...] = ("[", PYTHON_TAG, PYTHON_TAG + "[")
    has_calls = False
    while True:
        start = held.text.find("{")
        before = held.text if start < 0 else held.text[:start]
        bare = before.strip()
        if bare and bare not in allowed and not (start < 0 and any(mark.startswith(bare) for mark in allowed)):
            break
        if start >= 0:
            held.take(start)
            left = yield from forms.json_call(held)
            if left is not None:
                held.text = before + left + held.text
                break
            allowed, has_calls = (",", ";", "]"), True
        elif not held.is_over:
            yield None
        elif has_calls and bare in ("", "]", ";"):
            return
        else:
            break
    yield from rest(held, Text)


TAGS = (
    forms.Tags(
        head=r"\s*<function=([^<>\s]+)",
        stop=">",
        opening="<parameter=",
        argument=r"<parameter=([^>]*)>\n?(.*?)\n?</parameter>",
        closing="</parameter>",
        end="</function>",
    ),
    forms.Tags(
        head=r"\s*([\w.:-]+)\s*",
        stop="<",
        opening="<arg_key>",
        argument=r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>",
        closing="</arg_value>",
        end="</tool_call>",
    ),
    forms.Tags(
        head=r"\s*<invoke name=\"([^\"]+)\"",
        stop=">",
        opening="<parameter name=",
        argument=r"<parameter name=\"([^\"]*)\">(.*?)</parameter>",
        closing="</parameter>",
        end="</invoke>",
    ),
)
DEEPSEEK, DEEPSEEK_CALL = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"
DEEPSEEK_ENDS = ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
DEEPSEEK_V3 = partial(forms.named_call, head=r"function<｜tool▁sep｜>([\w.:-]+)\n```json\n\s*")
DEEPSEEK_V31 = partial(forms.named_call, head=r"([\w.:-]+)<｜tool▁sep｜>\s*")
KIMI_HEAD = r"\s*(?:functions\.)?([\w.-]+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*"
KIMI_ENDS = ("<|tool_call_end|>", "<|tool_calls_section_end|>")
QWEN, GLM, MINIMAX = (partial(forms.tagged_call, tags=tags) for tags in TAGS)
MARKS = {
    "hermes": Marks(("<tool_call>",), forms.json_call, ("</tool_call>",)),
    "deepseek_v3": Marks((DEEPSEEK,), DEEPSEEK_V3, ("```", *DEEPSEEK_ENDS), DEEPSEEK_CALL),
    "deepseek_v31": Marks((DEEPSEEK,), DEEPSEEK_V31, DEEPSEEK_ENDS, DEEPSEEK_CALL),
    "glm45": Marks(("<tool_call>",), GLM, ("</tool_call>",)),
    "granite": Marks(("<|tool_call|>", "<tool_call>"), forms.json_call_list),
    "granite-20b-fc": Marks(("<function_call>",), forms.json_call),
    "jamba": Marks(("<tool_calls>",), forms.json_call_list, ("</tool_calls>",)),
    "kimi_k2": Marks(
        ("<|tool_calls_section_begin|>",), partial(forms.named_call, head=KIMI_HEAD), KIMI_ENDS, "<|tool_call_begin|>"
    ),
    "lfm2": Marks(("<|tool_call_start|>[",), forms.python_call_list, ("<|tool_call_end|>",)),
    "minimax_m2": Marks(("<minimax:tool_call>",), MINIMAX, ("</minimax:tool_call>",)),
    "mistral": Marks(("[TOOL_CALLS]",), forms.mistral_calls),
    "phi4_mini_json": Marks(("functools",), forms.json_call_list),
    "pythonic": Marks((PYTHON_START + "[", "["), forms.python_call_list, (PYTHON_END,), open_answer=True),
    "qwen3_xml": Marks(("<tool_call>",), QWEN, ("</tool_call>",)),
    "seed_oss": Marks(("<seed:tool_call>",), QWEN, ("</seed:tool_call>",)),
}
PARSERS: dict[str, Read] = {name: partial(marked_calls, marks=marks) for name, marks in MARKS.items()}
PARSERS["json"] = json_calls
