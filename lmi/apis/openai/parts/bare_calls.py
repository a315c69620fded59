"""Readers of calls without marks: an answer that is JSON."""

import re
from collections.abc import Generator, Mapping
from typing import Any

from lmi.apis.openai.parts.buffer import AnswerBuffer, Reading, Text, read_rest
from lmi.apis.openai.parts.json_calls import MAX_HEAD, json_call

# Llama 3 writes it before its calls.
PYTHON_TAG = "<|python_tag|>"
# The JSON of a call, perhaps in a list or a fence of Markdown. Its groups are what is read as the
# call, and the name.
BARE_CALL = re.compile(r'\s*(?:```(?:json)?\s*)?(\[?\s*\{\s*"name"\s*:\s*"([^"]+)")')
# What may become such a call.
BEGINNING_OF_BARE_CALL = re.compile(
    r"\s*(?:`{0,2}|```(?:j|js|jso)?|(?:```(?:json)?\s*)?\[?\s*"
    r'(?:\{\s*(?:"n?|"na|"nam|"name"?|"name"\s*:?\s*|"name"\s*:\s*"[^"]*)?)?)'
)


def begins_call(text: str, tools: Mapping[str, Any]) -> bool:
    """Whether a text begins with the JSON of a call to one of the tools."""
    beginning = BARE_CALL.match(text)
    return beginning is not None and beginning[2] in tools


def find_bare_call(buffer: AnswerBuffer) -> Generator[None, None, bool]:
    """Read on until it is known whether the text begins with the JSON of a call to one of the
    tools, and return that. If it does, what stands before the JSON is dropped.
    """
    while (beginning := BARE_CALL.match(buffer.text[:MAX_HEAD])) is None:
        is_long = len(buffer.text) >= MAX_HEAD
        if buffer.is_over or is_long or not BEGINNING_OF_BARE_CALL.fullmatch(buffer.text):
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
            no_call = yield from json_call(buffer)
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
