"""Separates a model's thoughts, the text between two marks, from the rest of its answer.

A thought is only at the start of an answer. If the prompt ends with the opening mark, as some templates write it, the
answer begins with the thought.
"""

from __future__ import annotations

import enum

# The marks of each form, the first before the thought.
MARKS = {
    "think": ("<think>", "</think>"),  # DeepSeek R1, Qwen 3 and most others
    "mistral": ("[THINK]", "[/THINK]"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
}


class _Place(enum.Enum):
    START = enum.auto()  # only white space so far, or the beginning of a mark
    THINKING = enum.auto()
    BEHIND = enum.auto()  # directly after the closing mark
    ANSWER = enum.auto()


class Reasoning:
    """`feed` returns (thought, said) for each piece of text, and `flush` the text that was held back."""

    def __init__(self, prompt: str = "", form: str = "think") -> None:
        self._opening, self._closing = MARKS[form]
        self._is_opened = prompt.rstrip().endswith(self._opening)
        self._place = _Place.START
        self._has_thought = False
        self._held = ""

    def feed(self, text: str) -> tuple[str, str]:
        self._held += text
        thought = ""
        if self._place is _Place.START:
            self._find_opening()
        if self._place is _Place.THINKING:
            thought = self._think()
        if self._place is _Place.BEHIND:
            self._held = self._held.lstrip()
            if self._held:
                self._place = _Place.ANSWER
        if self._place is not _Place.ANSWER:
            return thought, ""
        said, self._held = self._held, ""
        return thought, said

    def flush(self) -> tuple[str, str]:
        """Return (thought, said) at the end of the answer: the rest of an open thought, or of an incomplete mark."""
        held, self._held = self._held, ""
        if self._place is _Place.THINKING or (self._place is _Place.START and self._is_opened):
            return held.rstrip(), ""
        return "", "" if self._place is _Place.BEHIND else held

    def _find_opening(self) -> None:
        text = self._held.lstrip()
        if text.startswith(self._opening):
            self._place, self._held = _Place.THINKING, text[len(self._opening) :].lstrip()
        elif not self._opening.startswith(text):
            self._place = _Place.THINKING if self._is_opened else _Place.ANSWER
            self._held = text if self._is_opened else self._held

    def _think(self) -> str:
        """Return the thought that is certain. White space at its end is held back, because the mark may follow."""
        before, is_found, behind = cut(self._held, self._closing)
        if is_found:
            self._place, self._held = _Place.BEHIND, behind
            return before.strip() if not self._has_thought else before.rstrip()
        if not self._has_thought:
            before = before.lstrip()
        thought = before.rstrip()
        self._has_thought = self._has_thought or bool(thought)
        self._held = before[len(thought) :] + behind
        return thought


def cut(text: str, *marks: str) -> tuple[str, str, str]:
    """Return the text of a stream before the first of the marks, that mark, and the rest.

    The rest is the text behind the mark. Without a mark it is the end of the text that may be the beginning of one.
    """
    found = [(at, mark) for mark in marks if (at := text.find(mark)) >= 0]
    if found:
        at, mark = min(found)
        return text[:at], mark, text[at + len(mark) :]
    longest = min(max(map(len, marks), default=1) - 1, len(text))
    ends = (num for num in range(longest, 0, -1) if any(mark.startswith(text[-num:]) for mark in marks))
    at = len(text) - next(ends, 0)
    return text[:at], "", text[at:]
