"""The budget of blocks and slots: none is lost and none is given twice."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from handlers.lmi_dist.cached_blocks import Root
from handlers.lmi_dist.kv_cache import KvCache
from tests.fake_runner import FakeRunner


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (160, 10)]
)
def test_blocks_are_rounded_up(num_tokens: int, num_blocks: int) -> None:
    assert KvCache(num_blocks=10, num_slots=1).num_blocks_for(num_tokens) == num_blocks


def test_the_lowest_free_slot_comes_first() -> None:
    cache = KvCache(num_blocks=10, num_slots=4)
    assert [cache.allocate(1) for _ in range(3)] == [0, 1, 2]
    cache.free(1)
    cache.free(0)
    assert [cache.allocate(1) for _ in range(3)] == [0, 1, 3]
    assert not cache.can_allocate(1)


def test_growth_is_charged_by_whole_blocks_and_refused_without_a_change() -> None:
    cache = KvCache(num_blocks=3, num_slots=2)
    slot = cache.allocate(16)
    second_slot = cache.allocate(1)
    assert cache.grow(slot, 16) and cache.num_free_blocks == 1
    assert cache.grow(slot, 17) and cache.num_free_blocks == 0
    assert not cache.grow(second_slot, 17) and cache.num_free_blocks == 0
    cache.free(slot)
    assert cache.grow(second_slot, 17) and cache.num_free_blocks == 1


def test_a_reserve_is_kept_at_admission() -> None:
    cache = KvCache(num_blocks=3, num_slots=3)
    assert cache.can_allocate(32, num_kept=1) and not cache.can_allocate(32, num_kept=2)


def test_a_freed_slot_is_told_before_it_can_be_given_again() -> None:
    runner = FakeRunner()
    runner.states[0] = [1]
    cache = KvCache(num_blocks=2, num_slots=1, slots=runner)
    cache.free(cache.allocate(5))
    assert runner.states == {} and cache.num_used_blocks == 0 and cache.can_allocate(32)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 100)), max_size=60))
def test_free_and_held_blocks_always_sum_to_the_budget(actions: list[tuple[int, int]]) -> None:
    cache = KvCache(num_blocks=12, num_slots=4)
    held_slots: dict[int, int] = {}
    for kind, num_tokens in actions:
        if kind == 0 and cache.can_allocate(num_tokens):
            slot = cache.allocate(num_tokens)
            assert slot not in held_slots
            held_slots[slot] = num_tokens
        elif kind == 1 and held_slots:
            slot = max(held_slots)
            if cache.grow(slot, num_tokens):
                held_slots[slot] = max(held_slots[slot], num_tokens)
        elif kind == 2 and held_slots:
            slot = min(held_slots)
            cache.free(slot)
            del held_slots[slot]

        assert (
            cache.num_free_blocks
            == 12 - sum(cache.num_blocks_for(num) for num in held_slots.values())
            >= 0
        )


def forked(num_tokens: int) -> tuple[KvCache, int, int]:
    """Two slots that share a prompt of a block. Each has written its own tokens after it, up to
    `num_tokens`.
    """
    cache = KvCache(num_blocks=10, num_slots=3, tokens_per_block=4, reuses_prefixes=True)
    first_slot = cache.allocate(4)
    second_slot = cache.allocate(1)
    cache.cover(first_slot, 4)
    cache.store(first_slot, Root(None), [0] * 4, 4)
    cache.adopt(first_slot, second_slot, 4)
    for slot in (first_slot, second_slot):
        assert cache.grow(slot, num_tokens)
        cache.store(slot, Root(None), [0] * 4 + [slot + 1] * (num_tokens - 4), num_tokens // 4 * 4)

    return cache, first_slot, second_slot


def test_a_slot_adopts_full_blocks_and_copies_the_rest_into_its_own() -> None:
    cache, first_slot, second_slot = forked(14)
    last_block = cache.table(second_slot)[-1]
    num_free = cache.num_free_blocks
    cache.adopt(first_slot, second_slot, 14)
    cache.adopt_rest(first_slot, second_slot, 14)

    assert cache.table(second_slot) == [*cache.table(first_slot)[:3], last_block]
    assert cache.copies == [(cache.table(first_slot)[3], last_block)]
    assert cache.num_free_blocks == num_free + 2 == 5

    cache.end_copies()
    cache.free(first_slot)
    cache.free(second_slot)

    assert cache.num_used_blocks == 0


def test_blocks_that_a_fork_has_left_are_taken_from_the_last_to_the_first() -> None:
    cache, first_slot, second_slot = forked(12)
    first, last = cache.table(second_slot)[1:]
    cache.adopt(first_slot, second_slot, 12)
    assert len(cache._idle_blocks) == 2
    slot = cache.allocate(cache.num_free_blocks * 4)
    cache.cover(slot, (cache.num_free_blocks + 7) * 4)
    assert cache.table(slot)[-2:] == [last, first]


def test_blocks_that_shared_ones_replace_are_taken_again_in_their_order() -> None:
    cache = KvCache(num_blocks=4, num_slots=3, tokens_per_block=4, reuses_prefixes=True)
    first_slot = cache.allocate(8)
    second_slot = cache.allocate(8)
    cache.cover(first_slot, 8)
    cache.cover(second_slot, 8)
    own_table = cache.table(second_slot)[:]
    cache.share(second_slot, cache.table(first_slot))
    slot = cache.allocate(8)
    cache.cover(slot, 8)
    assert cache.table(second_slot) == cache.table(first_slot) and cache.table(slot) == own_table
