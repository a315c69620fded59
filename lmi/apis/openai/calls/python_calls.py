"""A list of calls as Python writes them, [f(a=1, b="x"), g()], which is passed on as JSON when it is whole."""

from __future__ import annotations

import ast
import json
import warnings

from lmi.apis.openai.calls.reader import Arguments, CallReader, Part, ToolCall

MAX_CHARS, MAX_LEVELS = 64 << 10, 50  # of a list, and of brackets in it


class PythonCallList(CallReader):
    """Begins behind the opening bracket."""

    def __init__(self) -> None:
        super().__init__()
        self._depth = 1
        self._quote = ""  # of the text that is read
        self._is_escaped = False

    def feed(self, text: str) -> tuple[list[Part], str]:
        room = MAX_CHARS - len(self.text)
        end = next((at + 1 for at, char in enumerate(text[:room]) if self._ends_with(char)), min(room, len(text)))
        self.text += text[:end]
        if self._depth == 0:
            parts = _python_calls("[" + self.text)
            self.is_over = self.has_begun = bool(parts)
            self.is_broken = not parts
            return parts, text[end:]
        self.is_broken = self._depth > MAX_LEVELS or end == room
        return [], text[end:]

    def _ends_with(self, char: str) -> bool:
        if self._quote:
            self._quote = "" if char == self._quote and not self._is_escaped else self._quote
            self._is_escaped = char == "\\" and not self._is_escaped
        elif char in "'\"":
            self._quote = char
        else:
            self._depth += (char in "[({") - (char in "])}")
        return not 0 < self._depth <= MAX_LEVELS


def _python_calls(text: str) -> list[Part]:
    """Return the calls of a list in Python's form, or none if it holds anything else."""
    parts: list[Part] = []
    try:
        with warnings.catch_warnings(action="ignore"):  # about escapes
            calls = ast.parse(text.strip(), mode="eval").body
        if not isinstance(calls, ast.List):
            return []
        for call in calls.elts:
            if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name | ast.Attribute):
                return []
            if any(each.arg is None for each in call.keywords):  # **names
                return []
            values = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
            arguments = json.dumps(values, ensure_ascii=False, allow_nan=False)
            parts += [ToolCall(ast.unparse(call.func)), Arguments(arguments)]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return []
    return parts
