"""Stop strings in streamed text.

The text is read by characters, so the cuts between its pieces make no difference. The stop string that is complete
first ends the answer; if two end at the same character, the longer one does. Only text that may still become a stop
string is held back: the longest end of the text that is the beginning of one.

Source of the search, which takes one pass: Knuth, Morris and Pratt, 1977.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from lmi.errors import InvalidParameter


class StopStrings:
    """`feed` returns the text to pass on. `matched` is the stop string that was found, after which no text follows."""

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
        """Return the text that cannot be part of a stop string any more, or all text before a complete one."""
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
        """Return the text that was held back and did not become a stop string."""
        text, self._held = self._held, ""
        return text

    def _find_end(self, text: str) -> int:
        """Return the end of the first stop string in `text`, or the length of `text` if there is none."""
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
    """Return for each beginning of `stop` the length of its longest proper end that is also a beginning of `stop`."""
    lengths = [0] * len(stop)
    length = 0
    for n in range(1, len(stop)):
        while length and stop[length] != stop[n]:
            length = lengths[length - 1]
        length += stop[length] == stop[n]
        lengths[n] = length
    return lengths
