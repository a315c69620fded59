"""Marks in running text: where one stands, and how much of a text's end may be the beginning of one. Pure."""

from __future__ import annotations


def cut(text: str, mark: str) -> tuple[str, bool, str]:
    """Text before the mark, whether it is there, and what is left: behind the mark, or held back for the next piece."""
    before, found, behind = text.partition(mark)
    if found:
        return before, True, behind
    num_held = next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)
    return text[: len(text) - num_held], False, text[len(text) - num_held :]
