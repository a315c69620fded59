"""Which tokens have written which part of a response, for the log-probs of its texts.

Tokens and parts do not end together: a token may end one part and begin the next, and between parts
stand marks that no part shows, as `</think>`.
"""

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from lmi.types import Token


class _Piece(Struct):
    """A token, or what is left of it behind a part."""

    text: str
    # The fields that tell its log-prob. None once a text has told it.
    log_prob: dict[str, Any] | None


class TextLogProbs:
    """The tokens of a response that belong to none of its parts so far.

    The stream of a response adds tokens as they come. Then it takes the text of each part, or
    forgets what is no text, in the order of the answer.
    """

    def __init__(self) -> None:
        self._pieces: list[_Piece] = []

    def add(self, tokens: Sequence[Token], log_probs: Sequence[dict[str, Any]]) -> None:
        """Add the tokens that have come, each with its fields of log-probs."""
        for token, log_prob in zip(tokens, log_probs, strict=True):
            self._pieces.append(_Piece(token.text, log_prob))

    def take(self, num_chars: int, num_behind: int) -> list[dict[str, Any]]:
        """Return the log-probs of the tokens that wrote the next text, in order. Each is told once.

        The text has `num_chars` characters. `num_behind` characters have come since its end. The
        text, and what came before it, are forgotten.
        """
        end = self._end(num_behind)
        begin = end - num_chars
        log_probs: list[dict[str, Any]] = []
        piece_end = 0
        for piece in self._pieces:
            piece_begin = piece_end
            piece_end += len(piece.text)

            # One without characters belongs to the text if it stands at its begin or in it.
            is_inside = piece_begin < end and (piece_end > begin or piece_begin >= begin)
            if is_inside and piece.log_prob is not None:
                log_probs.append(piece.log_prob)
                piece.log_prob = None

        self.forget(num_behind)
        return log_probs

    def forget(self, num_behind: int) -> None:
        """Forget what has come, but for the last `num_behind` characters: it is part of no text."""
        end = self._end(num_behind)
        left: list[_Piece] = []
        piece_end = 0
        for piece in self._pieces:
            piece_begin = piece_end
            piece_end += len(piece.text)
            if piece_begin >= end:
                left.append(piece)
            elif piece_end > end:
                piece.text = piece.text[end - piece_begin :]
                left.append(piece)

        self._pieces = left

    def take_ends(self) -> list[dict[str, Any]]:
        """Return the log-probs of the tokens without a text behind the last part: those that end
        the answer.
        """
        log_probs = []
        for piece in self._pieces:
            if not piece.text and piece.log_prob is not None:
                log_probs.append(piece.log_prob)

        return log_probs

    def _end(self, num_behind: int) -> int:
        """Return where the part ends that is asked for: `num_behind` characters came after it."""
        return sum(len(piece.text) for piece in self._pieces) - num_behind
