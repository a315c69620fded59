"""Readers of answers that must be calls, because `tool_choice` of the request says so."""

from lmi.apis.openai.parts.buffer import AnswerBuffer, Arguments, Reading, Text, ToolCall, read_rest
from lmi.apis.openai.parts.json_calls import json_call


def forced_call(buffer: AnswerBuffer, name: str) -> Reading:
    """Read an answer that is only the arguments of a call, whose function the request names."""
    while not (buffer.text or buffer.is_over):
        yield None

    if buffer.text:
        yield ToolCall(name)

    yield from read_rest(buffer, Arguments)


def forced_calls(buffer: AnswerBuffer) -> Reading:
    """Read a list of calls that a guide makes the model write. Text between calls is dropped.

    An engine that follows no guide may answer something else. Without a call all of it is text.
    """
    while not buffer.text.strip() and not buffer.is_over:
        yield None

    if not buffer.text.lstrip().startswith(("[", "{")):
        yield from read_rest(buffer, Text)
        return

    # What stands before the first call: text, if no call comes.
    before = ""
    has_calls = False
    while True:
        start = buffer.text.find("{")
        skipped = buffer.take() if start < 0 else buffer.take(start)
        if not has_calls:
            before += skipped

        if start < 0:
            if not buffer.is_over:
                yield None
                continue

            if not has_calls and not buffer.ends_in_markup():
                yield Text(before)

            return

        no_call = yield from json_call(buffer)
        if no_call is None:
            has_calls = True
        elif not has_calls and not buffer.ends_in_markup():
            yield Text(before + no_call)
            yield from read_rest(buffer, Text)
            return
