"""The scheduler without an executor: its rules one by one, then its invariants under any load."""

from __future__ import annotations

from typing import Any

from hypothesis import given, strategies as st

from handlers.base.token_sequence import sequences_of
from handlers.lmi_dist.kv_cache import KvCache
from handlers.lmi_dist.plan import Chunk
from handlers.lmi_dist.scheduled_batch import Batch
from handlers.lmi_dist.scheduler import Scheduler
from handlers.lmi_dist.sequence import EmbeddedSequence
from lmi.executor import OutputConfig, Request, SamplingConfig
from tests.fake_runner import SteadyPace


class NoMemory:
    """Slots that nothing is written to."""

    def copy(self, slot: int, to_slots: list[int], num_tokens: int) -> None: ...

    def release(self, slot: int) -> None: ...


def scheduler(
    num_blocks: int = 1000, num_slots: int = 8, max_prefill_tokens: int = 256
) -> Scheduler:
    return Scheduler(
        KvCache(num_blocks, num_slots, slots=NoMemory()), SteadyPace(max_prefill_tokens)
    )


def sequences(
    number: int, num_sequences: int, num_prompt_tokens: int = 4, max_tokens: int = 10, **fields: Any
) -> list[EmbeddedSequence]:
    """The sequences of one request."""
    request = Request(
        input_token_ids=(1,) * num_prompt_tokens,
        max_tokens=max_tokens,
        sampling_config=SamplingConfig(num_return_sequences=num_sequences),
        **fields,
    )
    return sequences_of(EmbeddedSequence, number, request, 10_000)


def sequence(
    number: int, num_prompt_tokens: int = 4, max_tokens: int = 10, **fields: Any
) -> EmbeddedSequence:
    return sequences(number, 1, num_prompt_tokens, max_tokens, **fields)[0]


def run(one_scheduler: Scheduler, batch: Batch) -> list[EmbeddedSequence]:
    """Do what an executor does with a batch, with 7 as every token; return the sequences with a new
    token.
    """
    advanced = []
    for chunk, owner in zip(batch.plan.chunks, batch.sequences, strict=True):
        for follower in (owner, *batch.followers.get(owner, ())):
            follower.num_computed = chunk.end
            if chunk.end == follower.num_tokens:
                follower.append(7)
                advanced.append(follower)

    one_scheduler.commit(batch)
    return advanced


def step(one: Scheduler) -> Batch:
    batch = one.schedule()
    for done in run(one, batch):
        if done.is_finished:
            one.remove(done)

    return batch


def known_pace() -> SteadyPace:
    """A row costs 2 ms, and a step 2 ms more."""
    pace = SteadyPace(256)
    for num_rows in (1, 2, 8, 16):
        pace.note(num_rows, 0.002 + 0.002 * num_rows)

    return pace


def test_a_full_batch_leaves_a_fifth_of_the_time_to_steps_of_express_sequences_only() -> None:
    batcher = Scheduler(KvCache(1000, 10), known_pace(), num_express=1)
    long_ones = [sequence(i, max_tokens=200) for i in range(8)]
    light = sequence(9, max_tokens=40, is_express=True)
    for arriving in (*long_ones, light):
        batcher.add(arriving)

    step(batcher)
    sizes = []
    while not light.is_finished:
        sizes.append(len(step(batcher).sequences))

    assert set(sizes) == {1, 9} and 30 < sizes.count(1) + sizes.count(9) == 39

    short_s = sizes.count(1) * batcher.pace.seconds(1)
    whole_s = sizes.count(9) * batcher.pace.seconds(9)

    assert 0.15 < short_s / whole_s <= 0.25
    assert len(step(batcher).sequences) == 8 and {
        arriving.num_generated for arriving in long_ones
    } == {2 + sizes.count(9)}


def test_express_sequences_alone_or_in_a_batch_that_is_hardly_slower_have_no_short_steps() -> None:
    pace = SteadyPace(256)
    pace.note(1, 0.010), pace.note(16, 0.012)
    batcher = Scheduler(KvCache(1000, 10), pace, num_express=1)
    for arriving in (sequence(0, max_tokens=30), sequence(1, max_tokens=30, is_express=True)):
        batcher.add(arriving)

    assert {len(step(batcher).sequences) for _ in range(20)} == {2}


