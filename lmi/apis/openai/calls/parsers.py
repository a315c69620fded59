"""Finds calls of tools in the text of an answer while it arrives.

PARSERS has the forms by the names that vLLM gives them. Text that only resembles a call stays text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from lmi.apis.openai.calls import forms
from lmi.apis.openai.calls.reader import CallReader, Part, Text, ToolCalls, cut
from lmi.apis.openai.tools import Tools


@dataclass
class MarkedCalls:
    """Calls behind marks, with any text around them. White space next to a call is dropped.

    A call stands behind one of `openings`, or behind `again` if that is given. The marks `closings` are dropped between
    calls. If they `open_answer`, only the first thing in an answer is one.
    """

    openings: tuple[str, ...]
    new_reader: Callable[[], CallReader]
    closings: tuple[str, ...] = ()
    again: str = ""
    open_answer: bool = False
    _held: str = ""
    _dropped: str = ""  # what is text after all if no call follows
    _reader: CallReader | None = None
    _is_between: bool = False  # marks, before, between or behind calls

    def feed(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        while self._step(parts):
            pass
        return parts

    def _step(self, parts: list[Part]) -> bool:
        """Read one element. Returns False when more text is needed."""
        if self._reader is not None:
            return self._read_call(self._reader, parts)
        if self._is_between:
            return self._skip_marks(parts)
        before, mark, behind = cut(self._held, *self.openings)
        said = before.rstrip()
        if said and self.open_answer:
            self.openings, said, mark, behind = (), self._held, "", ""
        if said:
            parts.append(Text(said))
        self._held = behind if mark else self._held[len(said) :]
        if mark:
            self._dropped = before[len(said) :] + mark
            self._is_between = bool(self.again)
            self._reader = None if self.again else self.new_reader()
        return bool(mark)

    def _read_call(self, reader: CallReader, parts: list[Part]) -> bool:
        new, self._held = reader.feed(self._held)
        parts += new
        if not (reader.is_broken or reader.is_over):
            return False
        if reader.is_broken:
            parts.append(Text(self._dropped + reader.left))
        if self.open_answer:
            self.openings = ()
        self._reader, self._dropped, self._is_between = None, "", reader.is_over
        return True

    def _skip_marks(self, parts: list[Part]) -> bool:
        """Drop a mark. Returns False while one may still come."""
        held = self._held.lstrip()
        marks = (*self.closings, self.again) if self.again else self.closings
        mark = next(filter(held.startswith, marks), None)
        if mark is not None:
            is_call, end = mark == self.again, len(self._held) - len(held) + len(mark)
            if is_call or self._dropped:
                self._dropped += self._held[:end]
            self._held, self._is_between = self._held[end:], not is_call
            self._reader = self.new_reader() if is_call else None
            return True
        if not held or any(mark.startswith(held) for mark in marks):
            return False
        if self._dropped:
            parts.append(Text(self._dropped))
            self._dropped = ""
        else:
            self._held = held
        self._is_between = False
        return True

    def flush(self) -> list[Part]:
        reader = self._reader
        if reader is not None:
            left = reader.left if reader.has_begun else self._dropped + reader.left
        else:
            left = "" if self._is_between and not self._dropped else self._dropped + self._held
        return [Text(left)] if left else []


PYTHON_START, PYTHON_END = "<|python_start|>", "<|python_end|>"  # of Llama 4
TAGS = {
    "qwen3_xml": forms.Tags(
        head=r"\s*<function=([^<>\s]+)",
        stop=">",
        opening="<parameter=",
        argument=r"<parameter=([^>]*)>\n?(.*?)\n?</parameter>",
        closing="</parameter>",
        end="</function>",
    ),
    "glm45": forms.Tags(
        head=r"\s*([\w.:-]+)\s*",
        stop="<",
        opening="<arg_key>",
        argument=r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>",
        closing="</arg_value>",
        end="</tool_call>",
    ),
    "minimax_m2": forms.Tags(
        head=r"\s*<invoke name=\"([^\"]+)\"",
        stop=">",
        opening="<parameter name=",
        argument=r"<parameter name=\"([^\"]*)\">(.*?)</parameter>",
        closing="</parameter>",
        end="</invoke>",
    ),
}
DEEPSEEK_BEGIN, DEEPSEEK_END = "<｜tool▁call▁begin｜>", ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
DEEPSEEK_HEAD = {
    "deepseek_v3": r"function<｜tool▁sep｜>([\w.:-]+)\n```json\n\s*",
    "deepseek_v31": r"([\w.:-]+)<｜tool▁sep｜>\s*",
}
KIMI_HEAD = r"\s*(?:functions\.)?([\w.-]+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*"


def _deepseek(form: str, *closings: str) -> ToolCalls:
    reader = partial(forms.NamedCall, DEEPSEEK_HEAD[form])
    return MarkedCalls(("<｜tool▁calls▁begin｜>",), reader, (*closings, *DEEPSEEK_END), DEEPSEEK_BEGIN)


def _tagged(form: str, tools: Tools, opening: str, closing: str) -> ToolCalls:
    return MarkedCalls((opening,), partial(forms.TaggedCall, TAGS[form], tools), (closing,))


# For the tools of a request, which types of arguments may come from.
PARSERS: dict[str, Callable[[Tools], ToolCalls]] = {
    "hermes": lambda tools: MarkedCalls(("<tool_call>",), forms.JsonCall, ("</tool_call>",)),
    "json": lambda tools: forms.JsonCalls(),
    "deepseek_v3": lambda tools: _deepseek("deepseek_v3", "```"),
    "deepseek_v31": lambda tools: _deepseek("deepseek_v31"),
    "glm45": lambda tools: _tagged("glm45", tools, "<tool_call>", "</tool_call>"),
    "granite": lambda tools: MarkedCalls(("<|tool_call|>", "<tool_call>"), forms.JsonCallList),
    "granite-20b-fc": lambda tools: MarkedCalls(("<function_call>",), forms.JsonCall),
    "jamba": lambda tools: MarkedCalls(("<tool_calls>",), forms.JsonCallList, ("</tool_calls>",)),
    "kimi_k2": lambda tools: MarkedCalls(
        ("<|tool_calls_section_begin|>",),
        partial(forms.NamedCall, KIMI_HEAD),
        ("<|tool_call_end|>", "<|tool_calls_section_end|>"),
        "<|tool_call_begin|>",
    ),
    "lfm2": lambda tools: MarkedCalls(("<|tool_call_start|>[",), forms.PythonCallList, ("<|tool_call_end|>",)),
    "minimax_m2": lambda tools: _tagged("minimax_m2", tools, "<minimax:tool_call>", "</minimax:tool_call>"),
    "mistral": lambda tools: MarkedCalls(("[TOOL_CALLS]",), forms.MistralCalls),
    "phi4_mini_json": lambda tools: MarkedCalls(("functools",), forms.JsonCallList),
    "pythonic": lambda tools: MarkedCalls(
        (PYTHON_START + "[", "["), forms.PythonCallList, (PYTHON_END,), open_answer=True
    ),
    "qwen3_xml": lambda tools: _tagged("qwen3_xml", tools, "<tool_call>", "</tool_call>"),
    "seed_oss": lambda tools: _tagged("qwen3_xml", tools, "<seed:tool_call>", "</seed:tool_call>"),
}
