"""How the tests of the contract ask an engine."""

from __future__ import annotations

import time
from typing import Any

from lmi.executor import Executor, Request, Response, Result, SamplingConfig

PROMPT = (11, 12, 13, 14, 15)
GREEDY = SamplingConfig(temperature=0)
TIMEOUT_S = 60.0


def ask(**fields: Any) -> Request:
    return Request(
        **{"input_token_ids": PROMPT, "max_tokens": 8, "sampling_config": GREEDY, **fields}
    )


def endless(executor: Executor, **fields: Any) -> Request:
    """A request that runs for seconds, so that a test can meet it while it runs."""
    if "slow" in executor.capabilities.logits_post_processors:
        fields = {"logits_post_processor_name": "slow", **fields}

    return ask(**{"max_tokens": 400, **fields})


def finish(executor: Executor, request_id: int) -> list[Response]:
    """All Responses of one request, up to the last one."""
    responses: list[Response] = []
    deadline = time.monotonic() + TIMEOUT_S
    while not responses or not responses[-1].is_final:
        assert time.monotonic() < deadline, "no final response"
        responses += executor.await_responses(request_id, TIMEOUT_S)  # type: ignore[arg-type]

    return responses


def run(executor: Executor, **fields: Any) -> Result:
    """The one Result of a request that is not streamed."""
    [response] = finish(executor, executor.enqueue_request(ask(**fields)))
    assert response.result is not None, response.error_msg
    return response.result


def long_prompt(executor: Executor, first: int) -> tuple[int, ...]:
    """A prompt of several blocks of any engine's cache."""
    return tuple(
        first + position % 200 for position in range(executor.info.max_sequence_length * 2 // 3)
    )


def results(responses: list[Response]) -> list[Result]:
    assert all(response.result is not None for response in responses), responses[-1].error_msg
    return [response.result for response in responses if response.result is not None]


def wait_until_idle(executor: Executor) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        stats = executor.get_latest_iteration_stats()
        if stats and stats[-1].num_active_requests == stats[-1].num_queued_requests == 0:
            return

        time.sleep(0.001)

    raise AssertionError("never idle")


def several(executor: Executor, **fields: Any) -> list[Result]:
    """The Results of a request, of which there may be several."""
    return results(finish(executor, executor.enqueue_request(ask(**fields))))
