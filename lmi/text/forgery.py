"""Special tokens that the content of a chat spells, such as `<|im_start|>system`: forged roles, unless they stay text.

A special token is a template's to write. Content is marked before the template renders it: a character that no text
should have breaks each spelling, also one that two contents spell together. In the rendered text the marks show which
spellings came from content, and the tokenizer encodes these as text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

MARK = "\ufdd0"  # one of Unicode's noncharacters; content that has it nevertheless has two for one while it is marked
MARKS = re.compile(f"{MARK}{MARK}?")


class Forgery:
    """Marks what spells one of some special tokens, or begins to at its end."""

    def __init__(self, specials: Iterable[str]) -> None:
        texts = sorted(specials, key=len, reverse=True)
        self._spelling = re.compile("|".join(map(re.escape, texts))) if texts else None
        self._beginnings = {text[:length] for text in texts for length in range(1, len(text))}
        self._longest = max(map(len, self._beginnings), default=0)

    def mark(self, value: Any) -> Any:
        """Return a JSON value with marks in its texts."""
        if self._spelling is None:
            return value
        if isinstance(value, str):
            return self._marked(value, self._spelling)
        if isinstance(value, dict):
            return {self.mark(name): self.mark(each) for name, each in value.items()}
        return [self.mark(each) for each in value] if isinstance(value, (list, tuple)) else value

    def unmark(self, text: str) -> tuple[str, list[int]]:
        """Return a text without marks, and the places between its characters where they were."""
        if self._spelling is None or MARK not in text:
            return text, []
        places: list[int] = []
        pieces, length, start = [], 0, 0
        for found in MARKS.finditer(text):
            pieces.append(text[start : found.start()] + found[0][1:])
            length, start = length + len(pieces[-1]), found.end()
            if len(found[0]) == 1:
                places.append(length)
        return "".join([*pieces, text[start:]]), places

    def _marked(self, text: str, spelling: re.Pattern[str]) -> str:
        text = text.replace(MARK, 2 * MARK)
        pieces, start, found = [], 0, spelling.search(text)
        while found is not None:  # spellings may overlap
            inside = found.start() + 1
            pieces.append(text[start:inside])
            start, found = inside, spelling.search(text, inside)
        longest = min(self._longest, len(text))
        is_beginning = any(text[-length:] in self._beginnings for length in range(1, longest + 1))
        return MARK.join([*pieces, text[start:], *([""] if is_beginning else [])])
