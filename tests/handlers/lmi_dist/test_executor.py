"""The embedded executor over a runner without weights: its laws, and the end of a request when a
part breaks.
"""

from __future__ import annotations

import math
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from handlers.lmi_dist import Executor
from handlers.lmi_dist.limits import Limits, choose_limits
from handlers.lmi_dist.plan import Plan
from lmi.errors import InvalidParameter, Overloaded
from lmi.executor import (
    ErrorKind,
    FinishReason,
    IterationStats,
    OutputConfig,
    Request,
    Response,
    Result,
    SamplingConfig,
)
from lmi.settings.config import EngineConfig
from tests.fake_runner import FakeRunner, Floats, SharingRunner, log_softmax

TIMEOUT_S = 120.0
LOG_PROBS = OutputConfig(return_log_probs=True, num_top_log_probs=2)


def ask(*prompt: int, **fields: Any) -> Request:
    return Request(**{"input_token_ids": prompt or (1, 2, 3), "max_tokens": 8, **fields})


def mixed_requests(
    num: int, choice: random.Random, max_prompt: int = 200, max_tokens: int = 40
) -> list[Request]:
    """Random requests: greedy and sampled, streamed and not, short and long."""
    configs = [
        SamplingConfig(temperature=0),
        SamplingConfig(seed=3),
        SamplingConfig(seed=4, top_p=0.8, repetition_penalty=1.2),
        SamplingConfig(seed=5, top_k=10, frequency_penalty=0.3),
        SamplingConfig(seed=6, typical_p=0.9, min_tokens=4),
    ]

    return [
        ask(
            *choice.choices(range(50), k=choice.randint(1, max_prompt)),
            max_tokens=choice.randint(1, max_tokens),
            streaming=choice.random() < 0.5,
            sampling_config=choice.choice(configs),
            output_config=OutputConfig(
                return_log_probs=True, num_prompt_log_probs=choice.choice([None, None, 1])
            ),
            end_id=choice.choice([None, None, 7]),
            bad_words=((8, 9),),
            stop_words=choice.choice([(), (), ((10, 11), (12,))]),
            priority=choice.choice([0.5, 0.5, 0.9]),
        )
        for _ in range(num)
    ]


def collect(executor: Executor, num: int) -> dict[int, list[Response]]:
    """All Responses of `num` requests, by id."""
    got: dict[int, list[Response]] = {}
    deadline = time.monotonic() + TIMEOUT_S
    while sum(responses_of_one[-1].is_final for responses_of_one in got.values()) < num:
        assert time.monotonic() < deadline, "requests without an end"
        for response in executor.await_responses(timeout_s=TIMEOUT_S):
            assert isinstance(response, Response)
            got.setdefault(response.request_id, []).append(response)

    return got


def joined(responses: list[Response]) -> tuple[Any, ...]:
    """What a client has at the end, streamed or not."""
    results = [result.result for result in responses if result.result is not None]
    assert len(results) == len(responses), responses[-1].error_msg
    return (
        [token_id for result in results for token_id in result.output_token_ids[0]],
        [log_prob for result in results for log_prob in (result.log_probs or [[]])[0]],
        results[0].prompt_log_probs,
        results[-1].finish_reasons,
    )


@cache
def alone(request: Request, runner: FakeRunner | None = None) -> tuple[Any, ...]:
    with Executor(runner or FakeRunner()) as executor:
        executor.enqueue_request(request)
        [responses] = collect(executor, 1).values()
        return joined(responses)


def one_result(executor: Executor, request: Request) -> Result:
    [response] = executor.await_responses(executor.enqueue_request(request), TIMEOUT_S)
    assert isinstance(response, Response) and response.result is not None
    return response.result


def drained(executor: Executor) -> list[IterationStats]:
    """The statistics up to the step after which no request was left."""
    stats: list[IterationStats] = []
    deadline = time.monotonic() + TIMEOUT_S
    while not stats or stats[-1].num_active_requests + stats[-1].num_queued_requests:
        assert time.monotonic() < deadline
        stats += executor.get_latest_iteration_stats()
        time.sleep(0.001)

    return stats


