"""Priorities of retention: which idle block is evicted first, and until when a priority holds."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings, strategies as st
from msgspec.structs import replace

from handlers.lmi_dist import Executor
from handlers.lmi_dist.cached_blocks import Root
from handlers.lmi_dist.idle_blocks import MAX_STALE, IdleBlocks, Retention, retentions
from handlers.lmi_dist.kv_cache import KvCache
from lmi.errors import Unsupported
from lmi.executor import (
    DEFAULT_RETENTION_PRIORITY,
    ExecutorConfig,
    KvCacheConfig,
    KvCacheRetentionConfig,
    SamplingConfig,
    TokenRangeRetentionConfig,
)
from tests.fake_runner import FakeRunner, SharingRunner
from tests.handlers.lmi_dist.test_executor import ask, collect, joined
from tests.handlers.lmi_dist.test_prefix_reuse import SIZE, Engine

DEFAULT = DEFAULT_RETENTION_PRIORITY
SEEDED = SamplingConfig(seed=3)


def prompt_priority(priority: int, duration_ms: int | None = None) -> KvCacheRetentionConfig:
    """A priority for the whole prompt."""
    return KvCacheRetentionConfig((TokenRangeRetentionConfig(0, None, priority, duration_ms),))


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def known(engine: Engine, *numbers: int) -> dict[int, int]:
    """How many blocks of each prompt the cache has."""
    root = Root("us")
    return {number: len(engine.cache.find(root, [number] * 63, 63).blocks) for number in numbers}


def fill(engine: Engine, number: int, retention: KvCacheRetentionConfig | None = None) -> None:
    """Let a prompt of three full blocks and a part of a fourth pass."""
    engine.add((number,) * 63, max_tokens=1, retention=retention)
    engine.run()


def test_a_block_has_what_its_request_says_of_its_first_token() -> None:
    config = KvCacheRetentionConfig(
        (TokenRangeRetentionConfig(0, 20, 90), TokenRangeRetentionConfig(33, 70, 10, 500)), 50, 2000
    )
    block_retentions = retentions(config, 96, 120, 16)
    first = Retention(90)
    low = Retention(10, 0.5)
    generated = Retention(50, 2.0)
    assert block_retentions == [first, first, None, low, low, None, generated, generated]


def test_a_range_without_an_end_ends_with_the_prompt() -> None:
    assert retentions(prompt_priority(80), 40, 60, 16) == [Retention(80)] * 3 + [Retention(DEFAULT)]


def test_the_lowest_priority_goes_first_and_then_what_was_idle_longest() -> None:
    engine = Engine(num_blocks=16)
    fill(engine, 1)
    fill(engine, 2, prompt_priority(90))
    fill(engine, 3, prompt_priority(5))
    fill(engine, 4)
    fill(engine, 5)
    assert known(engine, 1, 2, 3, 4, 5) == {1: 3, 2: 3, 3: 0, 4: 3, 5: 3}

    fill(engine, 6)
    assert known(engine, 1, 2, 4, 5, 6) == {1: 0, 2: 3, 4: 3, 5: 3, 6: 3}

    for number in range(7, 20):
        fill(engine, number)

    assert known(engine, 2, 16, 17, 18, 19) == {2: 3, 16: 0, 17: 3, 18: 3, 19: 3}

    engine.evict_all()


def test_a_block_is_kept_as_long_as_one_of_those_below_it() -> None:
    engine = Engine(num_blocks=8)
    keep_end = KvCacheRetentionConfig(
        (TokenRangeRetentionConfig(0, 32, 0), TokenRangeRetentionConfig(32, None, 90))
    )
    fill(engine, 1, keep_end)
    for number in range(2, 6):
        fill(engine, number)

    assert known(engine, 1) == {1: 3}


def test_a_priority_ends_when_its_block_was_idle_for_the_duration() -> None:
    clock = Clock()
    engine = Engine(num_blocks=8, now_s=clock)
    fill(engine, 1, prompt_priority(90, duration_ms=1000))
    clock.now_s += 0.9
    fill(engine, 2)
    fill(engine, 3)
    assert known(engine, 1, 3) == {1: 3, 3: 3}

    fill(engine, 1)
    clock.now_s += 0.9
    fill(engine, 4)
    assert known(engine, 1, 4) == {1: 3, 4: 3}, "a use begins the duration anew"

    clock.now_s += 0.1
    fill(engine, 5)

    assert known(engine, 1, 4, 5) == {1: 0, 4: 3, 5: 3}


def test_a_low_priority_ends_too() -> None:
    clock = Clock()
    engine = Engine(num_blocks=8, now_s=clock)
    fill(engine, 1)
    fill(engine, 2, prompt_priority(0, duration_ms=1000))
    clock.now_s += 1.0
    fill(engine, 3)
    assert known(engine, 1, 2, 3) == {1: 0, 2: 3, 3: 3}


def test_a_priority_that_ended_does_not_come_back_with_a_use() -> None:
    clock = Clock()
    engine = Engine(num_blocks=8, now_s=clock)
    fill(engine, 1, prompt_priority(90, duration_ms=1000))
    clock.now_s += 1.0
    fill(engine, 1)
    fill(engine, 2)
    fill(engine, 3)
    assert known(engine, 1, 2, 3) == {1: 0, 2: 3, 3: 3}


def test_the_last_request_that_says_something_of_a_block_counts() -> None:
    engine = Engine(num_blocks=8)
    fill(engine, 1, prompt_priority(90))
    fill(engine, 1)
    fill(engine, 2)
    fill(engine, 3)
    assert known(engine, 1) == {1: 3}, "the second request says nothing"
    fill(engine, 1, prompt_priority(0))
    fill(engine, 4)
    assert known(engine, 1, 3, 4) == {1: 1, 3: 3, 4: 3}, "no more had to go"


def test_the_answer_has_a_priority_of_its_own() -> None:
    engine = Engine(num_blocks=9)
    [first] = engine.add((1,) * 16, max_tokens=40, retention=KvCacheRetentionConfig((), 90))
    engine.run()
    for number in range(2, 5):
        fill(engine, number)

    match = engine.cache.find(Root("us"), first.token_ids, len(first.token_ids))
    assert len(match.blocks) * SIZE + match.num_partial == 55


def test_a_block_that_is_filled_anew_has_no_priority_left() -> None:
    engine = Engine(num_blocks=4)
    fill(engine, 1, prompt_priority(90))
    fill(engine, 2)
    fill(engine, 3)
    assert known(engine, 1, 2, 3) == {1: 0, 2: 0, 3: 3}
    assert engine.cache._idle_blocks._retentions == {}


def test_a_cache_that_is_never_full_keeps_nothing_of_former_uses() -> None:
    engine = Engine(num_blocks=100)
    for _ in range(10 * MAX_STALE):
        fill(engine, 1, prompt_priority(90, duration_ms=100_000))

    idle = engine.cache._idle_blocks
    assert max(len(idle._heap), len(idle._ends)) <= 2 * len(idle) + MAX_STALE + 1


class WatchedCache(KvCache):
    """Keeps its own account of priorities and of last uses, and compares each eviction with it."""

    def __init__(self, num_blocks: int, num_slots: int, clock: Clock) -> None:
        super().__init__(num_blocks, num_slots, SIZE, reuses_prefixes=True, now_s=clock)
        self.clock = clock
        self.said: dict[int, Retention] = {}
        # Time, and a number that grows
        self.idle_since: dict[int, tuple[float, int]] = {}
        self.num_evictions = self.num_releases = 0

    def retain(self, slot: int, said: Sequence[Retention | None], last: int | None) -> None:
        super().retain(slot, said, last)
        blocks = self.table(slot)[: len(said)]
        blocks[-1:] = [last] if last is not None else blocks[-1:]
        for block, retention in zip(blocks, said, strict=True):
            if retention is not None and block in self._tree:
                self.said[block] = retention

            if retention is not None and block in self.idle_since:
                self._note_idle(block)

    def _priority(self, block: int) -> int:
        retention = self.said.get(block, Retention(DEFAULT))
        since_s = self.idle_since[block][0]
        is_over = (
            retention.duration_s is not None and self.clock() >= since_s + retention.duration_s
        )
        return DEFAULT if is_over else retention.priority

    def _evict(self) -> int:
        ranks = {
            block: (self._priority(block), self.idle_since[block][1])
            for block in self._tree._places
            if not self._num_references[block] and not self._tree.has_children(block)
        }
        block = super()._evict()

        assert self._num_references[block] == 0, "somebody uses it"
        assert ranks[block] == min(ranks.values())

        self.said.pop(block, None)
        del self.idle_since[block]
        self.num_evictions += 1
        return block

    def _hold(self, block: int) -> None:
        if not self._num_references[block]:
            if self._priority(block) == DEFAULT:
                self.said.pop(block, None)

            del self.idle_since[block]

        super()._hold(block)

    def _release(self, block: int) -> None:
        super()._release(block)
        if not self._num_references[block]:
            if block in self._tree:
                self._note_idle(block)
            else:
                self.said.pop(block, None)

    def _note_idle(self, block: int) -> None:
        self.num_releases += 1
        self.idle_since[block] = self.clock(), self.num_releases


RETENTIONS = (
    None,
    None,
    prompt_priority(90),
    prompt_priority(90, 1000),
    prompt_priority(5, 300),
    KvCacheRetentionConfig(
        (TokenRangeRetentionConfig(16, 40, 60), TokenRangeRetentionConfig(40, None, 10)), 100, 700
    ),
    KvCacheRetentionConfig((), 0),
)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.integers(9, 30), st.integers(1, 6), st.integers(1, 120))
def test_each_eviction_takes_the_lowest_priority_of_what_nobody_uses(
    seed: int, num_blocks: int, num_slots: int, max_prefill_tokens: int
) -> None:
    """Prompts from few beginnings with retentions, preemptions and a clock that moves, in a small
    cache.
    """
    draw = random.Random(seed)
    clock = Clock()
    engine = Engine(num_blocks, num_slots, max_prefill_tokens)
    engine.cache = engine.scheduler.cache = WatchedCache(num_blocks, num_slots, clock)
    stems = [tuple(draw.choices(range(5), k=draw.choice([10, 16, 40, 64]))) for _ in range(3)]
    for _ in range(draw.randint(10, 60)):
        stem = draw.choice(stems)
        prompt = stem[: draw.randint(1, len(stem))] + tuple(
            draw.choices(range(5), k=draw.randint(0, 30))
        )
        engine.add(
            prompt,
            max_tokens=draw.randint(1, 40),
            num_sequences=draw.choice([1, 1, 3]),
            retention=draw.choice(RETENTIONS),
        )
        for _ in range(draw.randint(0, 20)):
            engine.step()

        clock.now_s += draw.choice([0.0, 0.2, 0.5])

    engine.run()
    engine.evict_all()


@pytest.mark.parametrize("max_kv_cache_tokens", [None, 320])
def test_answers_do_not_depend_on_retention_also_after_preemptions(
    max_kv_cache_tokens: int | None,
) -> None:
    draw = random.Random(11)
    stems = [tuple(draw.choices(range(50), k=60)) for _ in range(3)]
    prompts = [
        draw.choice(stems)[: draw.randint(20, 60)] + tuple(draw.choices(range(50), k=9))
        for _ in range(24)
    ]
    requests = [
        ask(
            *prompt,
            max_tokens=30,
            sampling_config=SEEDED,
            kv_cache_retention_config=draw.choice(RETENTIONS),
        )
        for prompt in prompts
    ]
    config = ExecutorConfig(
        max_batch_size=6, kv_cache_config=KvCacheConfig(max_tokens=max_kv_cache_tokens)
    )
    plain = ExecutorConfig(
        max_batch_size=1, kv_cache_config=KvCacheConfig(enable_block_reuse=False)
    )
    with Executor(SharingRunner(), config) as executor:
        ids = executor.enqueue_requests(requests)
        got = collect(executor, len(ids))
        stats = executor.get_latest_iteration_stats()

    assert (sum(request_id.num_preemptions for request_id in stats) > 0) == (
        max_kv_cache_tokens is not None
    )
    assert stats[-1].kv_cache_stats.reused_blocks > 0

    without = [replace(request, kv_cache_retention_config=None) for request in requests]
    with Executor(SharingRunner(), plain) as executor:
        expected = collect(executor, len(executor.enqueue_requests(without)))

    assert [joined(got[request_id])[0] for request_id in ids] == [
        joined(request_id)[0] for _, request_id in sorted(expected.items())
    ]


def test_an_engine_without_shared_blocks_refuses_priorities() -> None:
    request = ask(kv_cache_retention_config=prompt_priority(90))
    without_reuse = ExecutorConfig(kv_cache_config=KvCacheConfig(enable_block_reuse=False))
    for runner, config in ((FakeRunner(), ExecutorConfig()), (SharingRunner(), without_reuse)):
        with Executor(runner, config) as executor:
            assert not executor.capabilities.kv_cache_retention
            with pytest.raises(
                Unsupported, match="^kv_cache_retention_config is not supported here"
            ):
                executor.enqueue_request(request)

    with Executor(SharingRunner()) as executor:
        assert executor.capabilities.kv_cache_retention
        collect(executor, len(executor.enqueue_requests([request])))


def test_blocks_that_are_idle_for_the_first_time_go_in_their_order() -> None:
    idle = IdleBlocks()
    for block in (3, 1, 2):
        idle.add(block, is_evictable=block != 1)

    assert [idle.pop(), idle.pop()] == [3, 2] and list(idle._idle) == [1]
    idle.allow(1)
    assert idle.pop() == 1 and len(idle) == 0
