"""Reuse of prefixes: what is shared, what is waited for, and that no answer ever changes.

The runner's logits are a function of all tokens up to a position, and it refuses to read keys of
other tokens.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given, settings, strategies as st

from handlers.base.token_sequence import sequences_of
from handlers.lmi_dist.block_files import BlockFiles
from handlers.lmi_dist.kv_cache import KvCache
from handlers.lmi_dist.scheduled_batch import Batch
from handlers.lmi_dist.scheduler import Scheduler
from handlers.lmi_dist.sequence import EmbeddedSequence
from handlers.lmi_dist.stored_prefixes import StoredPrefixes
from lmi.executor import (
    FinishReason,
    KvCacheRetentionConfig,
    OutputConfig,
    Request,
    SamplingConfig,
    TokenRangeRetentionConfig,
)
from tests.fake_runner import SharingRunner, SteadyPace

SIZE = SharingRunner.tokens_per_block
PROMPT = tuple(range(200))
KEPT = KvCacheRetentionConfig((TokenRangeRetentionConfig(0, 40, 90),), 60)
LOW_AND_SHORT = KvCacheRetentionConfig((TokenRangeRetentionConfig(0, None, 10),), 80, 1)


class Engine:
    """A scheduler and a runner, without an executor's thread. The next token is the most likely
    one.
    """

    def __init__(
        self,
        num_blocks: int = 1000,
        num_slots: int = 8,
        max_prefill_tokens: int = 1000,
        *,
        reuses_prefixes: bool = True,
        disk: Path | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.runner = SharingRunner(vocab_size=500)
        stored: StoredPrefixes | None = None
        if disk is not None:
            files = BlockFiles(str(disk), bytes(32), 1 << 30)
            stored = StoredPrefixes(files, self.runner)

        self.stored = stored
        self.cache = KvCache(
            num_blocks,
            num_slots,
            SIZE,
            reuses_prefixes=reuses_prefixes,
            stored=stored,
            now_s=now_s,
        )
        self.scheduler = Scheduler(self.cache, SteadyPace(max_prefill_tokens))
        self.num_requests = 0

    def add(
        self,
        prompt: tuple[int, ...],
        max_tokens: int = 4,
        num_sequences: int = 1,
        cache_salt: str | None = "us",
        priority: float = 0.5,
        output_config: OutputConfig | None = None,
        num_prompt_log_probs: int | None = None,
        retention: KvCacheRetentionConfig | None = None,
    ) -> list[EmbeddedSequence]:
        self.num_requests += 1
        request = Request(
            input_token_ids=prompt,
            max_tokens=max_tokens,
            sampling_config=SamplingConfig(num_return_sequences=num_sequences),
            output_config=output_config or OutputConfig(num_prompt_log_probs=num_prompt_log_probs),
            cache_salt=cache_salt,
            priority=priority,
            kv_cache_retention_config=retention,
        )
        added = sequences_of(EmbeddedSequence, self.num_requests, request, 10_000)
        for sequence in added:
            self.scheduler.add(sequence)

        return added

    def step(self) -> Batch:
        batch = self.scheduler.schedule()
        self.check(batch)
        logits = self.runner.forward(batch.plan)
        row = 0
        drawn = []
        for chunk, owner in zip(batch.plan.chunks, batch.sequences, strict=True):
            row += chunk.num_logits
            for sharer in (owner, *batch.followers.get(owner, ())):
                sharer.num_computed = chunk.end
                if chunk.end == sharer.num_tokens:
                    drawn.append((sharer, int(logits[row - 1].argmax())))

        for sharer, token_id in drawn:
            sharer.append(token_id)

        self.scheduler.commit(batch)
        for sharer, _ in drawn:
            if sharer.is_finished:
                self.scheduler.remove(sharer)

        return batch

    def run(self) -> list[Batch]:
        batches = []
        while self.scheduler.running or self.scheduler.waiting:
            batches.append(self.step())

        assert self.cache.num_used_blocks == 0
        return batches

    def check(self, batch: Batch) -> None:
        """Every block is in one place; every count of references is that of tables and copies."""
        cache = self.cache
        tables = [holding.table for holding in self.cache._holdings]
        num_holders = Counter(block for table in tables for block in table)
        num_holders.update(source for source, _ in cache._copies.values())

        assert [num_holders[block] for block in range(cache.num_blocks)] == cache._num_references
        assert all(len(table) == len(set(table)) for table in tables)

        unused = {*cache._new_blocks, *cache._empty_blocks}
        assert len(unused) == len(cache._new_blocks) + len(cache._empty_blocks)

        idle = cache._idle_blocks._idle
        assert not num_holders.keys() & unused and not num_holders.keys() & idle.keys()
        assert len(num_holders) + len(unused | idle.keys()) == cache.num_blocks
        assert cache.num_free_blocks >= 0
        assert set(cache._tree._places) <= num_holders.keys() | idle.keys()

        leaves = {block for block in idle if not cache._tree.has_children(block)}
        assert leaves == {block for block, holding in idle.items() if holding.is_evictable}
        assert batch.sequences or not (self.scheduler.running or self.scheduler.waiting), (
            "nothing is done"
        )

        copied = [holding for followers in batch.followers.values() for holding in followers]
        assert len({*batch.sequences, *copied}) == len(batch.sequences) + len(copied), (
            "someone draws twice"
        )

        for chunk in batch.plan.chunks:
            assert len(chunk.table) * SIZE >= chunk.end

    def evict_all(self) -> None:
        slot = self.cache.allocate(self.cache.num_blocks * SIZE)
        self.cache.cover(slot, self.cache.num_blocks * SIZE)
        self.cache.free(slot)
        assert (
            len(self.cache._idle_blocks)
            == len(self.cache._tree._places)
            == len(self.cache._tree._children)
            == 0
        )


def num_computed(batches: list[Batch]) -> list[int]:
    """The prompt tokens of each step."""
    return [sum(len(chunk.token_ids) for chunk in batch.plan.prefills) for batch in batches]


def test_a_prompt_that_came_before_is_computed_only_at_its_last_token() -> None:
    engine = Engine()
    [first] = engine.add(PROMPT)
    assert num_computed(engine.run()) == [200, 0, 0, 0]
    [again] = engine.add(PROMPT)
    assert num_computed(engine.run()) == [1, 0, 0, 0]
    assert again.token_ids == first.token_ids
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 192), "whole parts count"


@pytest.mark.parametrize(
    ("num_equal", "num_reused"),
    [(0, 0), (3, 0), (4, 4), (15, 15), (16, 16), (18, 16), (20, 20), (64, 64), (100, 100)],
)
def test_the_longest_common_beginning_is_reused_and_a_part_of_a_block_is_copied(
    num_equal: int, num_reused: int
) -> None:
    """A copy of fewer than four tokens would cost as much as computing them."""
    engine = Engine()
    engine.add(PROMPT)
    engine.run()
    [second] = engine.add(PROMPT[:num_equal] + tuple(range(300, 350)))
    batch = engine.step()
    assert batch.num_reused_tokens == num_reused
    assert second.num_cached_tokens == num_reused // SIZE * SIZE
    assert len(batch.plan.copies) == (num_reused % SIZE > 0)
    assert engine.cache.copies == []


@pytest.mark.parametrize("num_equal", [0, 15, 16, 31, 32, 40])
def test_strangers_share_whole_parts_of_a_block_only(num_equal: int) -> None:
    """Whoever knows 15 tokens of a block cannot tell the right last one from a wrong one by what
    they alone reuse.
    """
    engine = Engine()
    engine.add(PROMPT, cache_salt=None)
    engine.run()
    [stranger] = engine.add((*PROMPT[:num_equal], 300, 301), cache_salt=None)
    batch = engine.step()
    assert stranger.num_cached_tokens == batch.num_reused_tokens == num_equal // SIZE * SIZE
    assert batch.plan.copies == []


def test_a_stranger_waits_until_a_whole_block_is_computed() -> None:
    engine = Engine(max_prefill_tokens=20)
    engine.add(PROMPT[:40], cache_salt=None)
    [stranger] = engine.add((*PROMPT[:30], 300, 301), cache_salt=None)
    assert num_computed([engine.step()]) == [20], "it waits for the first block"
    assert num_computed([engine.step()]) == [20], "the second one holds what it does not need"
    engine.run()
    assert stranger.num_cached_tokens == SIZE


def test_the_part_of_a_block_that_no_stranger_may_use_is_free() -> None:
    engine = Engine()
    engine.add(PROMPT[:40], max_tokens=1, cache_salt=None)
    engine.run()
    assert len(engine.cache._idle_blocks) == 2


def test_rows_of_a_context_are_all_that_is_not_counted_as_cached() -> None:
    engine = Engine()
    engine.add(PROMPT[:40])
    engine.run()
    [asking] = engine.add(PROMPT[:40], output_config=OutputConfig(return_context_logits=True))
    batch = engine.step()
    assert asking.num_cached_tokens == batch.num_reused_tokens == 2 * SIZE


def test_an_answer_is_reused_too_down_to_its_last_token_with_keys() -> None:
    engine = Engine()
    [first] = engine.add(PROMPT, max_tokens=30)
    engine.run()
    [next_turn] = engine.add((*first.token_ids, 1, 2, 3))
    # The last token of an answer was never computed
    assert engine.step().num_reused_tokens == 229
    assert next_turn.num_cached_tokens == 224


def test_a_running_sequence_gives_its_blocks() -> None:
    engine = Engine()
    engine.add(PROMPT, max_tokens=40)
    engine.step()
    [second] = engine.add(PROMPT)
    batch = engine.step()
    assert (batch.num_reused_tokens, second.num_cached_tokens) == (199, 192)
    assert batch.plan.decodes[0].table[:12] == batch.plan.prefills[0].table[:12]
    assert batch.plan.decodes[0].table[12] != batch.plan.prefills[0].table[12]


def test_an_answer_is_reused_while_it_grows() -> None:
    engine = Engine()
    [first] = engine.add(PROMPT, max_tokens=40)
    for _ in range(30):
        engine.step()

    [second] = engine.add(tuple(first.token_ids))
    engine.step()
    assert second.num_cached_tokens == 224  # the whole parts


def test_nobody_waits_for_tokens_that_come_after_others() -> None:
    engine = Engine(max_prefill_tokens=150)
    engine.add((300, *PROMPT))
    engine.step()
    engine.add((301, *PROMPT))
    assert num_computed([engine.step()]) == [150]


def test_nobody_waits_for_another_salt() -> None:
    engine = Engine()
    engine.add(PROMPT, cache_salt="one")
    engine.add(PROMPT, cache_salt="two")
    assert num_computed([engine.step()]) == [400]


def test_nobody_waits_for_whoever_computes_what_is_cached() -> None:
    engine = Engine()
    engine.add(PROMPT)
    engine.run()
    [asking] = engine.add(PROMPT, num_prompt_log_probs=0)
    [second] = engine.add(PROMPT)
    batch = engine.step()
    assert batch.sequences == [asking, second] and num_computed([batch]) == [201]


def test_whoever_asks_for_prompt_log_probs_waits_for_nobody() -> None:
    engine = Engine()
    engine.add(PROMPT)
    engine.add(PROMPT, num_prompt_log_probs=0)
    assert num_computed([engine.step()]) == [400]


def test_a_prefix_that_is_being_computed_is_waited_for() -> None:
    engine = Engine(max_prefill_tokens=100)
    group = [engine.add((*PROMPT[:150], number))[0] for number in range(6)]
    batches = engine.run()

    assert num_computed(batches)[:3] == [100, 51, 5]
    assert [member.num_cached_tokens for member in group] == [0] + [144] * 5
    assert sum(batch.num_reused_tokens for batch in batches) == 150 * 5


def test_whoever_needs_something_else_does_not_wait() -> None:
    engine = Engine(max_prefill_tokens=300)
    engine.add(PROMPT)
    engine.add(PROMPT)
    engine.add(tuple(range(300, 350)))
    batch = engine.step()

    assert [
        (sequence_.id, len(chunk.token_ids))
        for sequence_, chunk in zip(batch.sequences, batch.plan.prefills, strict=True)
    ] == [
        (1, 200),
        (3, 50),
    ]


def test_a_short_common_beginning_is_computed_twice_at_once() -> None:
    engine = Engine()
    engine.add(PROMPT[:15] + (300,) * 9)
    engine.add(PROMPT[:15] + (301,) * 9)
    assert num_computed(engine.run())[0] == 48


def test_the_cancel_of_a_leader_lets_the_next_go_on_where_it_was() -> None:
    engine = Engine(max_prefill_tokens=60)
    [leader], [follower] = engine.add(PROMPT), engine.add(PROMPT)
    engine.step()
    leader.finish(FinishReason.CANCELLED)
    engine.scheduler.remove(leader)
    batches = engine.run()
    assert num_computed(batches)[:3] == [60, 60, 20]
    assert (batches[0].num_reused_tokens, follower.num_cached_tokens) == (60, 48)


def test_a_salt_keeps_requests_apart() -> None:
    engine = Engine()
    engine.add(PROMPT, cache_salt="one")
    engine.run()
    sequences = [engine.add(PROMPT, cache_salt=salt)[0] for salt in ("two", None, "one")]
    engine.run()
    assert [sequence.num_cached_tokens for sequence in sequences] == [0, 0, 192]


def test_whoever_asks_for_prompt_log_probs_gets_its_prompt_computed_and_gives_its_blocks() -> None:
    engine = Engine()
    engine.add(PROMPT[:100])
    engine.run()
    [asking] = engine.add(PROMPT, num_prompt_log_probs=0)
    [chunk] = engine.step().plan.prefills
    assert (chunk.num_logits, asking.num_cached_tokens) == (200, 0)

    asking.fail("the test has seen enough")
    engine.scheduler.remove(asking)
    [asking] = engine.add(PROMPT, num_prompt_log_probs=0)
    asking.prompt_log_probs = []
    engine.step()
    engine.add(PROMPT)

    assert engine.step().num_reused_tokens == 199


def test_idle_blocks_count_as_free_and_go_in_the_order_of_their_last_use() -> None:
    engine = Engine(num_blocks=12)
    for number in (1, 2, 3):
        engine.add((number,) * 63, max_tokens=2)
        engine.run()

    assert engine.cache.num_free_blocks == len(engine.cache._idle_blocks) == 12

    engine.add((1,) * 63, max_tokens=1)
    engine.run()
    engine.add((4,) * 49, max_tokens=1)
    engine.run()
    evictable = {
        number: engine.scheduler._match(engine.add((number,) * 63)[0]).blocks
        for number in (1, 2, 3)
    }

    assert {number: len(blocks) for number, blocks in evictable.items()} == {1: 3, 2: 0, 3: 3}


def test_a_prompt_as_long_as_the_cache_does_not_need_room_for_a_copy() -> None:
    engine = Engine(num_blocks=4)
    engine.add(PROMPT[:60], max_tokens=1)
    engine.run()
    [long] = engine.add(PROMPT[:64], max_tokens=1)
    engine.run()
    assert long.num_cached_tokens == 48


def test_a_preempted_sequence_comes_back_to_its_blocks() -> None:
    engine = Engine(num_blocks=8)
    engine.add(PROMPT[:48], max_tokens=40)
    engine.add(PROMPT[100:148], max_tokens=40)
    batches = engine.run()
    assert sum(batch.num_preemptions for batch in batches) == 1
    assert sum(batch.num_reused_tokens for batch in batches) >= 2 * SIZE


@pytest.mark.parametrize("reuses_prefixes", [True, False])
@pytest.mark.parametrize("length", [64, 70])
def test_the_sequences_of_a_request_share_the_blocks_of_its_prompt(
    length: int, reuses_prefixes: bool
) -> None:
    engine = Engine(num_blocks=12, reuses_prefixes=reuses_prefixes)
    group = engine.add(PROMPT[:length], num_sequences=4, max_tokens=3)
    batch = engine.step()

    assert num_computed([batch]) == [length] and batch.followers == {group[0]: group[1:]}

    batch = engine.step()
    assert len({tuple(chunk.table[:4]) for chunk in batch.plan.decodes}) == 1
    assert len({chunk.table[4] for chunk in batch.plan.decodes}) == 4
    assert len(batch.plan.copies) == (3 if length % SIZE else 0)

    engine.run()
    assert len({tuple(member.token_ids) for member in group}) == 1


def test_nothing_is_kept_where_reuse_is_off() -> None:
    engine = Engine(reuses_prefixes=False)
    for _ in range(2):
        [follower] = engine.add(PROMPT)
        assert num_computed(engine.run()) == [200, 0, 0, 0] and follower.num_cached_tokens == 0

    assert len(engine.cache._idle_blocks) == 0


def test_a_failed_sequence_leaves_nothing_that_only_it_used() -> None:
    engine = Engine(max_prefill_tokens=64)
    engine.add(PROMPT[:40], max_tokens=1)
    engine.run()
    [failing] = engine.add(PROMPT)
    engine.step()
    failing.fail("its logits are not numbers")
    engine.scheduler.remove(failing)
    engine.add(PROMPT)
    assert engine.step().num_reused_tokens == 40


def test_a_step_that_failed_is_repeated_with_its_copies() -> None:
    engine = Engine()
    [first] = engine.add(PROMPT)
    engine.run()
    [again] = engine.add(PROMPT)
    failed = engine.scheduler.schedule()
    batch = engine.step()
    assert failed.plan.copies == batch.plan.copies != [] and engine.cache.copies == []
    engine.run()
    assert again.token_ids == first.token_ids


def test_a_sequence_that_ends_before_its_copy_is_made_leaves_nothing_of_it() -> None:
    engine = Engine()
    engine.add(PROMPT)
    engine.run()
    [doomed] = engine.add(PROMPT)
    engine.scheduler.schedule()
    engine.scheduler.remove(doomed)
    assert engine.cache.copies == [] and engine.cache.num_used_blocks == 0
    engine.add(PROMPT)
    engine.run()


def alone(prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    token_ids = list(prompt)
    runner = SharingRunner(vocab_size=500)
    for _ in range(max_tokens):
        token_ids.append(int(runner.logits(token_ids).argmax()))

    return token_ids


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the blocks that all examples share."""
    return tmp_path_factory.mktemp("prefixes")


