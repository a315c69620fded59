"""Marks in streamed text: where a mark is, and how much of a text's end may be the beginning of one."""

from __future__ import annotations


def cut(text: str, mark: str) -> tuple[str, bool, str]:
    """Return the text before the mark, whether the mark was found, and the rest.

    The rest is the text after the mark. Without a mark it is the end of the text that may be the beginning of one.
    """
    before, found, behind = text.partition(mark)
    if found:
        return before, True, behind
    num_held = next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)
    return text[: len(text) - num_held], False, text[len(text) - num_held :]