@pytest.mark.parametrize("max_kv_cache_tokens", [None, 256, 400])
@pytest.mark.parametrize(
    ("max_prefill_tokens", "kind"), [(1, FakeRunner), (256, FakeRunner), (256, SharingRunner)]
)
def test_every_answer_is_the_one_the_request_gets_alone(
    max_kv_cache_tokens: int | None, max_prefill_tokens: int, kind: type[FakeRunner]
) -> None:
    """This holds also when the cache is so small that sequences are preempted and recomputed."""
    runner = kind()
    config = EngineConfig(
        max_num_sequences=16,
        max_kv_cache_tokens=max_kv_cache_tokens,
        max_prefill_tokens=max_prefill_tokens,
    )
    requests = mixed_requests(24, random.Random(1), max_prompt=60, max_tokens=150)
    with Executor(runner, config) as executor:
        ids = executor.enqueue_requests(requests)
        got = collect(executor, len(ids))
        stats = drained(executor)

    assert [joined(got[request_id]) for request_id in ids] == [
        alone(request) for request in requests
    ]
    assert (sum(request_id.num_preemptions for request_id in stats) > 0) == (
        max_kv_cache_tokens is not None
    )
    assert stats[-1].kv_cache_stats.used_num_blocks == 0 and runner.states == {}


@pytest.mark.parametrize("kind", [FakeRunner, SharingRunner])
def test_requests_that_come_and_go_leave_the_others_alone(kind: type[FakeRunner]) -> None:
    choice = random.Random(2)
    requests = mixed_requests(40, choice)
    runner = kind()
    with Executor(runner, EngineConfig(max_num_sequences=8, max_kv_cache_tokens=1024)) as executor:
        ids = []
        doomed = set()
        for request in requests:
            ids.append(executor.enqueue_request(request))
            if choice.random() < 0.3:
                doomed.add(choice.choice(ids))
                executor.cancel_request(max(doomed))

            time.sleep(choice.random() * 0.003)

        got = collect(executor, len(ids))
        stats = drained(executor)

    for request_id, request in zip(ids, requests, strict=True):
        tokens, log_probs, _, [reason] = joined(got[request_id])
        expected = alone(request)
        if reason is FinishReason.CANCELLED:
            assert request_id in doomed and tokens == expected[0][: len(tokens)]
        else:
            assert (tokens, log_probs, [reason]) == (expected[0], expected[1], expected[3])

    assert stats[-1].kv_cache_stats.used_num_blocks == 0 and runner.states == {}


def by_sequence(responses: list[Response], num_sequences: int) -> list[tuple[Any, ...]]:
    parts: list[list[Response]] = [[] for _ in range(num_sequences)]
    for response in responses:
        assert response.result is not None, response.error_msg
        parts[response.result.sequence_index].append(response)

    return [joined(part) for part in parts]


def with_sampling(request: Request, **fields: Any) -> Request:
    return replace(request, sampling_config=replace(request.sampling_config, **fields))


def alone_by_sequence(request: Request, runner: FakeRunner | None = None) -> list[tuple[Any, ...]]:
    """Sequence i is the request with its seed + i. Only the first has the log-probs of
    the prompt.
    """
    seed = request.sampling_config.seed
    seeds = [
        None if seed is None else seed + index
        for index in range(request.sampling_config.num_return_sequences)
    ]

    lone = [
        alone(with_sampling(request, seed=sequence_seed, num_return_sequences=1), runner)
        for sequence_seed in seeds
    ]

    return [
        (*sequence_seed[:2], None if index else sequence_seed[2], sequence_seed[3])
        for index, sequence_seed in enumerate(lone)
    ]


@pytest.mark.parametrize("kind", [FakeRunner, SharingRunner])
@pytest.mark.parametrize(
    ("max_kv_cache_tokens", "max_prefill_tokens"), [(None, 256), (160, 5), (256, 256)]
)
def test_each_sequence_of_a_request_is_what_its_own_seed_gives_alone(
    max_kv_cache_tokens: int | None, max_prefill_tokens: int, kind: type[FakeRunner]
) -> None:
    choice = random.Random(8)
    runner = kind()
    config = EngineConfig(
        max_num_sequences=10,
        max_kv_cache_tokens=max_kv_cache_tokens,
        max_prefill_tokens=max_prefill_tokens,
    )
    requests = [
        with_sampling(request, num_return_sequences=choice.choice([1, 2, 5]))
        for request in mixed_requests(10, choice, max_prompt=60, max_tokens=80)
    ]
    with Executor(runner, config) as executor:
        ids = executor.enqueue_requests(requests)
        got = collect(executor, len(ids))
        stats = drained(executor)

    for request_id, request in zip(ids, requests, strict=True):
        num_sequences = request.sampling_config.num_return_sequences
        assert by_sequence(got[request_id], num_sequences) == alone_by_sequence(request)

    assert (sum(stat.num_preemptions for stat in stats) > 0) == (max_kv_cache_tokens is not None)
    assert stats[-1].kv_cache_stats.used_num_blocks == 0 and runner.states == {}


