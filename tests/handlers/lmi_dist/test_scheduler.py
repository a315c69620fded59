"""The scheduler alone: its rules one by one, then its invariants under any load."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from handlers.lmi_dist.kv_cache import KvCache, num_blocks_for
from handlers.lmi_dist.plan import Piece
from handlers.lmi_dist.scheduler import Batch, Scheduler
from handlers.sequence import Sequence, new_sequences
from lmi.executor import OutputConfig, Request


def scheduler(num_blocks: int = 1000, num_rows: int = 8, **options: Any) -> Scheduler:
    return Scheduler(KvCache(num_blocks, num_rows), **{"max_num_sequences": num_rows, "piece_length": 8, **options})


def sequence(number: int, num_prompt_tokens: int = 4, max_tokens: int = 10, **fields: Any) -> Sequence:
    request = Request(input_token_ids=(1,) * num_prompt_tokens, max_tokens=max_tokens, **fields)
    return new_sequences(number, request, 10_000)[0]


def run(batch: Batch) -> list[Sequence]:
    """What an executor does with a batch, with 7 as every token; returns the sequences with a new one."""
    advanced = []
    for piece, one in zip(batch.plan.pieces, batch.sequences, strict=True):
        one.num_computed = piece.end
        if piece.end == one.num_tokens:
            one.append(7)
            advanced.append(one)
    return advanced


def step(one: Scheduler) -> Batch:
    batch = one.schedule()
    for done in run(batch):
        if done.is_finished:
            one.remove(done)
    return batch


def spans(pieces: list[Piece]) -> list[tuple[int, int, int]]:
    return [(piece.row, piece.start, piece.end) for piece in pieces]


def test_prompts_are_cut_at_fixed_positions_under_the_budget() -> None:
    one = scheduler(max_prefill_tokens=16)
    one.add(sequence(1, num_prompt_tokens=20))
    one.add(sequence(2, num_prompt_tokens=15))
    assert spans(step(one).plan.prefills) == [(0, 0, 8), (0, 8, 16)]
    assert spans(step(one).plan.prefills) == [(0, 16, 20), (1, 0, 8)]
    batch = step(one)
    assert spans(batch.plan.decodes) == [(0, 20, 21)] and spans(batch.plan.prefills) == [(1, 8, 15)]


def test_one_piece_comes_however_small_the_budget_is() -> None:
    one = scheduler(max_prefill_tokens=1)
    one.add(sequence(1, num_prompt_tokens=20))
    one.add(sequence(2, num_prompt_tokens=20))
    assert spans(step(one).plan.prefills) == [(0, 0, 8)]


def test_logits_are_asked_for_at_the_end_of_a_prompt_and_everywhere_for_prompt_log_probs() -> None:
    one = scheduler()
    one.add(sequence(1, num_prompt_tokens=10))
    one.add(sequence(2, num_prompt_tokens=10, output_config=OutputConfig(num_prompt_log_probs=0)))
    assert [piece.num_logits for piece in step(one).plan.prefills] == [0, 1, 8, 2]


def test_decodes_come_first_and_in_order_of_rows() -> None:
    one = scheduler()
    for number, priority in ((1, 0.5), (2, 0.9), (3, 0.1)):
        one.add(sequence(number, priority=priority))
    step(one)
    one.add(sequence(4))
    batch = step(one)
    assert [piece.row for piece in batch.plan.pieces] == [0, 1, 2, 3]
    assert [done.id for done in batch.sequences] == [2, 1, 3, 4]


def test_higher_priority_goes_first_and_age_decides_between_equals() -> None:
    one = scheduler(num_rows=1)
    for number, priority in ((1, 0.5), (2, 0.5), (3, 0.9)):
        one.add(sequence(number, priority=priority, max_tokens=1))
    assert [step(one).sequences[0].id for _ in range(3)] == [3, 1, 2]


def test_rows_bound_what_runs() -> None:
    one = scheduler(num_rows=2)
    for number in range(5):
        one.add(sequence(number))
    step(one)
    assert (len(one.running), len(one.waiting)) == (2, 3)


def test_admission_keeps_a_block_for_each_running_sequence() -> None:
    one = scheduler(num_blocks=4)
    one.add(sequence(1, num_prompt_tokens=16))
    one.add(sequence(2, num_prompt_tokens=32))  # 2 of 3 free blocks, and one is kept: just fits
    step(one)
    assert len(one.running) == 2
    other = scheduler(num_blocks=4)
    other.add(sequence(1, num_prompt_tokens=16))
    other.add(sequence(2, num_prompt_tokens=33))
    step(other)
    assert [done.id for done in other.waiting] == [2]


def test_the_last_in_rank_is_preempted_and_recomputed_before_whoever_came_later() -> None:
    one = scheduler(num_blocks=4, max_prefill_tokens=100)
    first, second = sequence(1, 16, max_tokens=40), sequence(2, 16, max_tokens=40)
    one.add(first)
    one.add(second)
    while first.num_tokens + second.num_tokens <= 64:
        step(one)  # each has two blocks, the last ones
    one.add(sequence(3))
    batch = step(one)
    assert batch.num_preemptions == 1 and batch.sequences == [first]
    assert [done.id for done in one.waiting] == [2, 3]
    assert second.row is None and second.num_prefill == second.num_tokens > 32
    num_known = second.num_tokens
    while second.row is None:
        step(one)
    assert second.num_tokens == num_known + 1 and one.running[0] is second
    while one.running:
        step(one)
    assert first.num_generated == second.num_generated == 40
    assert one.cache.num_used_blocks == 0


def test_a_low_priority_is_preempted_before_a_younger_request() -> None:
    one = scheduler(num_blocks=4)
    low, high = sequence(1, 16, priority=0.1, max_tokens=40), sequence(2, 16, priority=0.9, max_tokens=40)
    one.add(low)
    one.add(high)
    while not (batch := step(one)).num_preemptions:
        pass
    assert batch.sequences == [high]


def test_removing_frees_blocks_and_row_wherever_the_sequence_stands() -> None:
    one = scheduler(num_rows=1, max_prefill_tokens=8)
    running, waiting = sequence(1, num_prompt_tokens=30), sequence(2)
    one.add(running)
    one.add(waiting)
    step(one)
    one.remove(waiting)
    one.remove(running)
    assert (one.cache.num_used_blocks, one.running, one.waiting) == (0, [], [])


@st.composite
def loads(draw: st.DrawFn) -> list[tuple[int, Sequence, int | None]]:
    """(step of arrival, sequence, steps until it is cancelled)."""
    return [
        (
            draw(st.integers(0, 12)),
            sequence(
                number,
                draw(st.integers(1, 60)),
                draw(st.integers(1, 40)),
                priority=draw(st.sampled_from([0.2, 0.5, 0.8])),
                output_config=OutputConfig(num_prompt_log_probs=draw(st.sampled_from([None, None, 0]))),
            ),
            draw(st.one_of(st.none(), st.none(), st.integers(0, 15))),
        )
        for number in range(draw(st.integers(1, 7)))
    ]


@given(loads(), st.integers(7, 14), st.integers(1, 4), st.integers(1, 40))
def test_under_any_load_the_budget_holds_and_everyone_ends(
    load: list[tuple[int, Sequence, int | None]], num_blocks: int, num_rows: int, max_prefill_tokens: int
) -> None:
    """Blocks of 7 are the most that one sequence of these can need (60 + 40 - 1 tokens)."""
    one = scheduler(num_blocks, num_rows, max_prefill_tokens=max_prefill_tokens)
    open_ids = {number for number, _ in enumerate(load)}
    for now in range(2000):
        for arrival, new, _ in load:
            if arrival == now:
                one.add(new)
        for arrival, doomed, patience in load:
            if patience is not None and now == arrival + patience and doomed.id in open_ids:
                one.remove(doomed)
                open_ids.discard(doomed.id)
        batch = one.schedule()
        check(one, batch, max_prefill_tokens)
        for done in run(batch):
            if done.is_finished:
                one.remove(done)
                open_ids.discard(done.id)
                assert done.num_generated == done.max_tokens
        if not open_ids:
            break
    assert not open_ids, "someone waits for ever"
    assert one.cache.num_used_blocks == 0  # so no row is held: each has a block at least


def check(one: Scheduler, batch: Batch, max_prefill_tokens: int) -> None:
    cache = one.cache
    assert batch.sequences or not (one.running or one.waiting), "a step that does nothing while there is work"
    assert 0 <= cache.num_free_blocks
    assert len(one.running) == len({running.row for running in one.running})
    needed = sum(num_blocks_for(running.num_tokens) for running in one.running)
    assert needed <= cache.num_used_blocks
    lengths = [len(piece.token_ids) for piece in batch.plan.prefills]
    assert sum(lengths) <= max_prefill_tokens or len(lengths) == 1
    for piece, owner in zip(batch.plan.pieces, batch.sequences, strict=True):
        assert piece.row == owner.row and piece.token_ids == owner.token_ids[piece.start : piece.end]
        assert piece.num_logits >= (piece.end == owner.num_tokens)
    for piece in batch.plan.prefills:
        assert piece.start % one.piece_length == 0 and len(piece.token_ids) <= one.piece_length
