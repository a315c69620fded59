"""The executor around vLLM's steps: order, memory, and harmful requests."""

from __future__ import annotations

import gc
import math
from dataclasses import replace
from typing import Any

import pytest

from lmi.errors import InvalidRequest
from lmi.executor import (
    Executor,
    GuidedDecodingParams,
    GuideType,
    IterationStats,
    LoraConfig,
    OutputConfig,
    Request,
    SamplingConfig,
)
from tests.handlers.vllm.asking import (
    CONTEXT_LENGTH,
    MAX_NUM_SEQUENCES,
    PROMPT,
    TIMEOUT_S,
    TOKENS_PER_BLOCK,
    ask,
    finals,
    result,
    start,
    tokens,
    up_to_a_tie,
)

pytestmark = pytest.mark.vllm


def statistics(engine: Executor, requests: list[Request]) -> list[IterationStats]:
    """The statistics of every step until all requests have ended."""
    engine.get_latest_iteration_stats()
    finals(engine, engine.enqueue_requests(requests))
    return engine.get_latest_iteration_stats()


def test_an_urgent_request_overtakes_those_that_wait_for_the_one_free_place(
    engine: Executor,
) -> None:
    long = [ask(max_tokens=115)] * (MAX_NUM_SEQUENCES - 1)
    *busy, before = engine.enqueue_requests([*long, ask(max_tokens=100, streaming=True)])

    assert engine.await_responses(before, TIMEOUT_S), "all places are taken"

    short = [ask(max_tokens=2, priority=priority) for priority in (0.5, 0.5, 0.0, 0.51)]
    *waiting, least, urgent = engine.enqueue_requests(short)
    ended = list(finals(engine, [*busy, before, *waiting, least, urgent]))

    assert [request_id for request_id in ended if request_id not in busy] == [
        before,
        urgent,
        *waiting,
        least,
    ]


def test_statistics_tell_what_the_cache_holds(engine: Executor) -> None:
    steps = statistics(engine, [ask(input_token_ids=(11,) * 200, max_tokens=100)])
    caches = [step.kv_cache_stats for step in steps]
    assert engine.info.max_kv_cache_tokens == CONTEXT_LENGTH, "what it was started with"

    for cache in caches:
        assert (cache.max_num_blocks, cache.tokens_per_block) == (
            CONTEXT_LENGTH // TOKENS_PER_BLOCK,
            TOKENS_PER_BLOCK,
        )
        assert cache.used_num_blocks + cache.free_num_blocks == cache.max_num_blocks

    assert [cache.used_num_blocks for cache in (caches[0], caches[-2], caches[-1])] == [2, 3, 0]
    assert sum(step.num_preemptions for step in steps) == 0


def test_the_statistics_of_requests_are_kept_where_they_are_asked_for() -> None:
    with start(request_stats_max_iterations=100) as engine:
        few, many = engine.enqueue_requests([ask(max_tokens=2), ask(max_tokens=4)])
        finals(engine, [few, many])
        steps = engine.get_latest_request_stats()

        assert engine.get_latest_request_stats() == [], "they are drained"

    stages = [
        [
            (request_stats.stage, request_stats.num_generated_tokens)
            for request_stats in step.request_stats
            if request_stats.id == many
        ]
        for step in steps
    ]

    assert [stage for stage in stages if stage] == [
        *([("GENERATION_IN_PROGRESS", num)] for num in (1, 2, 3)),
        [("GENERATION_COMPLETE", 4)],
    ]
    assert {request_stats.id for step in steps for request_stats in step.request_stats} == {
        few,
        many,
    }


def test_nobody_s_statistics_are_kept_where_nobody_asks(engine: Executor) -> None:
    tokens(engine)
    assert engine.get_latest_request_stats() == []


def test_the_times_of_a_request_and_the_tokens_that_it_reused(engine: Executor) -> None:
    prompt = tuple(range(20, 20 + 2 * TOKENS_PER_BLOCK))
    output = OutputConfig(return_perf_metrics=True)
    first, again = (
        result(engine, input_token_ids=prompt, max_tokens=3, output_config=output) for _ in range(2)
    )
    for times in (first.request_perf_metrics, again.request_perf_metrics):
        assert times is not None and times.first_scheduled_time is not None
        assert times.first_token_time is not None and times.last_token_time is not None
        assert (
            times.arrival_time
            <= times.first_scheduled_time
            <= times.first_token_time
            < times.last_token_time
        )

    assert first.request_perf_metrics.num_reused_tokens == 0  # type: ignore[union-attr]
    assert again.request_perf_metrics.num_reused_tokens == TOKENS_PER_BLOCK  # type: ignore[union-attr]