@pytest.mark.parametrize(("num_slots", "num_prompts"), [(16, 1), (8, 2), (1, 16)])
def test_a_prompt_is_computed_once_for_the_sequences_that_find_room_together(
    num_slots: int, num_prompts: int
) -> None:
    config = EngineConfig(max_num_sequences=num_slots, max_prefill_tokens=128)
    request = ask(*[5] * 300, sampling_config=SamplingConfig(seed=1, num_return_sequences=16))
    with Executor(FakeRunner(), config) as executor:
        executor.enqueue_request(request)
        [responses] = collect(executor, 1).values()
        stats = drained(executor)

    assert len({tuple(lone_answer[0]) for lone_answer in by_sequence(responses, 16)}) == 16
    assert sum(lone_answer.num_context_tokens for lone_answer in stats) == 300 * num_prompts
    assert sum(lone_answer.num_generation_tokens for lone_answer in stats) == 16 * 7


def test_a_cancel_while_the_prompt_is_shared_frees_every_slot() -> None:
    runner = GatedRunner()
    with Executor(runner, EngineConfig(max_num_sequences=4, max_prefill_tokens=1)) as executor:
        first = executor.enqueue_request(
            ask(*[5] * 300, sampling_config=SamplingConfig(num_return_sequences=6))
        )
        runner.wait_until_inside()
        second = executor.enqueue_request(
            ask(sampling_config=SamplingConfig(num_return_sequences=2))
        )
        executor.cancel_request(first)
        runner.open()
        got = collect(executor, 2)
        stats = drained(executor)

    assert [response[0] for response in by_sequence(got[first], 6)] == [[]] * 6
    assert {response.result.finish_reasons[0] for response in got[first] if response.result} == {
        FinishReason.CANCELLED
    }
    assert [len(response[0]) for response in by_sequence(got[second], 2)] == [8, 8]
    assert stats[-1].kv_cache_stats.used_num_blocks == 0 and runner.states == {}


def test_reused_tokens_are_counted_for_request_step_and_engine() -> None:
    """A first request, the same again, and twice the same prompt in one request."""
    output = OutputConfig(return_perf_metrics=True)
    requests = [
        ask(*[5] * 105, max_tokens=2, output_config=output, streaming=True, cache_salt="us"),
        ask(*[5] * 105, max_tokens=2, output_config=output, streaming=True, cache_salt="us"),
        ask(
            *[5] * 105,
            max_tokens=1,
            sampling_config=SamplingConfig(seed=1, num_return_sequences=2),
            cache_salt="us",
        ),
    ]
    counts = []
    reused = []
    with Executor(SharingRunner()) as executor:
        for request in requests:
            executor.enqueue_request(request)
            [responses] = collect(executor, 1).values()
            results = [result.result for result in responses if result.result is not None]
            counts.append([result.num_cached_tokens for result in results])
            reused += [
                result.request_perf_metrics.num_reused_tokens
                for result in results
                if result.request_perf_metrics
            ]

        stats = drained(executor)

    assert counts == [[0, 0], [96, 0], [96, 96]] and reused == [0, 96], (
        "requests are told of whole parts"
    )
    assert sum(result.num_reused_tokens for result in stats) == 2 * 104

    cache = stats[-1].kv_cache_stats
    # The second sequence shares six, too
    assert (cache.used_num_blocks, cache.reused_blocks) == (
        0,
        6 + 6 + 6,
    )
    assert cache.alloc_total_blocks == cache.alloc_new_blocks + cache.reused_blocks


@pytest.mark.parametrize("is_on", [True, False])
def test_reuse_of_prefixes_can_be_turned_off(is_on: bool) -> None:
    with Executor(SharingRunner(), EngineConfig(enable_prefix_caching=is_on)) as executor:
        counts = [one_result(executor, ask(*[5] * 105)).num_cached_tokens for _ in range(2)]

    assert counts == [0, 96 if is_on else 0]


