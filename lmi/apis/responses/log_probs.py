"""Which tokens have written which part of an answer, for the log-probs of its texts.

Between the parts stand marks that no part shows, as `</think>`, and a token may end one part and
begin the next.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from lmi.types import Token


class _Piece(NamedTuple):
    # The text of a token, less what parts so far have shown.
    text: str
    # None once a text has told it.
    log_prob: dict[str, Any] | None


class TextLogProbs:
    """Takes the tokens of an answer as they come, and gives each text the log-probs of those that
    wrote it.
    """

    def __init__(self) -> None:
        self._pieces: list[_Piece] = []

    def add(self, tokens: Sequence[Token], log_probs: Sequence[dict[str, Any]]) -> None:
        """Add the tokens that have come, each with its fields of log-probs."""
        for token, log_prob in zip(tokens, log_probs, strict=True):
            self._pieces.append(_Piece(token.text, log_prob))

    def take(self, num_chars: int, num_behind: int) -> list[dict[str, Any]]:
        """Return the log-probs of the tokens that wrote the next text, in order. Each is told once.

        The text has `num_chars` characters, and so many have come behind it as `num_behind` says.
        What stands before it is forgotten.
        """
        end = self._end(num_behind)
        begin = end - num_chars
        log_probs: list[dict[str, Any]] = []
        place = 0
        for number, piece in enumerate(self._pieces):
            first = place
            place += len(piece.text)

            is_inside = first < end and (place > begin or first >= begin)
            if is_inside and piece.log_prob is not None:
                log_probs.append(piece.log_prob)
                self._pieces[number] = _Piece(piece.text, None)

        self.forget(num_behind)
        return log_probs

    def forget(self, num_behind: int) -> None:
        """Forget what has come, but for so many characters: it is part of no text."""
        end = self._end(num_behind)
        later_pieces: list[_Piece] = []
        place = 0
        for piece in self._pieces:
            first = place
            place += len(piece.text)
            if first >= end:
                later_pieces.append(piece)
            elif place > end:
                later_pieces.append(_Piece(piece.text[end - first :], piece.log_prob))

        self._pieces = later_pieces

    def _end(self, num_behind: int) -> int:
        return sum(len(piece.text) for piece in self._pieces) - num_behind

    def rest(self) -> list[dict[str, Any]]:
        """Return the log-probs of tokens without a text behind the last part: those that end an
        answer.
        """
        log_probs = []
        for piece in self._pieces:
            if not piece.text and piece.log_prob is not None:
                log_probs.append(piece.log_prob)

        return log_probs
