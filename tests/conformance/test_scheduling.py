"""The contract's rules on who runs when, what of it is told, and what is kept for later
requests.
"""

from __future__ import annotations

import pytest

from lmi.executor import (
    Executor,
    KvCacheRetentionConfig,
    RequestStats,
    Response,
    SamplingConfig,
    TokenRangeRetentionConfig,
)
from tests.conformance.asking import PROMPT, TIMEOUT_S, ask, endless, finish, long_prompt, run
from tests.conformance.table import needs

COMPLETE = "GENERATION_COMPLETE"


@needs("priority")
def test_an_urgent_request_overtakes_those_that_wait(executor: Executor) -> None:
    busy = executor.enqueue_requests(
        [endless(executor, max_tokens=60)] * executor.info.max_num_sequences
    )
    later, urgent = executor.enqueue_requests(
        [ask(max_tokens=1, priority=0.1), ask(max_tokens=1, priority=0.9)]
    )
    ended: list[int] = []
    while not {later, urgent} <= set(ended):
        responses: list[Response] = executor.await_responses(timeout_s=TIMEOUT_S)  # type: ignore[assignment]
        assert responses
        ended += [response.request_id for response in responses if response.is_final]

    assert ended.index(urgent) < ended.index(later)

    executor.await_responses(
        [request_id for request_id in busy if request_id not in ended], TIMEOUT_S
    )


def stages(executor: Executor, request_id: int) -> list[RequestStats]:
    return [
        request_stats
        for iteration in executor.get_latest_request_stats()
        for request_stats in iteration.request_stats
        if request_stats.id == request_id
    ]


def test_a_request_is_told_to_be_complete_exactly_once(executor: Executor) -> None:
    request_id = executor.enqueue_request(ask(max_tokens=5))
    finish(executor, request_id)
    # A later step, in which the first request must not stand
    run(executor)
    told_stages = stages(executor, request_id)
    assert [stage.stage for stage in told_stages].count(COMPLETE) == 1 and told_stages[
        -1
    ].stage == COMPLETE
    assert told_stages[-1].num_generated_tokens == 5
    assert executor.get_latest_request_stats() == []


def test_a_request_that_waits_is_told_to_be_queued(executor: Executor) -> None:
    *busy, waiting = executor.enqueue_requests(
        [ask(max_tokens=60)] * (executor.info.max_num_sequences + 1)
    )
    for request_id in (*busy, waiting):
        finish(executor, request_id)

    first = stages(executor, waiting)[0]
    assert (first.stage, first.num_generated_tokens, first.context_prefill_position) == (
        "QUEUED",
        0,
        0,
    )


@pytest.mark.parametrize("cause", ["max_tokens", "end_id", "cancel"])
def test_however_a_request_ends_nothing_of_it_stays_in_the_engine(
    executor: Executor, cause: str
) -> None:
    first = run(executor).output_token_ids[0][0]
    for _ in range(3 * executor.info.max_num_sequences):
        request_id = executor.enqueue_request(
            ask(end_id=first if cause == "end_id" else None, max_tokens=5)
        )
        if cause == "cancel":
            executor.cancel_request(request_id)

        finish(executor, request_id)

    assert executor.get_num_responses_ready() == 0
    assert len(run(executor).output_token_ids[0]) == 8


@needs("kv_cache_retention")
def test_retention_changes_no_token(executor: Executor) -> None:
    ranges = (TokenRangeRetentionConfig(0, 3, 90), TokenRangeRetentionConfig(3, None, 10, 1000))
    retention = KvCacheRetentionConfig(ranges, decode_retention_priority=5)
    for prompt in (PROMPT, long_prompt(executor, 41)):
        plain = run(executor, input_token_ids=prompt, cache_salt="plain").output_token_ids
        for _ in range(2):
            reused = run(
                executor,
                input_token_ids=prompt,
                cache_salt="kept",
                kv_cache_retention_config=retention,
            )

            assert reused.output_token_ids == plain


@needs("seed")
def test_a_seed_of_64_bits_is_taken(executor: Executor) -> None:
    first, second = (
        run(executor, sampling_config=SamplingConfig(seed=2**64 - 1)) for _ in range(2)
    )
    assert first.output_token_ids == second.output_token_ids
