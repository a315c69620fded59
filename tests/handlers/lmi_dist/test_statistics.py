"""What the embedded executor reports of its steps, of its cache, and of the times of a request."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from handlers.lmi_dist import Executor
from lmi.executor import (
    ExecutorConfig,
    FinishReason,
    InflightBatchingStats,
    KvCacheConfig,
    OutputConfig,
    Request,
    RequestPerfMetrics,
    SamplingConfig,
)
from tests.fake_runner import FakeRunner, SharingRunner
from tests.handlers.lmi_dist.test_executor import TIMEOUT_S, ask, collect, drained, one_result

TIMED = OutputConfig(return_perf_metrics=True)


def test_a_step_reports_which_requests_ran_in_it() -> None:
    config = ExecutorConfig(max_num_tokens=256)
    with Executor(FakeRunner(), config) as executor:
        executor.enqueue_requests(
            [
                ask(*[1] * 300, max_tokens=2),
                ask(max_tokens=1, sampling_config=SamplingConfig(num_return_sequences=3)),
            ]
        )
        collect(executor, 2)
        steps = [step.inflight_batching_stats for step in drained(executor)]

    assert steps == [
        InflightBatchingStats(num_scheduled_requests=1, num_context_requests=1, num_ctx_tokens=256),
        InflightBatchingStats(
            num_scheduled_requests=2, num_context_requests=2, num_ctx_tokens=44 + 3
        ),
        InflightBatchingStats(num_scheduled_requests=1, num_gen_requests=1),
    ]


def test_the_cache_reports_the_share_of_blocks_that_prompts_found() -> None:
    rates = []
    with Executor(SharingRunner()) as executor:
        for first in (1, 1, 2):
            one_result(executor, ask(*[first] * 48, max_tokens=20))
            cache = drained(executor)[-1].kv_cache_stats
            rates.append((cache.missed_blocks, cache.reused_blocks, cache.cache_hit_rate))

    assert rates == [(3, 0, 0.0), (4, 2, 2 / 6), (7, 2, 2 / 9)], (
        "the last block is copied, so it counts as missed"
    )


def check(times: RequestPerfMetrics | None, *, has_run: bool = True) -> None:
    """Every event that happened has its time, and they are in order."""
    assert times is not None
    way = [
        times.arrival_time,
        times.first_scheduled_time,
        times.first_token_time,
        times.last_token_time,
    ]
    happened = [moment for moment in way if moment is not None]
    assert len(happened) == (4 if has_run else 1) and happened == sorted(happened)


@pytest.mark.parametrize("num", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("streaming", [False, True])
def test_each_sequence_has_its_times_once(num: int, temperature: float, streaming: bool) -> None:
    sampling = SamplingConfig(num_return_sequences=num, temperature=temperature)
    with Executor(SharingRunner()) as executor:
        executor.enqueue_request(
            ask(streaming=streaming, sampling_config=sampling, output_config=TIMED)
        )
        [responses] = collect(executor, 1).values()

    results = [response.get_result() for response in responses]
    assert (
        sum(sequence_result.request_perf_metrics is not None for sequence_result in results) == num
    )

    for result in results:
        assert (result.request_perf_metrics is not None) == result.is_sequence_final
        if result.is_sequence_final:
            check(result.request_perf_metrics)


def test_a_request_that_was_preempted_keeps_its_first_times() -> None:
    config = ExecutorConfig(kv_cache_config=KvCacheConfig(max_tokens=96))
    with Executor(SharingRunner(), config) as executor:
        executor.enqueue_requests(
            [ask(*[token_id] * 20, max_tokens=50, output_config=TIMED) for token_id in range(2)]
        )
        results = [token_id[-1].get_result() for token_id in collect(executor, 2).values()]
        assert sum(step.num_preemptions for step in drained(executor)) > 0

    for result in results:
        check(result.request_perf_metrics)


@pytest.mark.parametrize("reason", [FinishReason.CANCELLED, FinishReason.TIMED_OUT])
def test_a_request_that_ends_early_has_the_times_so_far(reason: FinishReason) -> None:
    is_timed = reason is FinishReason.TIMED_OUT
    endless = Request(
        (1, 2), 100_000, True, output_config=TIMED, allotted_time_ms=2000 if is_timed else None
    )
    # Its time is over while the first one runs
    waits = replace(endless, allotted_time_ms=300 if is_timed else None)
    config = ExecutorConfig(max_batch_size=1, kv_cache_config=KvCacheConfig(max_tokens=1_000_000))
    with Executor(FakeRunner(context_length=1_000_000), config) as executor:
        running, waiting = executor.enqueue_requests([endless, waits])
        assert executor.await_responses(running, TIMEOUT_S)

        if not is_timed:
            executor.cancel_request(waiting)
            executor.cancel_request(running)

        got = collect(executor, 2)

    for request_id, has_run in ((running, True), (waiting, False)):
        result = got[request_id][-1].get_result()
        assert result.finish_reasons == [reason]
        check(result.request_perf_metrics, has_run=has_run)
