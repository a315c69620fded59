"""The engine within the memory that is left: before it loads a model, and while others of its group
take more.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from handlers.lmi_dist.cached_blocks import Root
from handlers.lmi_dist.executor import EmbeddedExecutor
from handlers.lmi_dist.facts import read_facts
from handlers.lmi_dist.kv_cache import KvCache
from handlers.lmi_dist.limits import choose_limits
from handlers.lmi_dist.loading import load_runner
from handlers.lmi_dist.memory import LEAST_MARGIN, MemoryWatch, need_of
from handlers.lmi_dist.native.records import TOKENS_PER_BLOCK
from handlers.lmi_dist.native_runner import weight_bytes
from handlers.lmi_dist.plan import Chunk, Plan
from handlers.lmi_dist.runner import BlockMemory
from lmi.errors import ModelUnusable
from lmi.executor import ErrorKind, OutputConfig, Request, Response, SamplingConfig
from lmi.settings.config import EngineConfig
from lmi.shared import machine
from lmi.shared.machine import MB
from tests.fake_runner import FakeRunner, Floats, SharingRunner
from tests.machine import wait_until
from tests.tiny_models import tiny_model

BLOCK_BYTES = MB


class FakeMemory:
    """Blocks of a megabyte, and steps that take `row_bytes` for each row with logits."""

    block_bytes = BLOCK_BYTES

    def __init__(self, row_bytes: int = MB) -> None:
        self.given_back: list[int] = []
        self._row_bytes = row_bytes

    def step_bytes(self, num_rows: int, num_logits: int) -> int:
        return num_logits * self._row_bytes

    def give_back(self, blocks: Sequence[int]) -> None:
        self.given_back += blocks


class Machine:
    """A container that has so much memory for blocks. Its other processes take some of it when a
    test says so.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.now_s = 0.0
        self.cache: KvCache | None = None

    def _free_bytes(self) -> int:
        num_written = 0 if self.cache is None else self.cache.num_blocks - self.cache.num_new
        return LEAST_MARGIN + (self.num_blocks - num_written) * BLOCK_BYTES

    def watch(self, cache: KvCache, memory: BlockMemory) -> MemoryWatch:
        self.cache = cache
        return MemoryWatch(
            cache,
            memory,
            0,
            memory_bytes=64 * MB,
            free_bytes=self._free_bytes,
            now_s=lambda: self.now_s,
        )

    def later(self, watch: MemoryWatch, num_blocks: int) -> None:
        """Let the other processes leave memory for so many blocks in all, and look."""
        self.num_blocks = num_blocks
        self.now_s += 1.0
        watch.look()


def taken(cache: KvCache, num_blocks: int) -> int:
    """A slot that holds so many blocks."""
    slot = cache.allocate(num_blocks * cache.tokens_per_block)
    cache.cover(slot, num_blocks * cache.tokens_per_block)
    return slot


# Blocks.


def test_blocks_that_nobody_has_used_for_long_give_their_memory_back() -> None:
    clock = [0.0]
    cache = KvCache(10, 4, reuses_prefixes=True, now_s=lambda: clock[0])
    memory = FakeMemory()
    watch = MemoryWatch(
        cache, memory, 0, idle_timeout_s=60, free_bytes=lambda: 1000 * MB, now_s=lambda: clock[0]
    )
    # Nothing was written, so there is nothing to look for
    assert watch.idle_look_s is None

    for first_token, num_blocks in ((0, 3), (1000, 2)):
        watch.look()
        slot = taken(cache, num_blocks)
        token_ids = list(range(first_token, first_token + 16 * num_blocks))
        cache.store(slot, Root(None), token_ids, len(token_ids))
        cache.free(slot)
        clock[0] += 40

    # The first prompt is idle for 80 s, the second one for 40 s
    assert watch.idle_look_s == 60
    watch.look_while_idle()
    assert len(memory.given_back) == 3
    assert cache.find(Root(None), list(range(48)), 48).blocks == []
    assert len(cache.find(Root(None), list(range(1000, 1032)), 32).blocks) == 2

    # A block that is used in the meantime stays
    cache.free(cache.allocate(32, cache.find(Root(None), list(range(1000, 1032)), 32).blocks))
    clock[0] += 40
    watch.look_while_idle()
    assert len(memory.given_back) == 3

    clock[0] += 40
    watch.look_while_idle()
    assert len(memory.given_back) == 5
    assert cache.num_new == 10 and watch.idle_look_s is None