def test_a_broken_step_leaves_no_block_to_reuse() -> None:
    runner = SharingRunner()
    forward = runner.forward
    failures = [RuntimeError("bad kernel")]

    def forward_or_break(plan: Plan) -> Tensor:
        logits = forward(plan)
        if failures:
            raise failures.pop()

        return logits

    runner.forward = forward_or_break  # type: ignore[method-assign]
    with Executor(runner) as executor:
        [broken] = collect_errors(executor, ask(*[5] * 105))
        assert "bad kernel" in broken
        assert one_result(executor, ask(*[5] * 105)).num_cached_tokens == 0


def collect_errors(executor: Executor, request: Request) -> list[str]:
    executor.enqueue_request(request)
    [responses] = collect(executor, 1).values()
    return [response.error_msg for response in responses]


def test_a_request_without_a_seed_is_answered_afresh_each_time() -> None:
    with Executor(FakeRunner()) as executor:
        answers = {
            tuple(one_result(executor, ask(max_tokens=20)).output_token_ids[0]) for _ in range(5)
        }

    assert len(answers) == 5


def test_a_long_prompt_does_not_hold_up_who_decodes() -> None:
    with Executor(FakeRunner(), EngineConfig(max_prefill_tokens=128)) as executor:
        executor.enqueue_requests([ask(max_tokens=30), ask(*[4] * 480, max_tokens=1)])
        collect(executor, 2)
        stats = drained(executor)

    num_context_tokens = [stat.num_context_tokens for stat in stats]
    # The first step has the short prompt, too
    assert num_context_tokens[0] == 128 and sum(num_context_tokens) == 483
    assert all(0 <= num_tokens <= 128 for num_tokens in num_context_tokens)
    assert all(stat.num_generation_tokens == 1 for stat in stats[1:30])


def test_priority_decides_who_is_admitted() -> None:
    with Executor(FakeRunner(), EngineConfig(max_num_sequences=1)) as executor:
        ids = executor.enqueue_requests(
            [ask(priority=priority) for priority in (0.1, 0.5, 0.9, 0.5)]
        )
        order = list(collect(executor, 4))

    assert order == [ids[2], ids[1], ids[3], ids[0]]


def test_prompt_log_probs_are_the_same_however_the_prompt_is_cut() -> None:
    runner = FakeRunner()
    prompt = tuple(range(50)) * 8
    output = OutputConfig(num_prompt_log_probs=2)
    for max_prefill_tokens in (1, 1000):
        with Executor(
            FakeRunner(), EngineConfig(max_prefill_tokens=max_prefill_tokens)
        ) as executor:
            notes = one_result(executor, ask(*prompt, output_config=output)).prompt_log_probs

        assert (
            notes is not None
            and len(notes) == 400
            and (notes[0].log_prob, notes[0].top) == (None, [])
        )
        for position in (1, 127, 128, 129, 256, 399):
            expected = log_softmax(runner.logits(list(prompt[:position])))
            assert notes[position].log_prob == pytest.approx(expected[prompt[position]], abs=1e-5)
            assert [top_token.token_id for top_token in notes[position].top] == expected.argsort()[
                :-3:-1
            ].tolist()


def test_an_answer_ends_where_the_whole_cache_is_full() -> None:
    """It may preempt its neighbours. A prompt as long as the context is refused, with
    both numbers.
    """
    with Executor(FakeRunner(), EngineConfig(max_kv_cache_tokens=70)) as executor:
        assert (executor.info.max_sequence_length, executor.info.max_kv_cache_tokens) == (64, 64)

        requests = [
            ask(*[1] * 60, max_tokens=400),
            ask(max_tokens=400),
            ask(max_tokens=400),
            ask(*[1] * 63),
        ]
        ids = executor.enqueue_requests(requests)
        results = {
            request_id: joined(responses) for request_id, responses in collect(executor, 4).items()
        }

        assert [(len(results[request_id][0]), results[request_id][3]) for request_id in ids] == [
            (num_tokens, [FinishReason.LENGTH]) for num_tokens in (4, 61, 61, 1)
        ]
        assert sum(request_id.num_preemptions for request_id in drained(executor)) > 0

        with pytest.raises(
            InvalidParameter, match="shorter than .* context of 64 tokens, given '64 tokens'"
        ):
            executor.enqueue_request(ask(*[1] * 64))


