"""Reads an answer whose calls stand behind marks, with any text around them.

`forms.py` lists the forms, each with its marks and with the reader of the call itself.
"""

from collections.abc import Generator

from msgspec import Struct

from lmi.apis.openai.parts.bare_calls import find_bare_call
from lmi.apis.openai.parts.buffer import AnswerBuffer, ReadCall, Reading, Text, cut, read_rest
from lmi.apis.openai.parts.json_calls import json_call, json_call_list

# Markdown's mark around code, which some models write around the JSON of a call.
FENCE = "```"


class Marks(Struct, frozen=True, kw_only=True):
    """The marks of a form, and the reader of what stands behind them."""

    read_call: ReadCall
    # One of these begins a call or, if there is a `call_opening`, a block of calls.
    openings: tuple[str, ...]
    # It begins each call of a block, whose own opening may be missing.
    call_opening: str = ""
    # They end a call or a block.
    closings: tuple[str, ...] = ()
    # Whether calls stand only at the beginning of an answer.
    only_at_start: bool = False
    # Whether an answer may begin with the JSON of a call, without a mark.
    may_be_bare: bool = False

    @property
    def before_calls(self) -> tuple[str, ...]:
        """The marks at which text ends and calls begin."""
        return (*self.openings, self.call_opening) if self.call_opening else self.openings

    @property
    def between_calls(self) -> tuple[str, ...]:
        """The marks that may follow a call."""
        return (*self.closings, self.call_opening) if self.call_opening else self.closings


def marked_calls(buffer: AnswerBuffer, marks: Marks) -> Reading:
    """Read text, and calls behind marks. White space next to a call is dropped."""
    if marks.may_be_bare:
        yield from _bare_calls(buffer, marks)

    openings = marks.before_calls
    while True:
        before, opening, behind = cut(buffer.text, *openings)
        text = before.rstrip()
        if text and marks.only_at_start:
            openings = ()
            yield Text(buffer.take())
            continue

        # White space stays in the buffer until it is known what follows.
        buffer.take(len(text))
        if text:
            yield Text(text)

        if opening:
            buffer.text = behind
            yield from _calls(buffer, marks, opening, skipped=before[len(text) :] + opening)
            if marks.only_at_start:
                openings = ()
        elif buffer.is_over:
            yield from read_rest(buffer, Text)
            return
        else:
            yield None


def _bare_calls(buffer: AnswerBuffer, marks: Marks) -> Reading:
    """Read the calls without an opening mark that an answer begins with."""
    closings = (*marks.closings, FENCE)
    while (yield from find_bare_call(buffer)):
        read_call = json_call_list if buffer.text.startswith("[") else json_call
        bare_marks = Marks(read_call=read_call, openings=(), closings=closings)
        yield from _calls(buffer, bare_marks, opening="", skipped="")


def _calls(buffer: AnswerBuffer, marks: Marks, opening: str, skipped: str) -> Reading:
    """Read the calls behind an opening mark, and the marks between them, up to other text.

    `skipped` is the text from the white space before the opening to where the buffer begins. It is
    dropped when a call follows, and text if none does.
    """
    is_at_call = not marks.call_opening or opening == marks.call_opening
    while True:
        if is_at_call:
            no_call = yield from marks.read_call(buffer)
            if no_call is not None:
                if not buffer.ends_in_markup():
                    yield Text(skipped + no_call)

                return

            skipped = ""

        mark = yield from _next_mark(buffer, marks.between_calls)
        text = buffer.text.lstrip()
        if mark is None:
            break

        is_at_call = mark == marks.call_opening
        if is_at_call or skipped:
            num_spaces = len(buffer.text) - len(text)
            skipped += buffer.text[: num_spaces + len(mark)]

        buffer.text = text.removeprefix(mark)

    if not _may_become_mark(text, marks.between_calls):
        if skipped:
            yield Text(skipped)
        else:
            buffer.text = text

        return

    # The answer has ended in white space or in the beginning of a mark.
    end = buffer.take()
    if skipped and not buffer.ends_in_markup():
        yield Text(skipped + end)


def _next_mark(buffer: AnswerBuffer, marks: tuple[str, ...]) -> Generator[None, None, str | None]:
    """Read on until it is known which mark follows, behind any white space. Returns None if none
    does. The buffer keeps its text.
    """
    while True:
        text = buffer.text.lstrip()
        for mark in marks:
            if text.startswith(mark):
                return mark

        if buffer.is_over or not _may_become_mark(text, marks):
            return None

        yield None


def _may_become_mark(text: str, marks: tuple[str, ...]) -> bool:
    """Return whether more text may turn this one into a mark."""
    return not text or any(mark.startswith(text) for mark in marks)
