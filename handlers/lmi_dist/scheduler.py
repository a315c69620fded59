"""Which sequences run in the next step, and which of their tokens: decodes with drafts, and chunks
of prompts.

Sequences rank by priority, then by age, express ones before all: the first in rank is admitted
first, the last is preempted first. The prompt of a request is computed once for those of its
sequences that find room together: the first leads, the others hold a slot and follow, and get a
copy in the step that completes the prompt. A sequence that finds no room by then computes its
tokens itself.

Express ones that decode also get short steps without the others (`short_steps.py`).
"""

import time
from bisect import insort
from collections.abc import Callable, Iterator, Sequence as SequenceOf
from contextlib import suppress
from itertools import takewhile
from operator import attrgetter
from typing import NamedTuple

from handlers.lmi_dist.cached_blocks import TOKENS_PER_PART, Match, Root
from handlers.lmi_dist.drafts import Drafter, PossibleDraft, num_worth
from handlers.lmi_dist.idle_blocks import retentions
from handlers.lmi_dist.kv_cache import KvCache
from handlers.lmi_dist.pace import Pace
from handlers.lmi_dist.plan import Chunk, Plan, num_tokens_of
from handlers.lmi_dist.scheduled_batch import Batch
from handlers.lmi_dist.sequence import BeamRows, EmbeddedSequence
from handlers.lmi_dist.short_steps import ShortSteps
from lmi.executor import ErrorKind

# A step of one row takes about as long as that many rows more.
MIN_AWAITED_TOKENS = 16
# Fewer are computed as fast as their block is copied.
MIN_COPIED_TOKENS = 4
# The time that prompts take to come back from disk in a step beside running sequences.
MAX_RESTORE_S = 0.02


class Prefill(NamedTuple):
    """A chunk of a prompt, and whose it is."""

    sequence: EmbeddedSequence
    chunk: Chunk


class Prompt(NamedTuple):
    """A sequence with prompt tokens to compute, and what the cache has of them."""

    sequence: EmbeddedSequence
    match: Match


class _ProposedDraft(NamedTuple):
    """The tokens that a drafter expects behind a decode, whose chunk they may join."""

    drafter: Drafter
    token_ids: list[int]
    chunk: Chunk