def spans(chunks: list[Chunk]) -> list[tuple[int, int, int]]:
    return [(chunk.slot, chunk.start, chunk.end) for chunk in chunks]


def test_prompts_are_cut_where_the_budget_ends() -> None:
    batcher = scheduler(max_prefill_tokens=16)
    batcher.add(sequence(1, num_prompt_tokens=20))
    batcher.add(sequence(2, num_prompt_tokens=15))
    assert spans(step(batcher).plan.prefills) == [(0, 0, 16)]
    assert spans(step(batcher).plan.prefills) == [(0, 16, 20), (1, 0, 12)]
    batch = step(batcher)
    assert spans(batch.plan.decodes) == [(0, 20, 21)] and spans(batch.plan.prefills) == [
        (1, 12, 15)
    ]


def test_logits_are_asked_for_at_the_end_of_a_prompt_and_everywhere_for_prompt_log_probs() -> None:
    batcher = scheduler(max_prefill_tokens=8)
    batcher.add(sequence(1, num_prompt_tokens=10))
    batcher.add(
        sequence(2, num_prompt_tokens=10, output_config=OutputConfig(num_prompt_log_probs=0))
    )
    assert [[chunk.num_logits for chunk in step(batcher).plan.prefills] for _ in range(3)] == [
        [0],
        [1, 6],
        [4],
    ]


def test_decodes_come_first_and_in_order_of_slots() -> None:
    batcher = scheduler()
    for number, priority in ((1, 0.5), (2, 0.9), (3, 0.1)):
        batcher.add(sequence(number, priority=priority))

    step(batcher)
    batcher.add(sequence(4))
    batch = step(batcher)
    assert [chunk.slot for chunk in batch.plan.chunks] == [0, 1, 2, 3]
    assert [done.id for done in batch.sequences] == [2, 1, 3, 4]


def test_higher_priority_goes_first_and_age_decides_between_equals() -> None:
    batcher = scheduler(num_slots=1)
    for number, priority in ((1, 0.5), (2, 0.5), (3, 0.9)):
        batcher.add(sequence(number, priority=priority, max_tokens=1))

    assert [step(batcher).sequences[0].id for _ in range(3)] == [3, 1, 2]


def test_slots_bound_what_runs() -> None:
    batcher = scheduler(num_slots=2)
    for number in range(5):
        batcher.add(sequence(number))

    step(batcher)
    assert (len(batcher.running), len(batcher.waiting)) == (2, 3)


def test_admission_keeps_a_block_for_each_running_sequence() -> None:
    batcher = scheduler(num_blocks=4)
    batcher.add(sequence(1, num_prompt_tokens=16))
    # 2 of 3 free blocks, and one is kept: just fits
    batcher.add(sequence(2, num_prompt_tokens=32))
    step(batcher)
    assert len(batcher.running) == 2
    second_batcher = scheduler(num_blocks=4)
    second_batcher.add(sequence(1, num_prompt_tokens=16))
    second_batcher.add(sequence(2, num_prompt_tokens=33))
    step(second_batcher)
    assert [done.id for done in second_batcher.waiting] == [2]


def test_the_last_in_rank_is_preempted_and_recomputed_before_whoever_came_later() -> None:
    batcher = scheduler(num_blocks=4, max_prefill_tokens=100)
    first = sequence(1, 16, max_tokens=40)
    second = sequence(2, 16, max_tokens=40)
    batcher.add(first)
    batcher.add(second)
    while first.num_tokens + second.num_tokens <= 64:
        # Each has two blocks, the last ones
        step(batcher)

    batcher.add(sequence(3))
    batch = step(batcher)

    assert batch.num_preemptions == 1 and batch.sequences == [first]
    assert [done.id for done in batcher.waiting] == [2, 3]
    assert second.slot is None and second.num_prefill == second.num_tokens > 32

    num_known = second.num_tokens
    while second.slot is None:
        step(batcher)

    assert second.num_tokens == num_known + 1 and batcher.running[0] is second

    while batcher.running:
        step(batcher)

    assert first.num_generated == second.num_generated == 40
    assert batcher.cache.num_used_blocks == 0


