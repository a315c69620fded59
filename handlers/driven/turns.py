"""The turns of sequences that wait for an engine which may not mix all of them in a batch."""

from bisect import insort
from collections.abc import Iterator
from typing import Generic

from handlers.base.token_sequence import AnySequence, TokenSequence


class Turns(Generic[AnySequence]):
    """The waiting sequences: express ones first, then by priority and age. The first is given out
    once it may run.

    A batch has at most `max_batch` sequences that are not express. Some engines compute wrong rows
    for the base model in a batch that also uses an adapter: where adapters take turns, the two are
    never in one.
    """

    def __init__(self, max_batch: float, *, adapters_take_turns: bool) -> None:
        self.waiting: list[AnySequence] = []
        self._max_batch = max_batch
        self._adapters_take_turns = adapters_take_turns

    def add(self, sequence: AnySequence) -> None:
        """Put a sequence among those that wait."""
        insort(self.waiting, sequence, key=_precedence)

    def take(self, running: dict[str, AnySequence]) -> Iterator[AnySequence]:
        """Yield the next sequences. The caller adds each to `running`, or fails it, before it asks
        for the next.
        """
        while self.waiting and self._may_run(self.waiting[0], running):
            yield self.waiting.pop(0)

    def _may_run(self, sequence: AnySequence, running: dict[str, AnySequence]) -> bool:
        if not running:
            return True

        batch = running.values()
        if not sequence.request.is_express:
            num_in_batch = sum(not member.request.is_express for member in batch)
            if num_in_batch >= self._max_batch:
                return False

        if not self._adapters_take_turns:
            return True

        first = next(iter(batch))
        return _has_adapter(first) == _has_adapter(sequence)


def _precedence(sequence: TokenSequence) -> tuple[int, float]:
    """What waiting sequences are sorted by, the least first."""
    request = sequence.request
    return (-request.is_express, -request.priority)


def _has_adapter(sequence: TokenSequence) -> bool:
    return sequence.request.lora_config is not None