def test_a_full_queue_is_said_to_be_full() -> None:
    runner = GatedRunner()
    with Executor(runner, EngineConfig(max_num_sequences=1, max_queue_size=2)) as executor:
        executor.enqueue_request(ask())
        runner.wait_until_inside()
        executor.enqueue_requests([ask(), ask()])
        with pytest.raises(Overloaded, match="2 requests wait already, at most 2 may"):
            executor.enqueue_request(ask())

        runner.open()
        collect(executor, 3)
        executor.enqueue_request(ask())


class GatedRunner(FakeRunner):
    """Waits inside `forward` until the gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self._gate = threading.Event()
        self._inside = threading.Event()

    def forward(self, plan: Plan) -> Floats:
        self._inside.set()
        assert self._gate.wait(TIMEOUT_S)
        return super().forward(plan)

    def wait_until_inside(self) -> None:
        assert self._inside.wait(TIMEOUT_S)

    def open(self) -> None:
        self._gate.set()


def test_a_cancel_frees_slot_and_blocks_before_the_next_step() -> None:
    runner = GatedRunner()
    with Executor(runner) as executor:
        first, second = executor.enqueue_requests(
            [ask(*[1] * 100, max_tokens=400), ask(max_tokens=4)]
        )
        runner.wait_until_inside()
        executor.cancel_request(first)
        runner.open()
        got = collect(executor, 2)
        stats = drained(executor)

    assert joined(got[first])[3] == [FinishReason.CANCELLED]
    assert [stat.kv_cache_stats.used_num_blocks for stat in stats] == [8, 1, 1, 0]
    assert all(chunk.slot == 1 for plan in runner.plans[1:] for chunk in plan.chunks)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_logits_that_are_not_numbers_fail_their_request_alone(poison: float) -> None:
    requests = mixed_requests(6, random.Random(3))
    runner = FakeRunner(vocab_size=60, poison={55: poison})
    with Executor(runner) as executor:
        ids = executor.enqueue_requests(
            [*requests, ask(1, 55), ask(2, 2, 55, output_config=LOG_PROBS)]
        )
        ids.append(
            executor.enqueue_request(
                ask(55, 1, 2, output_config=OutputConfig(num_prompt_log_probs=0))
            )
        )
        got = collect(executor, len(ids))

        assert drained(executor)[-1].kv_cache_stats.used_num_blocks == 0

    for failed in ids[6:]:
        [response] = got[failed]
        assert response.error is not None and response.error.kind is ErrorKind.GENERATION
        assert "not numbers" in response.error_msg

    assert [joined(got[request_id]) for request_id in ids[:6]] == [
        alone(request_id, runner) for request_id in requests
    ]


class BreakingRunner(FakeRunner):
    """Raises what `breaks` returns for a plan."""

    def __init__(
        self, breaks: Callable[[Plan], Exception | None], poison: dict[int, float] | None = None
    ) -> None:
        super().__init__(vocab_size=60 if poison else 50, poison=poison)
        self.breaks = breaks

    def forward(self, plan: Plan) -> Floats:
        error = self.breaks(plan)
        if error is not None:
            raise error

        return super().forward(plan)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError("no memory"),
        # As Python raises it, without a message
        MemoryError(),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you "
            "tried to"
        ),
    ],
    ids=["cuda", "python", "wordless", "cpu"],
)
def test_out_of_memory_ends_the_largest_request_alone(error: Exception) -> None:
    choice = random.Random(4)
    requests = mixed_requests(10, choice, max_prompt=100)
    large = ask(*[1] * 300, output_config=OutputConfig(num_prompt_log_probs=0))
    requests.insert(4, large)
    runner = BreakingRunner(
        lambda plan: error if any(chunk.num_logits > 200 for chunk in plan.chunks) else None
    )
    with Executor(runner, EngineConfig(max_prefill_tokens=512)) as executor:
        ids = executor.enqueue_requests(requests)
        got = collect(executor, len(ids))

        assert drained(executor)[-1].kv_cache_stats.used_num_blocks == 0
        assert executor.can_enqueue_requests()

    for request_id, request in zip(ids, requests, strict=True):
        if request is large:
            [response] = got[request_id]
            assert response.error is not None and response.error.kind is ErrorKind.OUT_OF_MEMORY
        else:
            assert joined(got[request_id]) == alone(request)


def test_what_breaks_while_a_prompt_is_shared_ends_its_request_once_and_no_other() -> None:
    """One prompt has logits that are not numbers, the other has no room in memory."""
    several = SamplingConfig(seed=1, num_return_sequences=4)
    errors = [MemoryError("no memory")]
    requests = [
        ask(1, 55, sampling_config=several),
        ask(*[2] * 300, sampling_config=several),
        ask(sampling_config=several),
    ]
    runner = BreakingRunner(
        lambda plan: errors[0] if any(chunk.end == 300 for chunk in plan.prefills) else None,
        poison={55: math.nan},
    )
    with Executor(runner) as executor:
        ids = executor.enqueue_requests(requests)
        got = collect(executor, 3)
        assert drained(executor)[-1].kv_cache_stats.used_num_blocks == 0 and runner.states == {}

    for failed, kind in zip(ids, (ErrorKind.GENERATION, ErrorKind.OUT_OF_MEMORY), strict=False):
        [response] = got[failed]
        assert response.error is not None and response.error.kind is kind

    assert by_sequence(got[ids[2]], 4) == alone_by_sequence(
        requests[2], FakeRunner(vocab_size=60, poison=runner.poison)
    )


def test_out_of_memory_that_repeats_ends_one_request_each_time_and_never_the_engine() -> None:
    def breaks(plan: Plan) -> Exception | None:
        return MemoryError("no memory") if len(plan.chunks) > 2 else None

    with Executor(BreakingRunner(breaks)) as executor:
        ids = executor.enqueue_requests([ask(*[1] * length) for length in range(1, 9)])
        got = collect(executor, len(ids))
        assert executor.can_enqueue_requests()

    failed = [request_id for request_id in ids if got[request_id][-1].error is not None]
    # The longest went first
    assert failed == ids[2:]


def test_a_step_that_runs_out_of_memory_while_it_samples_is_repeated_by_the_others() -> None:
    """The step holds the whole first prompt and a part of the second, whose log-probs are noted
    twice.
    """
    output = OutputConfig(num_prompt_log_probs=0)
    requests = [
        ask(*[1] * 400, output_config=output),
        ask(*[2, 3] * 150, output_config=output),
        ask(max_tokens=30),
    ]
    runner = GatedRunner()
    with Executor(runner, EngineConfig(max_prefill_tokens=600)) as executor:
        sample = executor._sampler.sample
        failures = [MemoryError("no memory")]

        def sample_or_fail(*args: Any) -> Any:
            if failures:
                raise failures.pop()

            return sample(*args)

        executor._sampler.sample = sample_or_fail  # type: ignore[method-assign]
        ids = executor.enqueue_requests(requests)
        runner.open()
        got = collect(executor, 3)

    assert got[ids[0]][0].error is not None and got[ids[0]][0].error.kind is ErrorKind.OUT_OF_MEMORY
    assert [joined(got[ids[1]])[2], joined(got[ids[1]])[3]] == [
        alone(requests[1])[2],
        [FinishReason.LENGTH],
    ]
    assert [spans_of(plan, 1) for plan in runner.plans[:2]] == [[(0, 200)], [(0, 300)]]


def spans_of(plan: Plan, slot: int) -> list[tuple[int, int]]:
    return [(chunk.start, chunk.end) for chunk in plan.chunks if chunk.slot == slot]


def test_a_step_that_raises_ends_its_requests_and_spares_the_queue() -> None:
    broken = [True]

    def breaks(plan: Plan) -> Exception | None:
        return RuntimeError("bad kernel") if broken.pop() else None

    runner = BreakingRunner(lambda plan: breaks(plan) if broken else None)
    with Executor(runner, EngineConfig(max_num_sequences=2)) as executor:
        ids = executor.enqueue_requests([ask() for _ in range(4)])
        got = collect(executor, 4)

        assert executor.can_enqueue_requests()
        assert drained(executor)[-1].kv_cache_stats.used_num_blocks == 0

    for failed in ids[:2]:
        [response] = got[failed]
        assert response.error is not None and response.error.kind is ErrorKind.GENERATION
        assert response.error_msg == "the step failed: bad kernel"

    assert all(got[request_id][-1].error is None for request_id in ids[2:])


def test_three_broken_steps_in_a_row_stop_the_engine_and_end_everyone() -> None:
    runner = BreakingRunner(lambda plan: RuntimeError("sticky"))
    with Executor(runner, EngineConfig(max_num_sequences=1)) as executor:
        ids = executor.enqueue_requests([ask() for _ in range(5)])
        got = collect(executor, 5)
        kinds = [got[request_id][-1].error.kind for request_id in ids]  # type: ignore[union-attr]

        assert kinds == [ErrorKind.GENERATION] * 3 + [ErrorKind.ENGINE_LOST] * 2
        assert not executor.can_enqueue_requests()

        with pytest.raises(RuntimeError):
            executor.enqueue_request(ask())

        assert executor.await_responses() == []


def test_a_good_step_between_broken_ones_starts_the_count_again() -> None:
    num_steps = [0]

    def breaks(plan: Plan) -> Exception | None:
        num_steps[0] += 1
        return RuntimeError("now and then") if num_steps[0] % 3 else None

    with Executor(BreakingRunner(breaks), EngineConfig(max_num_sequences=1)) as executor:
        ids = executor.enqueue_requests([ask(max_tokens=1) for _ in range(12)])
        got = collect(executor, 12)
        assert executor.can_enqueue_requests()

    assert [got[request_id][-1].has_error() for request_id in ids] == [True, True, False] * 4


def test_request_statistics_are_kept_only_when_asked_for() -> None:
    with Executor(FakeRunner()) as executor:
        one_result(executor, ask())
        assert executor.get_latest_request_stats() == []

    config = EngineConfig(
        max_num_sequences=1, max_prefill_tokens=256, request_stats_max_iterations=100
    )
    with Executor(FakeRunner(), config) as executor:
        first, second = executor.enqueue_requests(
            [ask(*[1] * 300, max_tokens=2), ask(max_tokens=1)]
        )
        collect(executor, 2)
        drained(executor)
        stages = [
            {
                stats.id: (stats.stage, stats.context_prefill_position)
                for stats in step.request_stats
            }
            for step in executor.get_latest_request_stats()
        ]

    assert stages == [
        {first: ("CONTEXT_IN_PROGRESS", 256), second: ("QUEUED", 0)},
        {first: ("GENERATION_IN_PROGRESS", 300), second: ("QUEUED", 0)},
        {first: ("GENERATION_COMPLETE", 300), second: ("QUEUED", 0)},
        {second: ("GENERATION_COMPLETE", 3)},
    ]


def test_an_idle_executor_uses_no_processor() -> None:
    with Executor(FakeRunner()) as executor:
        one_result(executor, ask())
        drained(executor)
        before = time.process_time()
        assert executor.await_responses(timeout_s=0.5) == []
        assert time.process_time() - before < 0.1
        assert executor.get_latest_iteration_stats() == []


def test_naming_the_package_does_not_import_torch() -> None:
    code = (
        "import sys, handlers.lmi_dist, handlers.echo, handlers.lmi_dist.scheduler; assert "
        "'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("config", "is_lazy", "limits"),
    [
        (EngineConfig(), True, Limits(64, 4096, 64 * 2048, 4)),
        (EngineConfig(max_num_sequences=8, max_sequence_length=100), True, Limits(8, 100, 800)),
        (EngineConfig(max_sequence_length=10**6), True, Limits(64, 4096, 64 * 2048, 4)),
        (EngineConfig(max_kv_cache_tokens=5), True, Limits(64, 16, 16, 4)),
        (EngineConfig(max_kv_cache_tokens=4000), True, Limits(64, 4000, 4000, 4)),
        (EngineConfig(max_kv_cache_tokens=4111), True, Limits(64, 4096, 4096, 4)),
        (EngineConfig(), False, Limits(50, 4096, 64 * 2048)),
        (EngineConfig(max_num_sequences=8), False, Limits(8, 4096, 8 * 2048)),
    ],
)
def test_limits_come_from_configuration_context_and_memory(
    config: EngineConfig, is_lazy: bool, limits: Limits
) -> None:
    """A quarter of this accelerator's memory holds 50 sequences of the whole context."""
    device_bytes = None if is_lazy else 4 * 50 * 4096 * 100
    assert choose_limits(config, 4096, 16, token_bytes=100, device_bytes=device_bytes) == limits


def test_a_context_that_the_model_does_not_have_is_told(caplog: pytest.LogCaptureFixture) -> None:
    assert (
        choose_limits(EngineConfig(max_sequence_length=99_999), 512, 16, token_bytes=100).max_length
        == 512
    )
    assert "option.max_model_len=99999 is over the model's context" in caplog.text
    assert "may have 512 tokens together" in caplog.text
