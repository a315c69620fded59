"""Which sequences run in the next step, and which of their tokens. Plain Python: ints and lists, no tensors.

A step holds one token of every decoding sequence, drafts of further ones where they pay, and chunks of prompts as far
as the pace allows. A prompt may be cut anywhere. Sequences rank by priority, then by age. The first in rank is admitted
first; the last in rank is preempted first.

With prefix reuse a sequence takes from the cache what it can, at most up to the last token before its prompt's end, and
waits as long as a sequence before it in rank computes more of what both need.

The prompt of a request is computed once for those of its sequences that find room together. The first leads. The
others hold a slot and follow, and get a copy in the step that completes the prompt. A sequence that finds no room by
then, or is preempted after its first token, computes its tokens itself.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from operator import attrgetter
from typing import cast

from handlers.base.sequence import Sequence
from handlers.lmi_dist.kv_cache import KvCache
from handlers.lmi_dist.ngram import Drafter, num_worth
from handlers.lmi_dist.pace import Pace
from handlers.lmi_dist.plan import Chunk, Plan
from handlers.lmi_dist.prefix_tree import Match, Root

MIN_AWAITED_TOKENS = 16  # a step of one row takes about as long as that many rows more
MIN_COPIED_TOKENS = 4  # fewer are computed as fast as their block is copied


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
    num_reused_tokens: int = 0


class Scheduler:
    """The scheduler owns the lists of `waiting` and `running` sequences, both sorted by rank."""

    def __init__(self, cache: KvCache, pace: Pace, *, drafts: bool = False) -> None:
        """`drafts`: whether decodes may have drafts. The model must then be invariant, or answers would change."""
        self.cache = cache
        self.pace = pace
        self.drafts = drafts
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._num_reused_tokens = 0  # since the last batch

    def add(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=_rank)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, waiting or running. Its blocks and its slot are free at once.

        What it has computed stays in the cache until its blocks are needed, except after an error.
        """
        if sequence.slot is None:
            self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        if sequence.error is None:
            self._store(sequence)
        else:
            self.cache.forget(sequence.slot)
        self.cache.free(sequence.slot)
        sequence.slot = None

    def schedule(self) -> Batch:
        """Schedule decodes, then running prompts, then new prompts as long as budget, slots and blocks allow."""
        num_preemptions = self._make_room()
        decoding = [sequence for sequence in self.running if sequence.num_computed >= sequence.num_prefill]
        decoding.sort(key=attrgetter("slot"))
        decodes = [self._decode(sequence) for sequence in decoding]
        if self.drafts:
            self._add_drafts(decodes, decoding)
        num_prompts = len(self.running) - len(decodes) + len(self.waiting)
        prefills = list(self._prefills(sum(len(chunk.token_ids) for chunk in decodes), num_prompts))
        ended = [sequence for sequence, chunk in prefills if chunk.end == sequence.num_prefill]
        followers = {sequence: _followers(sequence) for sequence in ended}
        plan = Plan(decodes, [chunk for _, chunk in prefills], self.cache.copies)
        num_reused_tokens, self._num_reused_tokens = self._num_reused_tokens, 0
        sequences = decoding + [sequence for sequence, _ in prefills]
        return Batch(plan, sequences, followers, num_preemptions, num_reused_tokens)

    def commit(self, batch: Batch) -> None:
        """Note that the step of a batch is done: what it has written may be reused and shared."""
        self.cache.end_copies()
        size, num_decodes = self.cache.tokens_per_block, len(batch.plan.decodes)
        for chunk, sequence in zip(batch.plan.decodes, batch.sequences, strict=False):
            if sequence.num_computed // size > chunk.start // size and sequence.error is None:
                self._store(sequence)
        for sequence in batch.sequences[num_decodes:]:
            if sequence.error is None:
                self._store(sequence)
        for leader, followers in batch.followers.items():
            if leader.error is None:
                self._fork(leader, followers)

    def _fork(self, leader: Sequence, followers: list[Sequence]) -> None:
        slots = [one.slot for one in followers if one.slot is not None]
        if self.cache.shares_blocks and leader.slot is not None:
            self.cache.fork(leader.slot, slots, leader.num_prefill)
        for one in followers:
            one.count_cached(leader.num_cached_tokens)

    def _store(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        num_tokens = min(sequence.num_computed, sequence.num_tokens)  # a cancelled sequence drops tokens
        self.cache.store(sequence.slot, _root(sequence), sequence.token_ids, num_tokens)

    def _make_room(self) -> int:
        """Give each decoding sequence room for its next token. If blocks run out, preempt the last in rank.

        Returns the number of preemptions.
        """
        num_before, size = len(self.running), self.cache.tokens_per_block
        for sequence in self.running[:]:
            if sequence.slot is None:
                break  # this one and all after it were preempted
            if sequence.num_computed < sequence.num_prefill:
                continue  # its whole prompt was promised room when it was admitted
            if len(sequence.token_ids) > len(self.cache.table(sequence.slot)) * size:
                self._grow(sequence)
        return num_before - len(self.running)

    def _grow(self, sequence: Sequence) -> None:
        while sequence.slot is not None and not self.cache.grow(sequence.slot, sequence.num_tokens):
            self._preempt(self.running[-1])  # perhaps itself; all sequences before it have their blocks

    def _preempt(self, sequence: Sequence) -> None:
        self.remove(sequence)
        sequence.restart()
        self.add(sequence)  # its age puts it before all sequences that came later

    def _decode(self, sequence: Sequence) -> Chunk:
        slot = sequence.slot
        assert slot is not None
        return Chunk(slot, sequence.num_computed, sequence.token_ids[-1:], 1, self.cache.table(slot))

    def _add_drafts(self, decodes: list[Chunk], decoding: list[Sequence]) -> None:
        """Add the drafts that are worth their rows. A draft fits in the blocks that its sequence has."""
        found: list[tuple[Drafter, list[int], Chunk]] = []
        for chunk, sequence in zip(decodes, decoding, strict=True):
            drafter = drafter_of(sequence)
            draft = drafter.draft(sequence.token_ids)
            if draft and (room := self._room(sequence)):
                found.append((drafter, draft[:room], chunk))
        found.sort(key=lambda one: -one[0].share)
        num_added = num_worth([(drafter, draft) for drafter, draft, _ in found], len(decodes), self.pace)
        for _, draft, chunk in found[:num_added]:
            chunk.token_ids = chunk.token_ids + draft
            chunk.num_logits += len(draft)
        for drafter, _, _ in found[num_added:]:
            drafter.rest()

    def _room(self, sequence: Sequence) -> int:
        """The most tokens of a draft, behind which one more is drawn."""
        assert sequence.slot is not None
        num_free = len(self.cache.table(sequence.slot)) * self.cache.tokens_per_block - sequence.num_tokens
        return min(num_free, sequence.max_tokens - sequence.num_generated - 1)

    def _prefills(self, num_decode_tokens: int, num_prompts: int) -> Iterator[tuple[Sequence, Chunk]]:
        """Yield prompt chunks in rank order. The first that has tokens to compute waits for nobody."""
        budget = self.pace.num_prompt_tokens(num_decode_tokens, num_prompts)
        leaders: list[Sequence] = []
        for sequence, match in self._prefilling():
            self._share(sequence, match)
            if self._waits(sequence, leaders):
                continue
            chunk = self._next_chunk(sequence, match, budget)
            yield sequence, chunk
            leaders.append(sequence)
            budget -= len(chunk.token_ids)
            if budget <= 0:
                return

    def _prefilling(self) -> Iterator[tuple[Sequence, Match]]:
        """Yield running sequences with prompt tokens to compute, then waiting ones, and what the cache has of each.

        A waiting sequence is admitted as it is yielded. Followers are admitted with their leader, because they use none
        of the budget.
        """
        self._admit_followers()
        for sequence in [one for one in self.running if one.is_prefilling and not _follows(one)]:
            yield sequence, self._match(sequence)
        while self.waiting and self.cache.has_free_slot and not _follows(self.waiting[0]):
            match = self._match(self.waiting[0])
            if not self._admit(self.waiting[0], match.blocks):
                return
            sequence = self.waiting.pop(0)
            self._admit_followers()
            yield sequence, match

    def _admit_followers(self) -> None:
        while self.waiting and _follows(self.waiting[0]):
            num_later = self.waiting[0].num_prefill // self.cache.tokens_per_block if self.cache.shares_blocks else 0
            if not self._admit(self.waiting[0], num_later=num_later):
                return
            self.waiting.pop(0)

    def _admit(self, sequence: Sequence, shared: SequenceOf[int] = (), *, num_later: int = 0) -> bool:
        """Give a slot to a sequence and promise it blocks, if there is room.

        One block is kept for each running sequence, else a preemption would soon follow.
        """
        num_tokens, num_kept = sequence.num_prefill, len(self.running)
        if not self.cache.can_allocate(num_tokens, shared, num_later=num_later, num_kept=num_kept):
            return False
        sequence.slot = self.cache.allocate(num_tokens, shared, num_later=num_later)
        self._reuse(sequence, len(shared) * self.cache.tokens_per_block)
        insort(self.running, sequence, key=_rank)
        return True

    def _waits(self, sequence: Sequence, leaders: list[Sequence]) -> bool:
        """Whether one of the leaders computes what a sequence needs and can reuse."""
        if sequence.lacks_prompt_log_probs or not self.cache.reuses_prefixes:
            return False
        return any(_computes_for(leader, sequence) for leader in leaders)

    def _next_chunk(self, sequence: Sequence, match: Match, budget: int) -> Chunk:
        slot = sequence.slot
        assert slot is not None
        self._copy(sequence, slot, match)
        start = sequence.num_computed
        end = min(start + budget, sequence.num_prefill)
        self.cache.cover(slot, end)
        num_logits = end - start if sequence.lacks_prompt_log_probs else int(end == sequence.num_prefill)
        return Chunk(slot, start, sequence.token_ids[start:end], num_logits, self.cache.table(slot))

    def _match(self, sequence: Sequence) -> Match:
        """What the cache has of a prompt. Its last token is always computed, and all for prompt log-probs."""
        if sequence.lacks_prompt_log_probs:
            return Match([])
        return self.cache.find(_root(sequence), sequence.token_ids, sequence.num_prefill - 1)

    def _share(self, sequence: Sequence, match: Match) -> None:
        num_tokens = len(match.blocks) * self.cache.tokens_per_block
        if sequence.slot is not None and num_tokens > sequence.num_computed:
            self.cache.share(sequence.slot, match.blocks)
            self._reuse(sequence, num_tokens)

    def _copy(self, sequence: Sequence, slot: int, match: Match) -> None:
        num_tokens = len(match.blocks) * self.cache.tokens_per_block + match.num_partial
        if num_tokens - sequence.num_computed >= MIN_COPIED_TOKENS and self.cache.can_copy(match.partial_block):
            self.cache.copy(slot, match.partial_block, len(match.blocks))
            self._reuse(sequence, num_tokens)

    def _reuse(self, sequence: Sequence, num_tokens: int) -> None:
        """Note that the first `num_tokens` of a sequence need not be computed."""
        self._num_reused_tokens += num_tokens - sequence.num_computed
        sequence.reuse(num_tokens)


def drafter_of(sequence: Sequence) -> Drafter:
    if sequence.drafter is None:
        sequence.drafter = Drafter()
    return cast(Drafter, sequence.drafter)


def _rank(sequence: Sequence) -> tuple[float, int, int]:
    return (-sequence.request.priority, sequence.id, sequence.index)


def _root(sequence: Sequence) -> Root:
    return Root(sequence.request.cache_salt)


def _computes_for(leader: Sequence, sequence: Sequence) -> bool:
    """Whether a leader is about to compute more tokens that the sequence needs than are soon computed twice."""
    start = leader.num_computed
    end = start + MIN_AWAITED_TOKENS
    return (
        start >= sequence.num_computed
        and end <= leader.num_prefill
        and sequence.token_ids[start:end] == leader.token_ids[start:end]
        and sequence.token_ids[:start] == leader.token_ids[:start]
        and _root(sequence) == _root(leader)
    )


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
