"""Readers of answers that must be calls, because the request says so."""

from lmi.apis.openai.parts.buffer import AnswerBuffer, Arguments, Reading, Text, ToolCall, read_rest
from lmi.apis.openai.parts.json_calls import json_call


def forced_call(buffer: AnswerBuffer, name: str) -> Reading:
    """Read an answer that is the arguments of one call, whose function the request names."""
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
            no_call = yield from json_call(buffer)
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
