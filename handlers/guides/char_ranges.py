"""Sets of characters, as ranges of their numbers in Unicode."""

# The last character of Unicode.
LAST = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)

# The first and the last character of each, in their order, none of which touch.
Ranges = tuple[tuple[int, int], ...]


def joined(ranges: list[tuple[int, int]]) -> Ranges:
    """Ranges in their order, none of which touch."""
    apart: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if apart and low <= apart[-1][1] + 1:
            last_low, last_high = apart[-1]
            apart[-1] = (last_low, max(last_high, high))
        else:
            apart.append((low, high))

    return tuple(apart)


def negated(ranges: Ranges) -> Ranges:
    """Return all characters that are in none of the ranges, which are sorted and apart."""
    gaps: list[tuple[int, int]] = []
    begin = 0
    for low, high in ranges:
        if begin < low:
            gaps.append((begin, low - 1))

        begin = high + 1

    if begin <= LAST:
        gaps.append((begin, LAST))

    return tuple(gaps)


def without_surrogates(ranges: Ranges) -> Ranges:
    """They are no characters."""
    first, last = SURROGATES
    parts: list[tuple[int, int]] = []
    for low, high in ranges:
        below = (low, min(high, first - 1))
        above = (max(low, last + 1), high)
        parts += [below, above]

    return tuple((low, high) for low, high in parts if low <= high)
