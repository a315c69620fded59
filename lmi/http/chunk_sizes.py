"""The sizes of large chunks, found in the bytes of a body before the parser has read them: it says
that a chunk begins, but not how large it is.
"""

import re
from itertools import islice
from typing import NamedTuple

# A line that may be the one before a chunk of over 1 MB: six or more hexadecimal digits.
SIZE_LINE = rb"(?P<size>[0-9A-Fa-f]{6,32}+)[\r;][^\n]{0,1024}+(?=\n)"
LARGE_CHUNK = re.compile(rb"\n" + SIZE_LINE)
LARGE_CHUNK_AT_START = re.compile(SIZE_LINE)
# Of one read only so many such lines are examined. It has room for few chunks of that size.
MAX_EXAMINED_LINES = 64


class SizeLine(NamedTuple):
    """A line that is the size of a chunk, or a text in the body that looks like one."""

    # Where its last byte is.
    end: int
    size: int


def size_lines(data: bytes, *, begins_in_body: bool) -> list[SizeLine]:
    """Return the lines of `data` that may be sizes of large chunks. One that has come in two pieces
    is missed.
    """
    matches = list(islice(LARGE_CHUNK.finditer(data), MAX_EXAMINED_LINES))
    if begins_in_body:
        first_match = LARGE_CHUNK_AT_START.match(data)
        if first_match is not None:
            matches.insert(0, first_match)

    return [SizeLine(match.end(), int(match["size"], 16)) for match in matches]
