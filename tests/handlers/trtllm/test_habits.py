"""Whatever the habits of the engine, the adapter gives the contract's answers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from lmi.executor import Executor, FinishReason, OutputConfig, Request, Result
from tests.conformance.asking import TIMEOUT_S, ask, finish, results, run, wait_until_idle
from tests.handlers.trtllm.asking import start
from tests.handlers.trtllm.double import double, knobs
from tests.handlers.trtllm.facts import PROFILES

Answer = tuple[list[int], list[float], list[FinishReason]]
HABITS: list[dict[str, Any]] = [
    {"end_token": "dropped"},
    {"end_token": "dropped", "tokens_per_step": 3},
    {"end_token": "dropped whole"},
    {"log_prob_form": "floats"},
    {"tokens_per_step": 3},
    {"is_reversed": True},
    {"missing_stats": ("kvCacheStats", "inflightBatchingStats")},
]


@pytest.fixture(scope="module", params=PROFILES)
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    with double(request.param) as executor_class, start(executor_class) as executor:
        yield executor


def requests(executor: Executor, output: OutputConfig) -> list[Request]:
    """Requests that end by length, end token, another end token, stop word, and a stop word of two
    tokens.
    """
    whole = run(executor, max_tokens=30).output_token_ids[0]
    ends: list[dict[str, Any]] = [
        {},
        {"end_id": whole[10]},
        {"end_ids": (whole[11], whole[9])},
        {"stop_words": ((whole[12],),)},
        {"stop_words": ((whole[13], whole[14]),)},
    ]
    streams = [(end, is_streamed) for end in ends for is_streamed in (False, True)]
    return [
        ask(max_tokens=30, output_config=output, streaming=is_streamed, **end)
        for end, is_streamed in streams
    ]


def answers(executor: Executor, output: OutputConfig) -> list[Answer]:
    ids = executor.enqueue_requests(requests(executor, output))
    return [_joined(results(finish(executor, request_id))) for request_id in ids]


def _joined(parts: list[Result]) -> Answer:
    tokens = [token for part in parts for token in part.output_token_ids[0]]
    log_probs = [value for part in parts if part.log_probs for value in part.log_probs[0]]

    assert not log_probs or len(tokens) == len(log_probs)

    return tokens, log_probs, parts[-1].finish_reasons


@pytest.mark.parametrize("habit", HABITS, ids=lambda habit: "-".join(map(str, habit.values())))
def test_answers_are_the_same(executor: Executor, habit: dict[str, Any]) -> None:
    # An end without a log-prob could not stand in the answer
    has_all = habit.get("end_token") != "dropped whole"
    output = OutputConfig(return_log_probs=has_all)
    plain = answers(executor, output)
    assert len({reasons[0] for _, _, reasons in plain}) == 3
    with knobs(**habit):
        assert answers(executor, output) == plain


@pytest.mark.parametrize("end", ["late", "never"])
def test_a_cancel_waits_for_no_last_step(executor: Executor, end: str) -> None:
    with knobs(finish_after_abort=end, late_steps=20, step_s=0.02):
        for _ in range(2 * executor.info.max_num_sequences):
            request_id = executor.enqueue_request(ask(streaming=True, max_tokens=400))
            executor.await_responses(request_id, TIMEOUT_S)
            executor.cancel_request(request_id)
            started = time.monotonic()
            last = results(finish(executor, request_id))[-1]

            assert last.finish_reasons == [FinishReason.CANCELLED] and last.is_final
            assert time.monotonic() - started < TIMEOUT_S / 2

        wait_until_idle(executor)

    assert run(executor).finish_reasons == [FinishReason.LENGTH]
