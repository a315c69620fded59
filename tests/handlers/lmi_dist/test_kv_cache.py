"""The budget of blocks and slots: none is lost and none is given twice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handlers.lmi_dist.kv_cache import KvCache


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (160, 10)])
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
    slot, other = cache.allocate(16), cache.allocate(1)
    assert cache.grow(slot, 16) and cache.num_free_blocks == 1
    assert cache.grow(slot, 17) and cache.num_free_blocks == 0
    assert not cache.grow(other, 17) and cache.num_free_blocks == 0
    cache.free(slot)
    assert cache.grow(other, 17) and cache.num_free_blocks == 1


def test_a_reserve_is_kept_at_admission() -> None:
    cache = KvCache(num_blocks=3, num_slots=3)
    assert cache.can_allocate(32, num_kept=1) and not cache.can_allocate(32, num_kept=2)


def test_a_freed_slot_is_told_before_it_can_be_given_again() -> None:
    told: list[int] = []
    cache = KvCache(num_blocks=2, num_slots=1, on_free=lambda slot: told.append(slot))
    cache.free(cache.allocate(5))
    assert told == [0] and cache.num_used_blocks == 0 and cache.can_allocate(32)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 100)), max_size=60))
def test_free_and_held_blocks_always_sum_to_the_budget(actions: list[tuple[int, int]]) -> None:
    cache = KvCache(num_blocks=12, num_slots=4)
    held: dict[int, int] = {}
    for kind, num_tokens in actions:
        if kind == 0 and cache.can_allocate(num_tokens):
            slot = cache.allocate(num_tokens)
            assert slot not in held
            held[slot] = num_tokens
        elif kind == 1 and held:
            slot = max(held)
            if cache.grow(slot, num_tokens):
                held[slot] = max(held[slot], num_tokens)
        elif kind == 2 and held:
            slot = min(held)
            cache.free(slot)
            del held[slot]
        assert cache.num_free_blocks == 12 - sum(cache.num_blocks_for(num) for num in held.values()) >= 0
