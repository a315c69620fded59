"""Where the tokens of a prompt begin in its text."""

from collections.abc import Sequence

from lmi.types import Token


def offsets_in(prompt: str, tokens: Sequence[Token], *, is_end_cut: bool = False) -> list[int]:
    """Return where each token of a prompt begins in its text.

    The text may lack what the tokenizer has added: a special token, or a space before the first
    word. Such a token has a place, but no characters.

    A prompt that was truncated has lost the tokens at one side of its text. So the search begins at
    the other side: at the end, or at the beginning if the end may be cut.
    """
    if is_end_cut:
        return _offsets_from_the_beginning(prompt, tokens)

    offsets: list[int] = []
    end = len(prompt)
    for token in reversed(tokens):
        if prompt.endswith(token.text, 0, end):
            end -= len(token.text)
        elif token.text.startswith(" ") and prompt.endswith(token.text[1:], 0, end):
            end -= len(token.text) - 1
        elif not token.is_special:
            # The tokenizer has changed the text, as to lower case.
            end = max(0, end - len(token.text))

        offsets.append(end)

    return offsets[::-1]


def _offsets_from_the_beginning(prompt: str, tokens: Sequence[Token]) -> list[int]:
    offsets: list[int] = []
    begin = 0
    for token in tokens:
        offsets.append(begin)
        if prompt.startswith(token.text, begin):
            begin += len(token.text)
        elif token.text.startswith(" ") and prompt.startswith(token.text[1:], begin):
            begin += len(token.text) - 1
        elif not token.is_special:
            begin = min(len(prompt), begin + len(token.text))

    return offsets