@settings(max_examples=60, deadline=None)
# A leader that shares makes room for a sibling within the step
@example(1201727289, 15, 5, 116, True, False)
@given(
    st.integers(0, 2**32),
    st.integers(9, 40),
    st.integers(1, 6),
    st.integers(1, 120),
    st.booleans(),
    st.booleans(),
)
def test_no_answer_depends_on_what_was_reused(
    disk: Path,
    seed: int,
    num_blocks: int,
    num_slots: int,
    max_prefill_tokens: int,
    reuses_prefixes: bool,
    has_disk: bool,
) -> None:
    """Prompts from few beginnings, priorities, siblings, cancels, failures and repeated steps, with
    a small cache, and a disk that keeps what other examples have computed.
    """
    draw = random.Random(seed)
    engine = Engine(
        num_blocks,
        num_slots,
        max_prefill_tokens,
        reuses_prefixes=reuses_prefixes,
        disk=disk if has_disk else None,
    )
    stems = [tuple(draw.choices(range(5), k=draw.choice([10, 16, 40, 64]))) for _ in range(3)]
    added: list[EmbeddedSequence] = []
    for _ in range(draw.randint(10, 60)):
        if draw.random() < 0.5:
            stem = draw.choice(stems)
            prompt = stem[: draw.randint(1, len(stem))] + tuple(
                draw.choices(range(5), k=draw.randint(0, 30))
            )
            added += engine.add(
                prompt,
                max_tokens=draw.randint(1, 40),
                num_sequences=draw.choice([1, 1, 1, 3]),
                cache_salt=draw.choice([None, "a", "b"]),
                priority=draw.choice([0.2, 0.5, 0.8]),
                num_prompt_log_probs=draw.choice([None, None, None, 0]),
                retention=draw.choice([None, None, KEPT, LOW_AND_SHORT]),
            )

        if draw.random() < 0.1:
            # A step that ran out of memory
            engine.scheduler.schedule()

        running = [
            running_sequence for running_sequence in added if not running_sequence.is_finished
        ]
        if running and draw.random() < 0.1:
            end(engine, draw.choice(running), fails=draw.random() < 0.5)

        engine.step()

    engine.run()
    for running_sequence in added:
        if running_sequence.finish_reason is FinishReason.LENGTH:
            assert running_sequence.token_ids == alone(
                running_sequence.request.input_token_ids, running_sequence.request.max_tokens
            )

    engine.evict_all()
    if engine.stored is not None:
        engine.stored.close()


def end(engine: Engine, sequence: EmbeddedSequence, *, fails: bool) -> None:
    """Cancel or fail a whole request."""
    siblings = [sibling for sibling in sequence.group.sequences if not sibling.is_finished]
    for sibling in siblings:
        sibling.finish(FinishReason.CANCELLED)

    if fails:
        sequence.fail("a test")

    for sibling in siblings:
        engine.scheduler.remove(sibling)