def test_a_low_priority_is_preempted_before_a_younger_request() -> None:
    batcher = scheduler(num_blocks=4)
    low = sequence(1, 16, priority=0.1, max_tokens=40)
    high = sequence(2, 16, priority=0.9, max_tokens=40)
    batcher.add(low)
    batcher.add(high)
    while not (batch := step(batcher)).num_preemptions:
        pass

    assert batch.sequences == [high]


def test_removing_frees_blocks_and_slot_wherever_the_sequence_stands() -> None:
    batcher = scheduler(num_slots=1, max_prefill_tokens=8)
    running = sequence(1, num_prompt_tokens=30)
    waiting = sequence(2)
    batcher.add(running)
    batcher.add(waiting)
    step(batcher)
    batcher.remove(waiting)
    batcher.remove(running)
    assert (batcher.cache.num_used_blocks, batcher.running, batcher.waiting) == (0, [], [])


def test_the_sequences_of_a_request_are_admitted_together_and_get_the_first_ones_prompt() -> None:
    batcher = scheduler(num_slots=5, max_prefill_tokens=8)
    group = sequences(1, 3, num_prompt_tokens=20)
    for sibling in group:
        batcher.add(sibling)

    batcher.add(sequence(2))
    starts = []
    for _ in range(2):
        batch = step(batcher)
        assert batch.sequences == group[:1] and batch.followers == {}
        assert [sibling.slot for sibling in group] == [0, 1, 2], (
            "all have their slots from the first step"
        )

        starts += spans(batch.plan.prefills)

    batch = step(batcher)
    assert [*starts, *spans(batch.plan.prefills)] == [(0, 0, 8), (0, 8, 16), (0, 16, 20), (3, 0, 4)]
    assert batch.followers[group[0]] == group[1:]
    assert [chunk.slot for chunk in step(batcher).plan.decodes] == [0, 1, 2, 3]


def test_followers_come_in_while_a_leader_eats_the_whole_budget() -> None:
    """The slot of the second is free just before the last chunk of the first."""
    batcher = scheduler(num_slots=2, max_prefill_tokens=8)
    batcher.add(sequence(1, max_tokens=3))
    step(batcher)
    group = sequences(2, 3, num_prompt_tokens=24)
    for sibling in group:
        batcher.add(sibling)

    for _ in range(2):
        assert [done.id for done in step(batcher).sequences] == [1, 2] and batcher.waiting == group[
            1:
        ]

    assert step(batcher).followers == {group[0]: [group[1]]}
    assert (batcher.running, batcher.waiting) == (group[:2], group[2:])


def test_a_sequence_that_comes_too_late_to_follow_computes_for_itself() -> None:
    batcher = scheduler(num_slots=2, max_prefill_tokens=8)
    batcher.add(sequence(1, max_tokens=2))
    step(batcher)
    group = sequences(2, 2)
    for sibling in group:
        batcher.add(sibling)

    step(batcher)
    assert batcher.running == group[:1] and group[0].num_generated == 1

    batch = step(batcher)
    assert batch.sequences == group and batch.followers == {group[1]: []}


def test_whoever_finds_no_room_leads_the_rest_later() -> None:
    batcher = scheduler(num_slots=2)
    group = sequences(1, 5, num_prompt_tokens=6, max_tokens=1)
    for sibling in group:
        batcher.add(sibling)

    leads = []
    while batcher.waiting or batcher.running:
        leads += step(batcher).followers.items()

    assert leads == [(group[0], [group[1]]), (group[2], [group[3]]), (group[4], [])]


def test_a_preempted_sequence_with_tokens_neither_leads_nor_follows() -> None:
    batcher = scheduler(num_blocks=6)
    group = sequences(1, 3, num_prompt_tokens=16, max_tokens=40)
    for sibling in group:
        batcher.add(sibling)

    batches = []
    while batcher.waiting or batcher.running:
        batches.append(step(batcher))

    assert sum(batch.num_preemptions for batch in batches) > 0
    assert [batch.followers for batch in batches if any(batch.followers.values())] == [
        {group[0]: group[1:]}
    ]
    assert (
        all(sibling.num_generated == 40 for sibling in group) and batcher.cache.num_used_blocks == 0
    )


