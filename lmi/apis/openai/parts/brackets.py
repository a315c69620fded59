"""Counts brackets in a text that comes in pieces."""


class Brackets:
    """Counts how deep a text stands in brackets, of which those inside of quotes do not count."""

    def __init__(self, opening: str, closing: str, quotes: str, depth: int = 0) -> None:
        self._opening = opening
        self._closing = closing
        self._quotes = quotes
        self.depth = depth
        # The quote that is open.
        self.quote = ""
        self._is_escaped = False

    def read(self, char: str) -> int:
        """Return the depth behind the next character."""
        if self.quote:
            if char == self.quote and not self._is_escaped:
                self.quote = ""

            self._is_escaped = char == "\\" and not self._is_escaped
        elif char in self._quotes:
            self.quote = char
        else:
            self.depth += (char in self._opening) - (char in self._closing)

        return self.depth


def brackets_of_json() -> Brackets:
    """Return a counter of the brackets of JSON, outside of its strings."""
    return Brackets(opening="{[", closing="}]", quotes='"')
