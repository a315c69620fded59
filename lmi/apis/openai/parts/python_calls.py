"""A reader of calls in Python's form."""

import ast
import json
import warnings

from lmi.apis.openai.parts.brackets import Brackets
from lmi.apis.openai.parts.buffer import AnswerBuffer, AnswerPart, Arguments, CallReading, ToolCall

# The bounds of a list of calls, and of the brackets in it.
MAX_CHARS = 64 << 10
MAX_LEVELS = 50


def python_call_list(buffer: AnswerBuffer) -> CallReading:
    """Read `[f(a=1, b="x"), g()]`, behind its opening bracket. It is passed on when it is whole."""
    brackets = Brackets("[({", "])}", "'\"", depth=1)
    end = 0
    while True:
        text = buffer.text[:MAX_CHARS]
        while end < len(text) and 0 < brackets.depth <= MAX_LEVELS:
            brackets.read(text[end])
            end += 1

        if end == MAX_CHARS or buffer.is_over or not 0 < brackets.depth <= MAX_LEVELS:
            text = buffer.take(end)
            calls = [] if brackets.depth else _python_calls("[" + text)
            yield from calls
            return None if calls else text

        yield None


def _python_calls(text: str) -> list[AnswerPart]:
    """Return the calls of a list in Python's form, or none if it holds anything else."""
    parts: list[AnswerPart] = []
    try:
        # Python warns about escapes in strings.
        with warnings.catch_warnings(action="ignore"):
            calls = ast.parse(text.strip(), mode="eval").body

        if not isinstance(calls, ast.List):
            return []

        for call in calls.elts:
            if not isinstance(call, ast.Call) or call.args:
                return []

            if not isinstance(call.func, ast.Name | ast.Attribute):
                return []

            values = {}
            for keyword in call.keywords:
                # `**names` has no name.
                if keyword.arg is None:
                    return []

                values[keyword.arg] = ast.literal_eval(keyword.value)

            arguments = json.dumps(values, ensure_ascii=False, allow_nan=False)
            parts += [ToolCall(ast.unparse(call.func)), Arguments(arguments)]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return []

    return parts
