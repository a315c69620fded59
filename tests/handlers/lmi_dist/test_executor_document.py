"""The examples of TensorRT-LLM's page on the Executor API, written in Python, on the embedded
executor.
"""

from __future__ import annotations

import pytest

from handlers.lmi_dist import Executor
from lmi.executor import (
    BatchingType,
    ExecutorConfig,
    FinishReason,
    OutputConfig,
    Request,
    Response,
    SamplingConfig,
)
from tests.fake_runner import SharingRunner
from tests.handlers.lmi_dist.test_executor import TIMEOUT_S, collect, drained
from tests.tiny_models import tiny_model

SAMPLING = SamplingConfig(seed=5, num_return_sequences=3)


def early_end() -> int:
    """A token that is the second of sequence 1, and none of the first two of the others."""
    with Executor(SharingRunner()) as executor:
        executor.enqueue_request(Request([1, 2, 3], 3, sampling_config=SAMPLING))
        [responses] = collect(executor, 1).values()

    tokens = {
        response.get_result().sequence_index: response.get_result().output_token_ids[0]
        for response in responses
    }
    assert tokens[1][1] not in (*tokens[0], *tokens[2], tokens[1][0]), "choose another seed"
    return tokens[1][1]


def test_three_sequences_have_the_flags_of_the_page() -> None:
    """Sequence 1 ends before the others."""
    request = Request([1, 2, 3], 3, True, SAMPLING, OutputConfig(), end_id=early_end())
    with Executor(SharingRunner()) as executor:
        executor.enqueue_request(request)
        [responses] = collect(executor, 1).values()

    results = [response.get_result() for response in responses]
    flags = [
        (result.sequence_index, result.is_sequence_final, result.is_final) for result in results
    ]
    first = flags[:3]
    second = flags[3:6]
    third = flags[6:]

    assert first == [(0, False, False), (1, False, False), (2, False, False)]
    assert second == [(0, False, False), (1, True, False), (2, False, False)], (
        "the page's three responses"
    )
    assert third == [(0, True, False), (2, True, True)]

    reasons = {
        result.sequence_index: result.finish_reasons
        for result in results
        if result.is_sequence_final
    }
    length = [FinishReason.LENGTH]

    assert reasons == {0: length, 1: [FinishReason.END_ID], 2: length}


def test_not_streamed_sequences_have_a_response_each() -> None:
    with Executor(SharingRunner()) as executor:
        executor.enqueue_request(Request([1, 2, 3], 3, num_return_sequences=3))
        [responses] = collect(executor, 1).values()

    results = [response.get_result() for response in responses]
    assert [result.sequence_index for result in results] == [0, 1, 2]
    assert [result.is_final for result in results] == [False, False, True] and all(
        result.is_sequence_final for result in results
    )


def test_one_sequence_streams_its_tokens_and_its_flags_are_alike() -> None:
    with Executor(SharingRunner()) as executor:
        for streaming, num_responses in ((True, 4), (False, 1)):
            executor.enqueue_request(Request([1, 2, 3], 4, streaming))
            [responses] = collect(executor, 1).values()
            results = [response.get_result() for response in responses]

            assert [result.is_final for result in results] == [False] * (num_responses - 1) + [True]
            assert all(result.is_final == result.is_sequence_final for result in results)
            assert sum(len(result.output_token_ids[0]) for result in results) == 4


def test_the_executor_of_the_page_is_built_of_a_path_or_of_buffers_and_runs_requests_together() -> (
    None
):
    folder = tiny_model("llama")
    buffers = (folder / "model.safetensors").read_bytes(), (folder / "config.json").read_text()
    config = ExecutorConfig(
        1, batching_type=BatchingType.INFLIGHT, request_stats_max_iterations=100
    )
    for executor in (Executor(folder, config), Executor(*buffers, config)):
        with executor:
            ids = executor.enqueue_requests(
                [Request([1, 2, 3], 5, client_id=7), Request([4, 5], 5, client_id=7)]
            )
            both = executor.await_responses(ids, TIMEOUT_S)

            assert [
                [response.client_id for response in responses if isinstance(response, Response)]
                for responses in both
            ] == [
                [7],
                [7],
            ]

            steps = drained(executor)
            assert max(step.num_active_requests for step in steps) == 2, (
                "many requests in one iteration"
            )
            assert sum(step.num_completed_requests for step in steps) == 2

            stats = executor.get_latest_request_stats()
            assert [response.iter for response in stats] == [response.iter for response in steps]
            assert {response.id for step in stats for response in step.request_stats} == set(ids)
            assert (
                executor.get_latest_iteration_stats() == executor.get_latest_request_stats() == []
            )


def test_a_static_batch_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^batching_type must be BatchingType.INFLIGHT"):
        Executor(SharingRunner(), ExecutorConfig(batching_type=BatchingType.STATIC))