def test_a_prompt_that_vllm_has_cached_tells_it_and_a_salt_keeps_it_apart(engine: Executor) -> None:
    prompt = tuple(range(40, 40 + 2 * TOKENS_PER_BLOCK))
    salts = (None, "alice", None, "alice", "bob")
    nums_cached = [
        result(engine, input_token_ids=prompt, max_tokens=2, cache_salt=salt).num_cached_tokens
        for salt in salts
    ]
    assert nums_cached == [0, 0, TOKENS_PER_BLOCK, TOKENS_PER_BLOCK, 0]


class FailingOnce:
    """vLLM's engine, except for one step that raises: the first in which a request that has already
    run waits.
    """

    def __init__(self, engine: Any, sequences: dict[str, Any]) -> None:
        self._engine = engine
        self._sequences = sequences
        self.preempted = set[int]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self) -> Any:
        running = self._engine.load().running
        begun = {
            sequence.id
            for name, sequence in self._sequences.items()
            if name not in running and sequence.num_generated
        }
        if begun and not self.preempted:
            self.preempted = begun
            raise RuntimeError("one step fails")

        return self._engine.step()


def test_a_step_that_raises_ends_preempted_requests_too_and_repeats_nothing(engine: Any) -> None:
    prompts = [(11 + number,) * 100 for number in range(MAX_NUM_SEQUENCES)]
    real = engine._engine
    engine._engine = failing = FailingOnce(real, engine._known)
    ids = engine.enqueue_requests(
        [ask(input_token_ids=prompt, max_tokens=120, streaming=True) for prompt in prompts]
    )
    ended = finals(engine, ids)
    engine._engine = real

    assert failing.preempted <= set(ids) and failing.preempted
    assert all("one step fails" in ended[request_id].error_msg for request_id in ids)
    assert len(tokens(engine, max_tokens=4)) == 4


