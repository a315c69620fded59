"""The loop around any engine's step."""

from __future__ import annotations

import pytest

from handlers.echo import EchoExecutor
from handlers.stepped import Step
from lmi.config import EngineConfig
from lmi.errors import Overloaded
from lmi.executor import FinishReason, IterationStats, Request, Response, SamplingConfig
from tests.system.container import wait_until

TIMEOUT_S = 30.0


class Late(EchoExecutor):
    """Tells of every step twice, as one that gets the outputs of two steps of another process together."""

    def _step(self) -> Step:
        step = super()._step()
        step.touched *= 2
        return step


def test_a_sequence_that_is_told_of_twice_in_a_step_ends_once_and_hurts_nobody() -> None:
    with Late(EngineConfig(handler="echo", options={"echo_step_ms": "1"})) as executor:
        for _ in range(2):
            request_id = executor.enqueue_request(Request(input_token_ids=(5, 6), max_tokens=3))
            [response] = executor.await_responses(request_id, TIMEOUT_S)
            assert isinstance(response, Response) and response.result is not None, response
            assert response.result.output_token_ids == [[5, 6, 5]]
            assert response.result.finish_reasons == [FinishReason.LENGTH]
        assert sum(step.num_completed_requests for step in executor.get_latest_iteration_stats()) == 2


def counts(step: IterationStats) -> tuple[int, int]:
    return step.num_active_requests, step.num_queued_requests


def test_statistics_and_the_queue_s_limit_count_requests_and_not_their_sequences() -> None:
    options = {"echo_step_ms": "1", "echo_max_num_sequences": "4"}
    config = EngineConfig(handler="echo", options=options, max_queue_size=2)
    with EchoExecutor(config) as executor:
        four = SamplingConfig(num_return_sequences=4, seed=1)
        ran = executor.enqueue_request(
            Request(input_token_ids=(5, 6), max_tokens=2000, sampling_config=four, streaming=True)
        )
        assert executor.await_responses(ran, TIMEOUT_S), "it runs"
        waiting = [executor.enqueue_request(Request(input_token_ids=(5,), max_tokens=1)) for _ in range(2)]
        with pytest.raises(Overloaded, match="2 requests wait already"):
            executor.enqueue_request(Request(input_token_ids=(5,), max_tokens=1))
        wait_until(lambda: (1, 2) in map(counts, executor.get_latest_iteration_stats()), "one runs and two wait")
        executor.cancel_request(ran)
        assert all(executor.await_responses(one, TIMEOUT_S) for one in waiting)
        assert sum(step.num_completed_requests for step in executor.get_latest_iteration_stats()) == 3


def test_a_request_that_is_over_cannot_be_cancelled_into_a_step() -> None:
    with EchoExecutor(EngineConfig(handler="echo")) as executor:
        request_id = executor.enqueue_request(Request(input_token_ids=(5,), max_tokens=1))
        executor.await_responses(request_id, TIMEOUT_S)
        executor.get_latest_iteration_stats()
        for _ in range(5):
            executor.cancel_request(request_id)
        other = executor.enqueue_request(Request(input_token_ids=(5,), max_tokens=1))
        executor.await_responses(other, TIMEOUT_S)
        assert len(executor.get_latest_iteration_stats()) == 1