class Scheduler:
    """The sequences that wait and those that run, both sorted by rank.

    The executor calls `schedule` before a step and `commit` after it, both on the engine's thread.
    """

    def __init__(
        self,
        cache: KvCache,
        pace: Pace,
        *,
        drafts: bool = False,
        may_run: Callable[[EmbeddedSequence, SequenceOf[EmbeddedSequence]], bool] | None = None,
        num_express: int = 0,
    ) -> None:
        """`drafts`: whether decodes may have drafts. Without an invariant model answers would
        change.

        `may_run`: whether a sequence may run beside others, or fails; nothing overtakes one.
        `num_express`: the slots that only express requests get.
        """
        self.cache = cache
        self.pace = pace
        self.drafts = drafts
        self._may_run = may_run
        self._num_express = num_express

        # Decodes are sorted by this key.
        self._order = attrgetter("slot")
        if may_run is not None and cache.shares_blocks:
            self._order = attrgetter("adapter", "slot")

        self.waiting: list[EmbeddedSequence] = []
        self.running: list[EmbeddedSequence] = []
        self._short_steps = ShortSteps(pace)
        # The tokens that were reused since the last batch.
        self._num_reused_tokens = 0
        # The next batch has to tell of these.
        self._failed: list[EmbeddedSequence] = []

    def add(self, sequence: EmbeddedSequence) -> None:
        """Put a sequence among those that wait, by its rank."""
        insort(self.waiting, sequence, key=_rank)

    def remove(self, sequence: EmbeddedSequence) -> None:
        """Forget a sequence, waiting or running. Its blocks and its slot are free at once.

        What it has computed stays in the cache until its blocks are needed, except after an error.
        """
        if sequence.slot is None:
            # It is not there if a sibling failed before it was added.
            with suppress(ValueError):
                self.waiting.remove(sequence)

            return

        self.running.remove(sequence)
        if sequence.error is None:
            self._keep(sequence)

        for slot in sequence.slots:
            if sequence.error is not None:
                self.cache.forget(slot)

            self.cache.free(slot)

        sequence.slot = None
        sequence.beam_state = None

    def schedule(self) -> Batch:
        """Schedule decodes, then running prompts, then new prompts as long as budget, slots and
        blocks allow.

        A short step has the decodes of express sequences only.
        """
        num_preemptions = self._make_room()

        decoders = [row for row in self.running if row.num_computed >= row.num_prefill]
        # Express ones are the first in rank.
        express = list(takewhile(_is_express, decoders))
        is_short = self._short_steps.begin(len(express), len(decoders))
        if is_short:
            decoders = express

        decoding = self._rows_of(decoders)
        decodes = self._decodes(decoding)
        if self.drafts and self.beam_width == 1:
            self._add_drafts(decodes, decoding)

        prefills: list[Prefill] = []
        num_prompts = len(self.running) - len(decoders) + len(self.waiting)
        if num_prompts and not is_short:
            prefills += self._prefills(num_tokens_of(decodes), num_prompts)

        plan = Plan(decodes, [prefill.chunk for prefill in prefills], self.cache.copies)
        batch = Batch(
            plan,
            sequences=decoding + [prefill.sequence for prefill in prefills],
            rows=_first_rows(plan),
            followers=_followers_of(prefills),
            failed=self._failed,
            num_preemptions=num_preemptions,
            num_reused_tokens=self._num_reused_tokens,
        )
        self._failed = []
        self._num_reused_tokens = 0
        return batch

    def _rows_of(self, decoders: list[EmbeddedSequence]) -> list[EmbeddedSequence]:
        """Return the rows of sequences that decode, or those of their beams, in the order of the
        plan.
        """
        rows = decoders
        if self.beam_width != 1:
            rows = [row for sequence in decoders for row in sequence.beam_rows]

        return sorted(rows, key=self._order)

    def _decodes(self, decoding: list[EmbeddedSequence]) -> list[Chunk]:
        """Return a chunk for the last token of each row."""
        chunks: list[Chunk] = []
        for row in decoding:
            assert row.slot is not None
            chunk = Chunk(
                row.slot,
                start=row.num_computed,
                token_ids=row.token_ids[-1:],
                table=self.cache.table(row.slot),
                adapter=row.adapter,
            )
            chunks.append(chunk)

        return chunks

    @property
    def beam_width(self) -> int | None:
        """The beam width of all sequences that run, or None if none does."""
        return self.running[0].width if self.running else None

    def commit(self, batch: Batch) -> None:
        """Note that the step of a batch is done: what it has written may be reused and shared."""
        self.cache.end_copies()
        self._store_new(batch)
        for leader, followers in batch.followers.items():
            if leader.error is None and leader.slot is not None:
                slots = [follower.slot for follower in followers if follower.slot is not None]
                self.cache.fork(leader.slot, slots, leader.num_prefill)
                for follower in followers:
                    follower.count_cached(leader.num_cached_tokens)

    def _store_new(self, batch: Batch) -> None:
        """Put what a step has computed into the tree: prompts, and decodes that filled a block."""
        size = self.cache.tokens_per_block
        num_decodes = len(batch.plan.decodes)
        pairs = zip(batch.plan.chunks, batch.sequences, strict=True)
        for place, (chunk, sequence) in enumerate(pairs):
            is_prompt = place >= num_decodes
            has_filled = sequence.num_computed // size > chunk.start // size
            if (is_prompt or has_filled) and sequence.error is None:
                self._store(sequence)

    def _store(self, sequence: EmbeddedSequence) -> int | None:
        """Put what is computed into the tree. Returns the tree's block with the end of it."""
        assert sequence.slot is not None
        return self.cache.store(
            sequence.slot, _root(sequence), sequence.token_ids, _num_known(sequence)
        )

    def _keep(self, sequence: EmbeddedSequence) -> None:
        """Leave what a sequence has computed in the cache, for as long as its request says."""
        assert sequence.slot is not None
        config = sequence.request.kv_cache_retention_config
        size = self.cache.tokens_per_block
        has_rows = sequence.search is not None and not sequence.is_prefilling
        # Blocks of rows are in the tree as soon as they are full.
        last_block = None
        slots = sequence.slots
        if not has_rows:
            last_block = self._store(sequence)
            slots = [sequence.slot]

        if config is None:
            return

        for slot in slots:
            num_tokens = _num_known(sequence)
            if has_rows:
                num_tokens = len(self.cache.table(slot)) * size

            retained = retentions(config, sequence.num_prompt_tokens, num_tokens, size)
            self.cache.retain(slot, retained, last_block)

    def _make_room(self) -> int:
        """Give each decoding sequence room for its next token, or preempt the last in rank.

        Returns how many were.
        """
        num_before = len(self.running)
        size = self.cache.tokens_per_block
        # Memory was promised that is gone.
        while self.running and self.cache.num_free_blocks < 0:
            self._preempt(self.running[-1])

        for sequence in self.running[:]:
            if sequence.slot is None:
                # This sequence and all after it were preempted.
                break

            if sequence.num_computed < sequence.num_prefill:
                # Its whole prompt was promised room when it was admitted.
                continue

            if sequence.beam_state is not None:
                self._make_beam_room(sequence)
            elif len(sequence.token_ids) > len(self.cache.table(sequence.slot)) * size:
                self._grow(sequence)

        return num_before - len(self.running) - len(self._failed)

    def _make_beam_room(self, sequence: EmbeddedSequence) -> None:
        """Fork the beams of a search as its last step has said, and give each room for its next
        token.
        """
        beam_state = sequence.beam_state
        assert beam_state is not None
        forks = beam_state.forks
        beam_state.forks = []
        for fork in forks:
            self.cache.adopt(*fork)

        for row in sequence.beam_rows:
            self._grow(row)
            if sequence.slot is None:
                # It was preempted, or it failed.
                return

        for fork in forks:
            self.cache.adopt_rest(*fork)

    def _grow(self, sequence: EmbeddedSequence) -> None:
        """Give a sequence, or a row of a search, room for all its tokens, or preempt the last in
        rank.

        A search that needs more than the whole cache fails.
        """
        slot = sequence.slot
        owner = sequence.owner
        assert slot is not None

        while owner.slot is not None and not self.cache.grow(slot, sequence.num_tokens):
            if self.running == [owner] and owner.search is not None:
                owner.fail_for_room(self.cache, f"after {owner.num_generated} tokens of each beam")
                self.remove(owner)
                self._failed.append(owner)
            else:
                # It may preempt itself. All sequences before it have their blocks.
                self._preempt(self.running[-1])

    def _preempt(self, sequence: EmbeddedSequence) -> None:
        """Take a running sequence's blocks, and let it wait to compute its tokens again."""
        self.remove(sequence)
        sequence.restart()
        sequence.is_restored = False
        # Its age puts it before all sequences that came later.
        self.add(sequence)

    def _add_drafts(self, decodes: list[Chunk], decoding: list[EmbeddedSequence]) -> None:
        """Add the drafts that are worth their rows.

        A draft fits in the blocks that its sequence has.
        """
        drafts: list[_ProposedDraft] = []
        for chunk, sequence in zip(decodes, decoding, strict=True):
            drafter = sequence.drafter = sequence.drafter or Drafter()
            # One more token is drawn behind a draft.
            num_free = len(chunk.table) * self.cache.tokens_per_block - sequence.num_tokens
            room = min(num_free, sequence.max_tokens - sequence.num_generated - 1)
            token_ids = drafter.draft(sequence.token_ids)
            if token_ids and room:
                drafts.append(_ProposedDraft(drafter, token_ids[:room], chunk))

        drafts.sort(key=lambda draft: -draft.drafter.share)
        best_first = [PossibleDraft(draft.drafter, draft.token_ids) for draft in drafts]
        num_added = num_worth(best_first, len(decodes), self.pace)
        for draft in drafts[:num_added]:
            draft.chunk.token_ids = draft.chunk.token_ids + draft.token_ids
            draft.chunk.num_logits += len(draft.token_ids)

        for draft in drafts[num_added:]:
            draft.drafter.rest()

    def _prefills(self, num_decode_tokens: int, num_prompts: int) -> Iterator[Prefill]:
        """Yield prompt chunks in rank order.

        The first that has tokens to compute waits for nobody.
        """
        budget = self.pace.num_prompt_tokens(num_decode_tokens, num_prompts)
        leaders: list[EmbeddedSequence] = []
        for sequence, match in self._prefilling():
            num_tokens = len(match.blocks) * self.cache.tokens_per_block
            if sequence.slot is not None and num_tokens > sequence.num_computed:
                self.cache.share(sequence.slot, match.blocks)
                self._reuse(sequence, num_tokens)

            if sequence.can_reuse and self.cache.reuses_prefixes:
                if any(_computes_for(leader, sequence) for leader in leaders):
                    continue

            chunk = self._next_chunk(sequence, match, budget)
            yield Prefill(sequence, chunk)

            leaders.append(sequence)
            budget -= len(chunk.token_ids)
            if budget <= 0:
                return

    def _prefilling(self) -> Iterator[Prompt]:
        """Yield running sequences with prompt tokens to compute, then waiting ones, and what the
        cache has of each.

        A waiting sequence is admitted as it is yielded. Followers are admitted with their leader,
        because they use none of the budget.
        """
        self._admit_followers()
        restore_end_s = time.monotonic() + MAX_RESTORE_S
        leaders = [row for row in self.running if row.is_prefilling and not _follows(row)]
        for sequence in leaders:
            yield Prompt(sequence, self._match(sequence))

        while self.waiting and self.cache.has_free_slot and not _follows(self.waiting[0]):
            sequence = self.waiting[0]
            if self.beam_width not in (None, sequence.width):
                return

            if not self._restore(sequence, restore_end_s):
                return

            match = self._match(sequence)
            if self._admit(sequence, match.blocks):
                self.waiting.pop(0)
                self._admit_followers()
                yield Prompt(sequence, match)
            elif not self._fail_alone(sequence):
                return

    def _fail_alone(self, sequence: EmbeddedSequence) -> bool:
        """Fail the first that waits if nobody else's end can make room for it.

        Returns whether it failed.
        """
        if self.running or sequence.error is not None or not self.cache.is_short:
            return False

        self.waiting.pop(0)
        size = self.cache.tokens_per_block
        num_blocks = sequence.width * self.cache.num_blocks_for(sequence.num_prefill)
        need = f"{num_blocks * size} tokens need keys and values"
        room = f"memory is left for {self.cache.num_free_blocks * size}"
        sequence.fail(f"out of memory: {need}, and {room}", ErrorKind.OUT_OF_MEMORY)
        self._failed.append(sequence)
        return True

    def _admit_followers(self) -> None:
        """Let the first that wait run while they follow a leader and find room."""
        while self.waiting and _follows(self.waiting[0]):
            num_later = 0
            if self.cache.shares_blocks:
                num_later = self.waiting[0].num_prefill // self.cache.tokens_per_block

            if not self._admit(self.waiting[0], num_later=num_later):
                return

            self.waiting.pop(0)

    def _admit(
        self, sequence: EmbeddedSequence, shared: SequenceOf[int] = (), *, num_later: int = 0
    ) -> bool:
        """Give a slot to a sequence and promise it blocks, if there is room.

        One block is kept for each running row, else a preemption would soon follow. A search gets
        the slots of all its beams.
        """
        width = sequence.width
        num_tokens = sequence.num_prefill
        # Each further beam is promised room for so many tokens.
        num_beam_tokens = 1 if self.cache.shares_blocks else num_tokens
        num_beam_blocks = self.cache.num_blocks_for(num_beam_tokens)
        num_kept = width * len(self.running) + (width - 1) * num_beam_blocks
        num_slots = width
        if not sequence.request.is_express:
            num_slots += self._num_express

        has_room = self.cache.can_allocate(
            num_tokens, shared, num_later=num_later, num_kept=num_kept, num_slots=num_slots
        )
        if not has_room:
            return False

        if self._may_run is not None and not self._may_run(sequence, self.running):
            if sequence.error is not None:
                self._failed.append(sequence)

            return False

        sequence.slot = self.cache.allocate(num_tokens, shared, num_later=num_later)
        if width > 1:
            slots = [sequence.slot]
            for _ in range(width - 1):
                slots.append(self.cache.allocate(num_beam_tokens))

            sequence.beam_state = BeamRows(sequence, slots)

        self._reuse(sequence, len(shared) * self.cache.tokens_per_block)
        insort(self.running, sequence, key=_rank)
        return True

    def _next_chunk(self, sequence: EmbeddedSequence, match: Match, budget: int) -> Chunk:
        """Return the next prompt tokens of a sequence, at most `budget`, behind what a cached block
        has of them.
        """
        slot = sequence.slot
        assert slot is not None

        num_tokens = len(match.blocks) * self.cache.tokens_per_block + match.num_partial
        is_worth_copying = num_tokens - sequence.num_computed >= MIN_COPIED_TOKENS
        if is_worth_copying and self.cache.can_copy(match.partial_block):
            self.cache.copy(slot, match.partial_block, len(match.blocks))
            self._reuse(sequence, num_tokens)

        start = sequence.num_computed
        end = min(start + budget, sequence.num_prefill)
        self.cache.cover(slot, end)
        if sequence.lacks_prompt_rows:
            num_logits = end - start
        else:
            num_logits = int(end == sequence.num_prefill)

        token_ids = sequence.token_ids[start:end]
        table = self.cache.table(slot)
        return Chunk(slot, start, token_ids, num_logits, table, sequence.adapter)

    def _match(self, sequence: EmbeddedSequence) -> Match:
        """What the cache has of a prompt.

        Its last token is always computed, and all for prompt log-probs.

        Rows of the context are those that are not counted as cached, so no part of a block is taken
        beside them.
        """
        if not sequence.can_reuse:
            return Match([])

        match = self.cache.find(_root(sequence), sequence.token_ids, sequence.num_prefill - 1)
        if sequence.lacks_context:
            return Match(match.blocks)

        return match

    def _restore(self, sequence: EmbeddedSequence, end_s: float) -> bool:
        """Bring back what the disk has of a prompt behind what the cache has.

        Beside others it ends at `end_s` of the monotonic clock, and returns False if more follows.
        """
        if sequence.is_restored or not sequence.can_reuse:
            return True

        def may_go_on() -> bool:
            return not self.running or time.monotonic() < end_s

        sequence.is_restored = self.cache.restore(
            _root(sequence), sequence.token_ids, sequence.num_prefill - 1, may_go_on=may_go_on
        )
        return sequence.is_restored

    def _reuse(self, sequence: EmbeddedSequence, num_tokens: int) -> None:
        """Note that the first `num_tokens` of a sequence need not be computed.

        Only whole parts count as cached.
        """
        self._num_reused_tokens += num_tokens - sequence.num_computed
        if sequence.num_generated == 0:
            num_parts = num_tokens // TOKENS_PER_PART - sequence.num_computed // TOKENS_PER_PART
            sequence.count_cached(sequence.num_cached_tokens + num_parts * TOKENS_PER_PART)

        sequence.num_computed = num_tokens


