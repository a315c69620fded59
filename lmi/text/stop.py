"""Stop strings in running text.

Reads character by character, so where the text is cut makes no difference: the stop string that is complete first ends
the answer, and of two that end at the same character the longer one. Held back is only text that may still
become a stop string: the longest end of the text that is the beginning of one. Knows no tokens.

Source of the search: Knuth, Morris and Pratt, 1977; one pass whatever the strings are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from lmi.errors import InvalidParameter


class StopStrings:
    """`feed` text and pass on what comes back. `matched`: the stop string that was found; nothing comes after it."""

    __slots__ = ("_first_char", "_held", "_is_included", "_patterns", "_states", "matched")

    def __init__(self, stops: Sequence[str], include_stop_str_in_output: bool = False) -> None:
        if not all(stops):
            raise InvalidParameter("stop_sequences", "strings that are not empty", "")
        longest_first = sorted(set(stops), key=len, reverse=True)
        self._patterns = [(stop, _fallbacks(stop)) for stop in longest_first]
        self._states = [0] * len(self._patterns)  # characters of each stop string that the text ends in
        self._first_char = (
            re.compile("[" + "".join(re.escape(stop[0]) for stop in longest_first) + "]") if stops else None
        )
        self._held = ""
        self._is_included = include_stop_str_in_output
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """The text that can no longer be part of a stop string; all before it once one is complete."""
        if self._first_char is None:
            return text
        if self.matched is not None:
            return ""
        if not self._held and self._first_char.search(text) is None:
            return text
        end = self._find_end(text)
        text = self._held + text
        if self.matched is not None:
            end += len(self._held)
            self._held = ""
            return text[: end if self._is_included else end - len(self.matched)]
        num_released = len(text) - max(self._states)
        self._held = text[num_released:]
        return text[:num_released]

    def flush(self) -> str:
        """The text held back, which is no stop string after all."""
        text, self._held = self._held, ""
        return text

    def _find_end(self, text: str) -> int:
        """Read `text` up to the end of the first stop string, whose position in `text` it returns; else its length."""
        for position, char in enumerate(text):
            for n, (stop, fallbacks) in enumerate(self._patterns):
                state = self._states[n]
                while state and stop[state] != char:
                    state = fallbacks[state - 1]
                if stop[state] == char:
                    state += 1
                    if state == len(stop):
                        self.matched = stop
                        return position + 1
                self._states[n] = state
        return len(text)


def _fallbacks(stop: str) -> list[int]:
    """For each beginning of `stop`: the length of its longest proper end that is a beginning too."""
    lengths = [0] * len(stop)
    length = 0
    for n in range(1, len(stop)):
        while length and stop[length] != stop[n]:
            length = lengths[length - 1]
        length += stop[length] == stop[n]
        lengths[n] = length
    return lengths