def test_blocks_that_hold_nothing_are_given_back_when_no_step_was_made_for_long() -> None:
    clock = [0.0]
    cache = KvCache(10, 4, now_s=lambda: clock[0])
    memory = FakeMemory()
    watch = MemoryWatch(
        cache, memory, 0, idle_timeout_s=60, free_bytes=lambda: 1000 * MB, now_s=lambda: clock[0]
    )
    watch.look()
    cache.free(taken(cache, 3))

    clock[0] += 59
    watch.look_while_idle()
    assert memory.given_back == []

    clock[0] += 1
    watch.look_while_idle()
    assert len(memory.given_back) == 3


def test_an_engine_without_requests_gives_the_memory_of_its_cache_back() -> None:
    config = EngineConfig(max_num_sequences=4, idle_cache_timeout_s=0.2)
    with EmbeddedExecutor(tiny_model("llama_wide"), config) as executor:
        request_id = executor.enqueue_request(Request(tuple(range(3, 203)), max_tokens=4))
        executor.await_responses(request_id, 60)

        cache = executor._cache
        wait_until(lambda: cache.num_new == cache.num_blocks, "the memory is given back")


def test_an_engine_tells_what_it_holds_of_the_memory(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    folder = tiny_model("llama_wide")
    num_tokens = 1024
    config = EngineConfig(dtype="fp32", max_num_sequences=4, max_kv_cache_tokens=num_tokens)
    facts = read_facts(str(folder))
    with EmbeddedExecutor(folder, config) as executor:
        before = executor.memory_use
        executor.await_responses(
            executor.enqueue_request(Request(tuple(range(3, 203)), max_tokens=4)), 60
        )
        after = executor.memory_use

    assert before is not None and after is not None
    assert re.search(r"memory in use: weights \d+ MB, KV cache 0 MB of \d+ MB, the", caplog.text)
    estimate = need_of(facts, config, partial(weight_bytes, facts, config))
    assert 0.9 <= before.weights / estimate.weights <= 1.1

    assert before.kv_cache_touched == 0
    block_bytes = before.kv_cache_reserved * TOKENS_PER_BLOCK // num_tokens
    num_blocks = -(-203 // TOKENS_PER_BLOCK)
    assert after.kv_cache_touched == num_blocks * block_bytes
    assert after.weights == before.weights


def test_blocks_without_memory_are_not_free() -> None:
    cache = KvCache(num_blocks=10, num_slots=4)
    memory = FakeMemory()
    Machine(num_blocks=4).watch(cache, memory).look()
    assert cache.num_free_blocks == 4
    assert cache.can_allocate(4 * 16) and not cache.can_allocate(5 * 16)


def test_a_block_that_was_written_once_needs_no_more_memory() -> None:
    cache = KvCache(num_blocks=10, num_slots=4)
    memory = FakeMemory()
    here = Machine(num_blocks=4)
    watch = here.watch(cache, memory)
    watch.look()
    cache.free(taken(cache, 3))

    here.later(watch, 4)
    assert cache.num_free_blocks == 4
    assert memory.given_back == []


def test_blocks_that_nobody_uses_are_given_back_when_memory_is_short() -> None:
    cache = KvCache(num_blocks=10, num_slots=4, reuses_prefixes=True)
    memory = FakeMemory()
    here = Machine(num_blocks=10)
    watch = here.watch(cache, memory)
    watch.look()
    kept_slot = taken(cache, 3)
    cached = taken(cache, 3)
    cache.store(cached, Root(None), list(range(48)), 48)
    cache.free(cached)

    here.later(watch, 4)
    assert len(memory.given_back) == 2 and not set(memory.given_back) & set(cache.table(kept_slot))
    assert cache.num_free_blocks == 1 and cache.num_new == 6
    assert len(cache.find(Root(None), list(range(48)), 48).blocks) == 1, (
        "the beginning of a prompt is kept longest"
    )

    here.later(watch, 100)
    assert cache.num_free_blocks == 7


def test_a_step_that_would_take_what_is_left_is_refused_and_a_smaller_one_is_not() -> None:
    cache = KvCache(num_blocks=10, num_slots=4)
    memory = FakeMemory()
    watch = Machine(num_blocks=4).watch(cache, memory)
    watch.check(Plan([], [Chunk(0, 0, [1] * 9, num_logits=1)]))
    with pytest.raises(MemoryError, match="a step needs 39 MB more, and 20 MB are left"):
        watch.check(Plan([], [Chunk(0, 0, [1] * 40, num_logits=40)]))

    watch.check(Plan([], [Chunk(0, 0, [1] * 9, num_logits=9)]))


# Requests.


def ended(executor: EmbeddedExecutor, num_requests: int) -> dict[int, list[Response]]:
    """The responses of all requests, by request."""
    responses: dict[int, list[Response]] = {}
    num_ended = 0
    while num_ended < num_requests:
        for response in executor.await_responses():
            responses.setdefault(response.request_id, []).append(response)
            num_ended += response.error is not None or response.result.is_final

    return responses


def ask(num_tokens: int, first: int = 1, max_tokens: int = 4, **fields: object) -> Request:
    return Request((first, *[2] * (num_tokens - 1)), max_tokens, streaming=True, **fields)  # type: ignore[arg-type]


@pytest.fixture
def runner() -> SharingRunner:
    runner = SharingRunner()
    runner.memory = FakeMemory(row_bytes=0)
    return runner


class EngineBesideOthers(EmbeddedExecutor):
    """An engine in a container."""

    def __init__(self, here: Machine, runner: FakeRunner, config: EngineConfig) -> None:
        self._here = here
        super().__init__(runner, config)

    def _new_watch(self, *sizes: object) -> MemoryWatch:
        assert self._runner.memory is not None
        return self._here.watch(self._cache, self._runner.memory)


class RunnerBesideOthers(SharingRunner):
    """Each of its steps takes a second, and after ten of them other processes leave memory for ten
    blocks.
    """

    def __init__(self, here: Machine) -> None:
        super().__init__()
        self.memory = FakeMemory(row_bytes=0)
        self._here = here

    def forward(self, plan: Plan) -> Floats:
        if len(self.plans) == 10:
            self._here.num_blocks = 10

        self._here.now_s += 1.0
        return super().forward(plan)


def test_a_request_that_finds_no_memory_ends_and_smaller_ones_and_the_engine_go_on(
    runner: SharingRunner,
) -> None:
    config = EngineConfig(max_kv_cache_tokens=512)
    with EngineBesideOthers(Machine(num_blocks=4), runner, config) as executor:
        large = executor.enqueue_request(ask(200))
        small = executor.enqueue_requests([ask(30, first) for first in range(3, 9)])
        responses = ended(executor, 7)

        assert executor.can_enqueue_requests()

    [response] = responses[large]
    assert response.error is not None and response.error.kind is ErrorKind.OUT_OF_MEMORY
    assert (
        response.error.message
        == "out of memory: 208 tokens need keys and values, and memory is left for 64"
    )
    assert all(
        small_response.error is None
        for request_id in small
        for small_response in responses[request_id]
    )


def test_sequences_that_lose_their_memory_wait_for_others_and_get_the_same_answer() -> None:
    """As many blocks as all need are there at first, and then room for two of the four
    sequences.
    """
    sampling = SamplingConfig(seed=1)
    requests = [ask(40, first, max_tokens=40, sampling_config=sampling) for first in range(3, 7)]
    config = EngineConfig(max_kv_cache_tokens=512)
    with EmbeddedExecutor(SharingRunner(), config) as executor:
        alone = ended_tokens(executor, requests)

    here = Machine(num_blocks=32)
    runner = RunnerBesideOthers(here)
    with EngineBesideOthers(here, runner, config) as executor:
        assert ended_tokens(executor, requests) == alone
        assert sum(stats.num_preemptions for stats in executor.get_latest_iteration_stats()) > 0

    assert isinstance(runner.memory, FakeMemory) and runner.memory.given_back


def ended_tokens(executor: EmbeddedExecutor, requests: list[Request]) -> list[list[int]]:
    ids = executor.enqueue_requests(requests)
    responses = ended(executor, len(ids))
    return [
        [token for response in responses[number] for token in response.result.output_token_ids[0]]
        for number in ids
    ]


# The load.


def test_what_a_model_needs_is_known_before_it_is_read() -> None:
    facts = read_facts(str(tiny_model("llama")))
    stored = Path(facts.path, "model.safetensors").stat().st_size
    for config, least, most in (
        (EngineConfig(), 0.8, 1.3),
        (EngineConfig(quantize="int8"), 0.2, 0.6),
        (EngineConfig(quantize="int4"), 0.1, 0.5),
    ):
        need = need_of(facts, config, partial(weight_bytes, facts, config))
        assert least * stored < need.weights < most * stored


def test_a_model_that_does_not_fit_is_refused_with_the_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(machine.SHARE, str(40 * MB))
    monkeypatch.setattr(
        machine, "memory_limit", lambda *_: machine.MemoryLimit(90 * MB, "/groups/memory.max")
    )
    with pytest.raises(
        ModelUnusable, match=r"needs \d+ MB .*40 MB are left for it of 90 MB \(/groups/memory.max\)"
    ):
        load_runner(str(tiny_model("llama")), EngineConfig(), lambda stage, share: None)


def test_the_cache_takes_what_the_model_leaves() -> None:
    assert (
        choose_limits(
            EngineConfig(), 4096, 16, token_bytes=100, device_bytes=1 << 40, room_bytes=320_000
        ).num_cache_tokens
        == 3200
    )

    assert (
        choose_limits(
            EngineConfig(), 4096, 16, token_bytes=100, device_bytes=1 << 40, room_bytes=1 << 40
        ).num_cache_tokens
        == 64 * 2048
    )


def test_a_cache_that_an_operator_wants_larger_than_the_memory_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = EngineConfig(max_kv_cache_tokens=4096)
    assert (
        choose_limits(
            config, 4096, 16, token_bytes=100, device_bytes=1 << 40, room_bytes=320_000
        ).num_cache_tokens
        == 4096
    )
    assert "option.max_kv_cache_tokens=4096 is more than fits into memory now, 3200" in caplog.text


def test_the_log_says_what_the_model_takes_of_the_memory(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        load_runner(str(tiny_model("llama")), EngineConfig(), lambda stage, share: None)

    assert any(
        message.startswith("memory: weights ") and "MB are free" in message
        for message in caplog.messages
    )


def test_memory_that_is_given_back_is_written_anew() -> None:
    """The pool of the native kernels, with prompts whose log-probs need many rows."""
    model = str(tiny_model("llama"))
    output = OutputConfig(num_prompt_log_probs=0)
    request = Request(
        (1, *range(5, 100)), 8, sampling_config=SamplingConfig(seed=1), output_config=output
    )
    with EmbeddedExecutor(model, EngineConfig()) as executor:
        first = ended_tokens(executor, [request])
        # noqa: SLF001
        cache = executor._cache
        memory = executor._runner.memory
        assert memory is not None

        blocks = cache.give_back(1000)
        memory.give_back(blocks)
        cache.withhold(0)

        assert blocks
        assert ended_tokens(executor, [request]) == first
