"""Which sequences run in the next step, and which of their tokens. Plain Python: ints and lists, no tensors.

A step holds one token of every decoding sequence and, under a token budget, chunks of prompts. Prompts are always cut
at multiples of the chunk length, so that a prompt's bits never depend on its neighbours. Sequences rank by priority,
then by age. The first in rank is admitted first; the last in rank is preempted first.

The prompt of a request is computed once for those of its sequences that find room together. The first leads. The
others hold a slot and follow, and get a copy in the step that completes the prompt. A sequence that finds no room by
then, or is preempted after its first token, computes its tokens itself.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass

from handlers.base.sequence import Sequence
from handlers.lmi_dist.kv_cache import KvCache
from handlers.lmi_dist.plan import Chunk, Plan

CHUNK_LENGTH = 128


@dataclass(slots=True)
class Batch:
    """The plan of one step and the sequence of each chunk: `sequences` is parallel to `plan.chunks`.

    `followers` maps each sequence whose prompt is complete in this step to those that get a copy of it and draw from
    its logits.
    """

    plan: Plan
    sequences: list[Sequence]
    followers: dict[Sequence, list[Sequence]]
    num_preemptions: int = 0


class Scheduler:
    """The scheduler owns the lists of `waiting` and `running` sequences, both sorted by rank."""

    def __init__(
        self,
        cache: KvCache,
        *,
        max_num_sequences: int,
        max_prefill_tokens: int,
        chunk_length: int = CHUNK_LENGTH,
    ) -> None:
        self.cache = cache
        self.max_num_sequences = max_num_sequences
        self.max_prefill_tokens = max_prefill_tokens
        self.chunk_length = chunk_length
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=_rank)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, waiting or running. Its blocks and its slot are free at once."""
        if sequence.slot is None:
            self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        self.cache.free(sequence.slot)
        sequence.slot = None

    def schedule(self) -> Batch:
        """Schedule decodes, then running prompts, then new prompts as long as budget, slots and blocks allow."""
        num_preemptions = self._make_room()
        decodes = [(sequence, _decode(sequence)) for sequence in self.running if not sequence.is_prefilling]
        decodes.sort(key=lambda pair: pair[1].slot)
        prefills = list(self._prefills())
        plan = Plan([chunk for _, chunk in decodes], [chunk for _, chunk in prefills])
        ended = [sequence for sequence, chunk in prefills if chunk.end == sequence.num_prefill]
        followers = {sequence: _followers(sequence) for sequence in ended}
        return Batch(plan, [sequence for sequence, _ in decodes + prefills], followers, num_preemptions)

    def _make_room(self) -> int:
        """Charge each decoding sequence for its next token. If blocks run out, preempt the last in rank.

        Returns the number of preemptions.
        """
        num_before = len(self.running)
        for sequence in self.running[:]:
            if sequence.is_prefilling:
                continue  # charged for its whole prompt when it was admitted
            while sequence.slot is not None and not self.cache.grow(sequence.slot, sequence.num_tokens):
                self._preempt(self.running[-1])  # perhaps itself; all sequences before it have their blocks
            if sequence.slot is None:
                break  # all sequences after it were preempted before it
        return num_before - len(self.running)

    def _preempt(self, sequence: Sequence) -> None:
        self.remove(sequence)
        sequence.restart()
        self.add(sequence)  # its age puts it before all sequences that came later

    def _prefills(self) -> Iterator[tuple[Sequence, Chunk]]:
        """Yield prompt chunks in rank order. The first is always scheduled, even if it is larger than the budget."""
        budget, is_first = self.max_prefill_tokens, True
        for sequence in self._prefilling():
            start = sequence.num_computed
            while start < sequence.num_prefill:
                chunk = self._next_chunk(sequence, start)
                if len(chunk.token_ids) > budget and not is_first:
                    return
                yield sequence, chunk
                budget, is_first, start = budget - len(chunk.token_ids), False, chunk.end
            if budget <= 0:
                return

    def _prefilling(self) -> Iterator[Sequence]:
        """Yield running sequences with prompt tokens to compute, then waiting ones. Each is admitted as it is yielded.

        Followers are admitted with their leader, because they use none of the budget.
        """
        self._admit_followers()
        yield from [sequence for sequence in self.running if sequence.is_prefilling and not _follows(sequence)]
        while self.waiting and self._can_admit(self.waiting[0]):
            sequence = self._admit_first()
            self._admit_followers()
            yield sequence

    def _admit_followers(self) -> None:
        while self.waiting and _follows(self.waiting[0]) and self._can_admit(self.waiting[0]):
            self._admit_first()

    def _admit_first(self) -> Sequence:
        sequence = self.waiting.pop(0)
        sequence.slot = self.cache.allocate(sequence.num_prefill)
        insort(self.running, sequence, key=_rank)
        return sequence

    def _can_admit(self, sequence: Sequence) -> bool:
        """One block is reserved for each running sequence, else a preemption would soon follow."""
        num_running = len(self.running)
        return num_running < self.max_num_sequences and self.cache.can_allocate(sequence.num_prefill, num_running)

    def _next_chunk(self, sequence: Sequence, start: int) -> Chunk:
        assert sequence.slot is not None
        end = min(start - start % self.chunk_length + self.chunk_length, sequence.num_prefill)
        token_ids = sequence.token_ids[start:end]
        num_logits = int(end == sequence.num_prefill)
        return Chunk(sequence.slot, start, token_ids, len(token_ids) if sequence.lacks_prompt_log_probs else num_logits)


def _rank(sequence: Sequence) -> tuple[float, int, int]:
    return (-sequence.request.priority, sequence.id, sequence.index)


def _follows(sequence: Sequence) -> bool:
    """Whether a sequence needs only the prompt, and an earlier sequence of the request computes it."""
    return sequence.num_generated == 0 and any(map(_is_at_prompt, sequence.group.sequences[: sequence.index]))


def _followers(sequence: Sequence) -> list[Sequence]:
    """The sequences that hold a slot and wait for a copy of this sequence's prompt."""
    if not _is_at_prompt(sequence):
        return []
    return [sibling for sibling in sequence.group.sequences[sequence.index + 1 :] if _is_at_prompt(sibling)]


def _is_at_prompt(sequence: Sequence) -> bool:
    """Whether a sequence runs and has no token yet: it or its leader computes the prompt."""
    return sequence.slot is not None and sequence.num_generated == 0


def _decode(sequence: Sequence) -> Chunk:
    assert sequence.slot is not None
    return Chunk(sequence.slot, sequence.num_computed, sequence.token_ids[-1:])