def test_a_preempted_follower_follows_again() -> None:
    batcher = scheduler(max_prefill_tokens=8)
    group = sequences(1, 2, num_prompt_tokens=24)
    for sibling in group:
        batcher.add(sibling)

    step(batcher)
    batcher._preempt(group[1])
    assert batcher.waiting == group[1:] and group[1].slot is None
    assert (step(batcher).followers, batcher.running) == ({}, group)
    assert step(batcher).followers == {group[0]: [group[1]]}


@st.composite
def loads(draw: st.DrawFn) -> list[tuple[int, list[EmbeddedSequence], int | None]]:
    """(step of arrival, sequences of a request, steps until it is cancelled)."""
    return [
        (
            draw(st.integers(0, 12)),
            sequences(
                number,
                draw(st.sampled_from([1, 1, 2, 5])),
                draw(st.integers(1, 60)),
                draw(st.integers(1, 40)),
                priority=draw(st.sampled_from([0.2, 0.5, 0.8])),
                output_config=OutputConfig(
                    num_prompt_log_probs=draw(st.sampled_from([None, None, 0]))
                ),
            ),
            draw(st.one_of(st.none(), st.none(), st.integers(0, 15))),
        )
        for number in range(draw(st.integers(1, 7)))
    ]


@given(loads(), st.integers(7, 14), st.integers(1, 4), st.integers(1, 40))
def test_under_any_load_the_budget_holds_and_everyone_ends(
    load: list[tuple[int, list[EmbeddedSequence], int | None]],
    num_blocks: int,
    num_slots: int,
    max_prefill_tokens: int,
) -> None:
    """Seven blocks are the most that one of these sequences can need (60 + 40 - 1 tokens)."""
    batcher = scheduler(num_blocks, num_slots, max_prefill_tokens=max_prefill_tokens)
    open_ones = {new for _, group, _ in load for new in group}
    for now in range(5000):
        for arrival, group, _ in load:
            if arrival == now:
                for new in group:
                    batcher.add(new)

        for arrival, group, patience in load:
            if patience is not None and now == arrival + patience:
                for doomed in open_ones.intersection(group):
                    batcher.remove(doomed)
                    open_ones.discard(doomed)

        batch = batcher.schedule()
        check(batcher, batch, max_prefill_tokens)
        for done in run(batcher, batch):
            if done.is_finished:
                batcher.remove(done)
                open_ones.discard(done)
                assert done.num_generated == done.max_tokens

        if not open_ones:
            break

    assert not open_ones, "someone waits for ever"
    # So no slot is held, since each sequence with a slot has at least one block
    assert batcher.cache.num_used_blocks == 0


def check(one: Scheduler, batch: Batch, max_prefill_tokens: int) -> None:
    cache = one.cache
    assert batch.sequences or not (one.running or one.waiting), (
        "a step that does nothing while there is work"
    )
    assert 0 <= cache.num_free_blocks
    assert len(one.running) == len({running.slot for running in one.running})
    needed = sum(cache.num_blocks_for(running.num_tokens) for running in one.running)
    assert needed <= cache.num_used_blocks
    lengths = [len(chunk.token_ids) for chunk in batch.plan.prefills]
    assert sum(lengths) <= max_prefill_tokens
    for chunk, owner in zip(batch.plan.chunks, batch.sequences, strict=True):
        assert (
            chunk.slot == owner.slot and chunk.token_ids == owner.token_ids[chunk.start : chunk.end]
        )
        assert chunk.num_logits >= (chunk.end == owner.num_tokens)

    for leader, followers in batch.followers.items():
        assert leader in batch.sequences and not leader.num_generated or not followers
        for follower in followers:
            assert (
                follower in one.running
                and follower not in batch.sequences
                and follower.group is leader.group
            )
            assert follower.num_computed == follower.num_generated == 0

    for leader in batch.sequences[len(batch.plan.decodes) :]:
        if not leader.num_generated:
            before = leader.group.sequences[: leader.index]
            assert all(sibling.slot is None or sibling.num_generated for sibling in before), (
                "one prompt computed twice"
            )
