"""How much of a long text has more than so many tokens, found without encoding it whole.

To encode a text takes up to 400 bytes of memory for each of its characters, and a body may have
millions of them, far more than the context of a model has room for. So a long text is read in
pieces, each encoded by itself, until it is known to be too long.
"""

from collections.abc import Callable

# A text of at most so many characters is encoded whole.
LONG_CHARS = 64 << 10
PIECE_CHARS = 16 << 10
# So many tokens of a piece do not count: its ends are cut, and so are the words there.
TOKENS_AT_CUTS = 16
# A text is known to have more tokens than so many when its pieces have this many times as many.
MARGIN = 1.25


def chars_with_more_tokens(
    text: str, num_tokens: int, num_tokens_of: Callable[[str], int], *, from_end: bool = False
) -> int | None:
    """Return a number of characters at the beginning of a text, or at its end, that surely have
    more than `num_tokens` tokens.

    Returns None if the whole text may have fewer. `num_tokens_of` encodes a piece.
    """
    num_counted = 0
    for start in range(0, len(text), PIECE_CHARS):
        end = min(start + PIECE_CHARS, len(text))
        piece = text[len(text) - end : len(text) - start] if from_end else text[start:end]
        num_counted += max(0, num_tokens_of(piece) - TOKENS_AT_CUTS)
        if num_counted > MARGIN * num_tokens:
            return end

    return None