class Merging:
    """vLLM's engine, but one output holds two steps, as those of an event loop do when they are not
    taken in time.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self) -> Any:
        [first] = self._engine.step()
        [second] = self._engine.step()
        return [replace(second, token_ids=first.token_ids + second.token_ids)]


def test_tokens_of_steps_that_come_together_are_all_counted(engine: Any) -> None:
    real = engine._engine
    engine._engine = Merging(real)
    finals(engine, [engine.enqueue_request(ask(max_tokens=6))])
    engine._engine = real
    stats = engine.get_latest_iteration_stats()
    assert sum(stat.num_context_tokens for stat in stats) == len(PROMPT)
    # The first token comes with the prompt
    assert sum(stat.num_generation_tokens for stat in stats) == 5


def test_preempted_requests_end_with_the_tokens_they_have_alone_and_are_counted(
    engine: Executor,
) -> None:
    prompts = [(11 + number,) * 100 for number in range(MAX_NUM_SEQUENCES)]
    output = OutputConfig(num_top_log_probs=2)
    alone = [
        result(engine, input_token_ids=prompt, max_tokens=120, output_config=output)
        for prompt in prompts
    ]
    engine.get_latest_iteration_stats()
    ids = engine.enqueue_requests(
        [ask(input_token_ids=prompt, max_tokens=120) for prompt in prompts]
    )
    ended = finals(engine, ids)
    num_preemptions = sum(step.num_preemptions for step in engine.get_latest_iteration_stats())
    assert num_preemptions > 0, "the cache was too large"

    for request_id, expected in zip(ids, alone, strict=True):
        got = ended[request_id].result
        assert got is not None and expected.top_log_probs is not None, ended[request_id].error_msg

        sure = up_to_a_tie(expected.output_token_ids[0], expected.top_log_probs[0])
        assert len(got.output_token_ids[0]) == 120 and len(sure) > 30
        assert got.output_token_ids[0][: len(sure)] == sure


# Values that would end vLLM or make it hang.

WRONG: list[tuple[str, dict[str, Any]]] = [
    ("input_token_ids", {"input_token_ids": (11, True)}),
    ("input_token_ids", {"input_token_ids": (11, 12.0)}),
    ("input_token_ids", {"input_token_ids": (11, "12")}),
    ("input_token_ids", {"input_token_ids": (11, None)}),
    ("input_token_ids", {"input_token_ids": (11, -1)}),
    ("wrong type.* ints", {"input_token_ids": (11, 2**70)}),
    ("max_tokens", {"max_tokens": 2.5}),
    ("max_tokens", {"max_tokens": True}),
    ("streaming", {"streaming": "yes"}),
    ("end_id", {"end_id": "0"}),
    ("end_ids", {"end_ids": (1.5,)}),
    ("ignore_eos", {"ignore_eos": "yes"}),
    ("stop_words", {"stop_words": ((True,),)}),
    ("bad_words", {"bad_words": (("6",),)}),
    ("embedding_bias", {"embedding_bias": ((6, math.nan),)}),
    ("embedding_bias", {"embedding_bias": ((6, math.inf),)}),
    ("embedding_bias", {"embedding_bias": ((True, 1.0),)}),
    ("embedding_bias", {"embedding_bias": ((6, True),)}),
    ("embedding_bias", {"embedding_bias": ((320, 1.0),)}),
    ("priority", {"priority": "high"}),
    ("priority", {"priority": math.nan}),
    ("allotted_time_ms", {"allotted_time_ms": 0.5}),
    (
        "guided_decoding_params",
        {"guided_decoding_params": GuidedDecodingParams(GuideType.REGEX, b"a")},
    ),  # type: ignore[arg-type]
    ("lora_config", {"lora_config": LoraConfig(5)}),  # type: ignore[arg-type]
    ("lora_config", {"lora_config": "style"}),
    ("client_id", {"client_id": "me"}),
    ("sampling_config", {"sampling_config": {"temperature": "0"}}),
]
WRONG_IN_SAMPLING: list[tuple[str, Any]] = [
    ("seed", "5"),
    ("seed", 2.0),
    ("seed", True),
    ("seed", 2**70),
    ("seed", -1),
    ("min_tokens", 1.5),
    ("top_k", 2.0),
    ("temperature", "hot"),
    ("temperature", math.nan),
    ("temperature", 2.5),
    ("top_p", 0.0),
    ("min_p", True),
    ("repetition_penalty", math.inf),
    ("presence_penalty", 3),
    ("num_return_sequences", 1.0),
]
WRONG_IN_OUTPUT: list[tuple[str, Any]] = [
    ("return_log_probs", "yes"),
    ("num_top_log_probs", 2.0),
    ("num_top_log_probs", 10**6),
    ("num_prompt_log_probs", True),
]


def test_parts_that_are_no_structs_are_read_as_such(engine: Executor) -> None:
    assert tokens(engine, sampling_config={"temperature": 0}, input_token_ids=[*PROMPT]) == tokens(
        engine
    )


def is_refused_with(name: str, engine: Executor, **parts: Any) -> None:
    """The request is refused where it is built or where the engine gets it, and the
    next one works.
    """
    config = {kind: parts.pop(kind) for kind in ("sampling", "output") if kind in parts}
    with pytest.raises((ValueError, TypeError, InvalidRequest), match=name):
        if "sampling" in config:
            parts["sampling_config"] = SamplingConfig(**config["sampling"])

        if "output" in config:
            parts["output_config"] = OutputConfig(**config["output"])

        engine.enqueue_request(ask(**parts))

    assert len(tokens(engine, max_tokens=2)) == 2


@pytest.mark.parametrize(("name", "fields"), WRONG, ids=str)
def test_a_request_of_a_wrong_type_is_refused_and_the_next_one_works(
    engine: Executor, name: str, fields: dict[str, Any]
) -> None:
    is_refused_with(name, engine, **fields)


@pytest.mark.parametrize(("name", "value"), WRONG_IN_SAMPLING, ids=str)
def test_a_choice_of_a_wrong_type_is_refused_and_the_next_one_works(
    engine: Executor, name: str, value: Any
) -> None:
    is_refused_with(name, engine, sampling={name: value})


@pytest.mark.parametrize(("name", "value"), WRONG_IN_OUTPUT, ids=str)
def test_an_output_of_a_wrong_type_is_refused_and_the_next_one_works(
    engine: Executor, name: str, value: Any
) -> None:
    is_refused_with(name, engine, output={name: value})


def test_an_engine_that_is_closed_and_collected_leaves_the_others_of_its_process_whole(
    engine: Executor,
) -> None:
    with start() as second_executor:
        result(second_executor, max_tokens=2)

    del second_executor
    gc.collect()
    assert len(tokens(engine, max_tokens=2)) == 2
