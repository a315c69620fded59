"""How much is encoded on the event loop itself, before threads encode."""

from asyncio import AbstractEventLoop

# The most characters that are encoded in a turn of the event loop: 0.8 ms with a vocabulary of
# 129k.
MAX_INLINE_CHARS = 4096


class TurnBudget:
    """The characters that the running turn of an event loop may still encode."""

    def __init__(self) -> None:
        self._num_left = MAX_INLINE_CHARS

    def take(self, num_chars: int, loop: AbstractEventLoop) -> bool:
        """Take so many characters. Returns False, and takes none, if fewer are left."""
        if num_chars > self._num_left:
            return False

        # The first who takes some has them given back at the next turn.
        if self._num_left == MAX_INLINE_CHARS:
            loop.call_soon(self._begin_turn)

        self._num_left -= num_chars
        return True

    def _begin_turn(self) -> None:
        self._num_left = MAX_INLINE_CHARS