def _first_rows(plan: Plan) -> list[int]:
    """Return the row of the logits with which each chunk of a plan begins."""
    first_rows: list[int] = []
    num_rows = 0
    for chunk in plan.chunks:
        first_rows.append(num_rows)
        num_rows += chunk.num_logits

    return first_rows


def _rank(sequence: EmbeddedSequence) -> tuple[float, int, int]:
    return (-sequence.request.priority - sequence.request.is_express, sequence.id, sequence.index)


def _is_express(sequence: EmbeddedSequence) -> bool:
    return sequence.request.is_express


def _followers_of(
    prefills: list[Prefill],
) -> dict[EmbeddedSequence, list[EmbeddedSequence]]:
    """The sequences that get a copy of a prompt that is complete in this step, by their leader."""
    followers = {}
    for sequence, chunk in prefills:
        if chunk.end == sequence.num_prefill and _is_at_prompt(sequence):
            later = sequence.siblings[sequence.index + 1 :]
            followers[sequence] = list(filter(_is_at_prompt, later))

    return followers


def _num_known(sequence: EmbeddedSequence) -> int:
    """The number of tokens that are computed.

    A cancelled sequence may have computed more tokens than it has left.
    """
    return min(sequence.num_computed, sequence.num_tokens)


def _root(sequence: EmbeddedSequence) -> Root:
    return Root(sequence.request.cache_salt, sequence.adapter)


def _computes_for(leader: EmbeddedSequence, sequence: EmbeddedSequence) -> bool:
    """Whether a leader is about to compute more tokens for the sequence than are soon computed
    twice.
    """
    start = leader.num_computed
    root = _root(sequence)
    end = root.num_shared(start + MIN_AWAITED_TOKENS)

    return (
        start >= sequence.num_computed
        and end - sequence.num_computed >= MIN_AWAITED_TOKENS
        and end <= leader.num_prefill
        and end < sequence.num_prefill
        and sequence.token_ids[:end] == leader.token_ids[:end]
        and _root(leader) == root
    )


def _follows(sequence: EmbeddedSequence) -> bool:
    """Whether a sequence needs only the prompt, and an earlier sequence of the request
    computes it.
    """
    earlier = sequence.siblings[: sequence.index]
    return sequence.num_generated == 0 and any(map(_is_at_prompt, earlier))


def _is_at_prompt(sequence: EmbeddedSequence) -> bool:
    """Whether a sequence runs and has no token yet: it or its leader computes the prompt."""
    return sequence.slot is not None and sequence.num_generated == 0
