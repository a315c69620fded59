"""A sequence of the embedded engine, and the rows of its beam search if it has one.

A sequence with a search gets a slot for each of its beams when it is admitted. Its prompt is
computed in the first slot. From then on each running beam is a row of the step: a sequence with one
slot, of which the executor does not know. When a beam has several successors, the first one keeps
its slot, and the others get copies of it in free slots.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from copy import copy
from dataclasses import dataclass
from typing import NamedTuple

from handlers.base.beams import Continuation
from handlers.base.sequence import Sequence
from handlers.lmi_dist.arrays import Array
from handlers.lmi_dist.drafts import Drafter
from handlers.lmi_dist.guide import Guide
from handlers.lmi_dist.kv_cache import KvCache
from handlers.lmi_dist.sampler_state import SamplerState
from lmi.executor import ErrorKind


@dataclass(slots=True, eq=False)
class EmbeddedSequence(Sequence):
    """A sequence that the scheduler runs, or a row: one running beam of such a sequence."""

    # The number by which the runner knows the request's adapter.
    adapter: int = 0
    sampler_state: SamplerState | None = None
    drafter: Drafter | None = None
    # Says which tokens may come next.
    guide: Guide | None = None
    # The rows of the search, for the sequence that has it, once it runs, and for each of its rows.
    beam_state: BeamRows | None = None
    # Whether the blocks of its prompt that lay on disk are in the cache.
    is_restored: bool = False
    # The embedding of the prompt as far as it is computed, if the request wants one.
    pooled: Array | None = None

    @property
    def width(self) -> int:
        """How many beams it may run, 1 without a search."""
        return 1 if self.search is None else self.search.beam_width

    @property
    def beam_rows(self) -> list[EmbeddedSequence]:
        """The rows of the step that decode for it: itself, or one for each of its beams."""
        return [self] if self.beam_state is None else self.beam_state.running

    @property
    def owner(self) -> EmbeddedSequence:
        """The sequence that the executor knows: itself, or the one whose beam a row is."""
        return self if self.beam_state is None else self.beam_state.head

    @property
    def slots(self) -> list[int]:
        """Its slot, or those of all its beams."""
        assert self.slot is not None
        return [self.slot] if self.beam_state is None else self.beam_state.slots

    @property
    def must_end(self) -> bool:
        """Whether its guide allows only end ids now. They may then come before `min_tokens` too."""
        return self.guide is not None and self.guide.must_end

    @property
    def can_reuse(self) -> bool:
        """Whether it may take keys and values of its prompt from the cache.

        It may not if something of each position of the prompt is wanted, or was captured before,
        because a hit would leave a gap.
        """
        if self.lacks_prompt_log_probs or self.is_pooled_whole:
            return False

        is_prompt = self.num_generated == 0
        has_captured = self.captured is not None and self.captured.has_begun
        return not (is_prompt and has_captured)

    def check_room(self, cache: KvCache) -> None:
        """Fail a search that could not even begin, because its beams have no room in the cache.

        They share the full blocks of the prompt, and each needs the rest for itself.
        """
        if self.search is None:
            return

        num_shared = 0
        if cache.shares_blocks:
            num_shared = self.num_prompt_tokens // cache.tokens_per_block

        num_own = cache.num_blocks_for(self.num_prompt_tokens + 1) - num_shared
        if num_shared + self.width * num_own > cache.num_blocks:
            self.fail_for_room(cache, "for this prompt")

    def fail_for_room(self, cache: KvCache, when: str) -> None:
        """Fail a search that needs more than the whole cache. `when` is the end of the message."""
        num_tokens = cache.num_blocks * cache.tokens_per_block
        message = f"of {self.width} needs more than the KV cache of {num_tokens} tokens {when}"
        self.fail(message, ErrorKind.INVALID, "beam_width")


class Fork(NamedTuple):
    """A copy of the first tokens of a slot to another, which is made before the next step."""

    from_slot: int
    to_slot: int
    num_tokens: int


class BeamRows:
    """The rows of `head`, a sequence with a search."""

    def __init__(self, head: EmbeddedSequence, slots: list[int]) -> None:
        """`slots` has one for each beam that may run. The first has the prompt."""
        self.head = head
        self.slots = slots
        # A row for each running beam of the search, in its order. While the prompt is computed, it
        # is `head` alone.
        self.running = [head]
        self.forks: list[Fork] = []

    def advance(self, steps: SequenceOf[Continuation]) -> None:
        """Replace the rows by those of the beams that the search runs next.

        The first beam that continues a row gets its slot, the others a free one.
        """
        continued_slots = {self.running[step.parent].slot for step in steps}
        free_slots = iter([slot for slot in self.slots if slot not in continued_slots])
        running: list[EmbeddedSequence] = []
        continued: set[int] = set()
        for step in steps:
            row = self.running[step.parent]
            if step.parent in continued:
                row = self._fork(row, next(free_slots))
            elif row is self.head:
                row = _copy(row)

            row.token_ids.append(step.token_id)
            running.append(row)
            continued.add(step.parent)

        self.running = running

    def _fork(self, row: EmbeddedSequence, slot: int) -> EmbeddedSequence:
        """Return a row with the same tokens in another slot."""
        assert row.slot is not None
        self.forks.append(Fork(row.slot, slot, row.num_computed))
        forked = _copy(row)
        forked.slot = slot
        if row.sampler_state is not None:
            forked.sampler_state = row.sampler_state.fork()

        return forked


def _copy(row: EmbeddedSequence) -> EmbeddedSequence:
    """Return a copy of a row with its computed tokens only: `head` already has the next token of
    its best beam, which need not be this row's.
    """
    copied = copy(row)
    copied.search = None
    copied.token_ids = row.token_ids[: row.num_computed]
    return copied
