"""What a model thinks aloud, apart from what it says: the text between `<think>` and `</think>`.

Reads the answer as it comes; the parts are the same however the text is cut. Thinking stands at the start of an answer
or nowhere; where the model's template has opened it in the prompt already, the answer starts inside. White
space around the marks belongs to neither side. Marks: DeepSeek R1, Qwen 3, QwQ. Knows no wire.
"""

from __future__ import annotations

import enum

from lmi.text.marks import cut

OPENING, CLOSING = "<think>", "</think>"


class _Place(enum.Enum):
    START = enum.auto()  # nothing but white space so far, or the beginning of a mark
    THINKING = enum.auto()
    BEHIND = enum.auto()  # the closing mark was the last thing
    ANSWER = enum.auto()


class Reasoning:
    """`feed` gives (thought, said) for each piece of text, `flush` what was held back."""

    def __init__(self, prompt: str = "") -> None:
        self._is_opened = prompt.rstrip().endswith(OPENING)
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
        """The end of the answer: a thought without an end, or a mark that never became one."""
        held, self._held = self._held, ""
        if self._place is _Place.THINKING or (self._place is _Place.START and self._is_opened):
            return held.rstrip(), ""
        return "", "" if self._place is _Place.BEHIND else held

    def _find_opening(self) -> None:
        text = self._held.lstrip()
        if text.startswith(OPENING):
            self._place, self._held = _Place.THINKING, text[len(OPENING) :].lstrip()
        elif not OPENING.startswith(text):
            self._place = _Place.THINKING if self._is_opened else _Place.ANSWER
            self._held = text if self._is_opened else self._held

    def _think(self) -> str:
        """Thought that is complete; its white space is held back, since the mark may follow."""
        before, is_found, behind = cut(self._held, CLOSING)
        if is_found:
            self._place, self._held = _Place.BEHIND, behind
            return before.strip() if not self._has_thought else before.rstrip()
        if not self._has_thought:
            before = before.lstrip()
        thought = before.rstrip()
        self._has_thought = self._has_thought or bool(thought)
        self._held = before[len(thought) :] + behind
        return thought
