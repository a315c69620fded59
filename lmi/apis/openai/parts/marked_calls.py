"""A reader of calls behind marks, with any text around them."""

from typing import NamedTuple

from lmi.apis.openai.parts.bare_calls import find_bare_call
from lmi.apis.openai.parts.buffer import AnswerBuffer, ReadCall, Reading, Text, cut, read_rest
from lmi.apis.openai.parts.json_calls import json_call, json_call_list

# Markdown's mark around code, which some models write around the JSON of a call.
FENCE = "```"


class Marks(NamedTuple):
    """The marks of a form."""

    # A call stands behind one of these.
    openings: tuple[str, ...]
    read_call: ReadCall
    # They are dropped between calls.
    closings: tuple[str, ...] = ()
    # If given, a block of calls begins with one of `openings`, and each call in it with this mark.
    # The mark of the block may be missing.
    again: str = ""
    # Whether they count only at the beginning of an answer.
    open_answer: bool = False
    # Whether an answer that begins with the JSON of a call needs none.
    may_be_missing: bool = False


def marked_calls(buffer: AnswerBuffer, marks: Marks) -> Reading:
    """Read calls behind marks, with any text around them. White space next to a call is dropped."""
    while marks.may_be_missing and (yield from find_bare_call(buffer)):
        read_call = json_call_list if buffer.text.startswith("[") else json_call
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

        buffer.take(len(text))
        if text:
            yield Text(text)

        if opening:
            buffer.text = behind
            yield from _calls(buffer, marks, opening, dropped=before[len(text) :] + opening)
            if marks.open_answer:
                openings = ()

            continue

        if buffer.is_over:
            yield from read_rest(buffer, Text)
            return

        yield None


def _calls(buffer: AnswerBuffer, marks: Marks, opening: str, dropped: str) -> Reading:
    """Read calls, and drop the marks between them. `dropped` is what was dropped before: if no call
    follows, it was text after all.
    """
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
