"""The rows of a beam search: each running beam is a row of the step, with a slot of its own. Plain Python.

A request with beams is admitted with as many slots as it may have beams. Its prompt is computed in the first of them.
From then on every running beam has a row: a Sequence that the executor does not know, with the beam's tokens and its
slot. When a beam has several successors, the first of them goes on in its slot and the others fork it, into slots of
beams that have none.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from copy import copy
from typing import NamedTuple, Protocol, cast

from handlers.base.beams import Step
from handlers.base.sequence import Sequence
from handlers.lmi_dist.kv_cache import KvCache
from lmi.executor import ErrorKind


class Fork(NamedTuple):
    """A slot takes the first `num_tokens` of another one."""

    from_slot: int
    to_slot: int
    num_tokens: int


class Forkable(Protocol):
    """What a sampler knows of a row."""

    def fork(self) -> object:
        """The same for another row with the same tokens."""


class BeamRows:
    """The rows of `head`, a sequence with a search. `rows` are parallel to the search's running beams.

    While the prompt is computed, `head` is the only row. `forks` are still to be made, before the next step.
    """

    def __init__(self, head: Sequence, slots: list[int]) -> None:
        """`slots`: one for each beam that may run. The first has the prompt."""
        self.head = head
        self.slots = slots
        self.rows = [head]
        self.forks: list[Fork] = []

    def advance(self, steps: SequenceOf[Step]) -> None:
        """Make the rows of what the search runs next. The first beam that continues a row keeps its slot."""
        first = {step.parent: index for index, step in reversed(list(enumerate(steps)))}
        kept_slots = {self.rows[parent].slot for parent in first}
        free = iter([slot for slot in self.slots if slot not in kept_slots])
        forked = {
            index: self._fork(self.rows[step.parent], step.token_id, next(free))
            for index, step in enumerate(steps)
            if index != first[step.parent]
        }
        self.rows = [
            forked[index] if index in forked else self._continue(self.rows[step.parent], step.token_id)
            for index, step in enumerate(steps)
        ]

    def _fork(self, row: Sequence, token_id: int, slot: int) -> Sequence:
        assert row.slot is not None
        self.forks.append(Fork(row.slot, slot, row.num_computed))
        forked = _copy(row)
        forked.slot = slot
        forked.token_ids.append(token_id)
        if row.sampler_state is not None:
            forked.sampler_state = cast(Forkable, row.sampler_state).fork()
        return forked

    def _continue(self, row: Sequence, token_id: int) -> Sequence:
        row = _copy(row) if row is self.head else row
        row.token_ids.append(token_id)
        return row

    def take_forks(self) -> list[Fork]:
        forks, self.forks = self.forks, []
        return forks


def _copy(row: Sequence) -> Sequence:
    """Only tokens that were computed are a row's: `head` knows already what its best beam has next."""
    copied = copy(row)
    copied.search = None
    copied.token_ids = row.token_ids[: row.num_computed]
    return copied


def rows_of(sequence: Sequence) -> list[Sequence]:
    """What decodes for a sequence of the scheduler: itself, or the rows of its beams."""
    return [sequence] if sequence.rows is None else cast(BeamRows, sequence.rows).rows


def beam_rows(sequence: Sequence) -> BeamRows:
    """The rows of a sequence that runs with beams, or that a row belongs to."""
    return cast(BeamRows, sequence.rows)


def owner_of(sequence: Sequence) -> Sequence:
    """The sequence that the executor knows: itself, or that of a row."""
    return sequence if sequence.rows is None else cast(BeamRows, sequence.rows).head


def slots_of(sequence: Sequence) -> list[int]:
    """All slots of a running sequence."""
    assert sequence.slot is not None
    return [sequence.slot] if sequence.rows is None else cast(BeamRows, sequence.rows).slots


def width_of(sequence: Sequence) -> int:
    return 1 if sequence.search is None else sequence.search.beam_width


def check_room(sequence: Sequence, cache: KvCache) -> None:
    """Fail a search that could not even begin: each beam needs one block beside the full blocks of the prompt."""
    if sequence.search is None:
        return
    num_tokens = sequence.num_prompt_tokens
    num_shared = num_tokens // cache.tokens_per_block if cache.shares_blocks else 0
    num_own = cache.num_blocks_for(num_tokens + 1) - num_shared
    if num_shared + width_of(sequence) * num_own > cache.num_blocks:
        fail_for_room(sequence, cache, "for this prompt")


def fail_for_room(sequence: Sequence, cache: KvCache, when: str) -> None:
    num_tokens = cache.num_blocks * cache.tokens_per_block
    message = f"of {width_of(sequence)} needs more than the KV cache of {num_tokens} tokens {when}"
    sequence.fail(message, ErrorKind.INVALID, "beam_width")
