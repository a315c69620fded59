"""The examples of the Executor API's page: logits post-processors and arbitrary output tensors, on
a real model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from handlers.lmi_dist import Executor
from lmi.executor import (
    AdditionalModelOutput,
    ExecutorConfig,
    KvCacheConfig,
    LogitsPostProcessorConfig,
    OutputConfig,
    Request,
    Result,
    SamplingConfig,
    Tensor as Rows,
)
from tests.conformance.asking import finish, results
from tests.tiny_models import VOCAB_SIZE, tiny_model

HIDDEN_SIZE = 96
PROMPT = tuple(range(10, 110))


@pytest.fixture(scope="module")
def path() -> Path:
    return tiny_model("llama")


def await_results(executor: Executor, request_id: int) -> list[Result]:
    return results(finish(executor, request_id))


def tokens(results: list[Result]) -> list[int]:
    return [token_id for result in results for token_id in result.output_token_ids[0]]


def array(tensor: Rows) -> Any:
    return np.frombuffer(tensor.data, tensor.dtype).reshape(tensor.shape)


def test_a_named_logits_post_processor(path: Path) -> None:
    """A callback adds a bias; the requests of one client get another."""
    calls: list[Any] = []

    def add_bias(
        request_id: int,
        logits: torch.Tensor,
        beam_tokens: list[list[int]],
        stream: object,
        client_id: int | None,
    ) -> None:
        bias = torch.zeros(VOCAB_SIZE)
        bias[42 if client_id == 1 else 43] = 1000.0
        logits += bias
        calls.append((request_id, beam_tokens))

    executor_config = ExecutorConfig(
        1, logits_post_processor_config=LogitsPostProcessorConfig({"bias": add_bias}, None, True)
    )
    with Executor(path, executor_config) as executor:
        first, second = executor.enqueue_requests(
            [
                Request(PROMPT, 3, client_id=client_id, logits_post_processor_name="bias")
                for client_id in (1, 2)
            ]
        )
        assert tokens(await_results(executor, first)) == [42] * 3
        assert tokens(await_results(executor, second)) == [43] * 3

    assert sorted(calls) == [(first, [[42] * length]) for length in range(3)] + [
        (second, [[43] * length]) for length in range(3)
    ]


def test_the_batched_logits_post_processor(path: Path) -> None:
    """One call alters the logits of several requests."""
    num_requests: list[int] = []

    def add_bias(
        request_ids: list[int],
        logits: list[torch.Tensor],
        beam_tokens: list[list[list[int]]],
        stream: object,
        client_ids: list[int | None],
    ) -> None:
        num_requests.append(len(request_ids))
        for request_logits, client_id in zip(logits, client_ids, strict=True):
            request_logits[:, :, client_id] += 1000.0

    executor_config = ExecutorConfig()
    executor_config.logits_post_processor_config = LogitsPostProcessorConfig(
        processor_batched=add_bias
    )
    name = Request.BATCHED_POST_PROCESSOR_NAME
    with Executor(path, executor_config) as executor:
        ids = executor.enqueue_requests(
            [
                Request((1, 2, 3), 3, client_id=client_id, logits_post_processor_name=name)
                for client_id in (42, 43, 44)
            ]
        )
        answers = [tokens(await_results(executor, request_id)) for request_id in ids]

    assert answers == [[42] * 3, [43] * 3, [44] * 3] and num_requests == [3] * 3


@pytest.mark.parametrize("gather_context", [True, False])
def test_an_additional_output_read_back(path: Path, gather_context: bool) -> None:
    executor_config = ExecutorConfig()
    additional_outputs = (AdditionalModelOutput("hidden_states", gather_context),)
    executor_config.additional_model_outputs = additional_outputs

    with Executor(path, executor_config) as executor:
        output_config = OutputConfig(False, False, False, True, False, False, additional_outputs)
        request = Request(PROMPT, 5, True, SamplingConfig(), output_config)
        results = await_results(executor, executor.enqueue_request(request))

    outputs = [result.additional_outputs or {} for result in results]
    names = [{"generation_hidden_states"}] * 5
    names[0] = names[0] | ({"context_hidden_states"} if gather_context else set())

    assert [set(output) for output in outputs] == names
    assert [array(output["generation_hidden_states"]).shape for output in outputs] == [
        (1, 1, HIDDEN_SIZE)
    ] * 5

    if gather_context:
        context = array(outputs[0]["context_hidden_states"])
        assert context.shape == (len(PROMPT), HIDDEN_SIZE) and context.dtype == np.float32
        np.testing.assert_array_equal(
            context[-1], array(outputs[0]["generation_hidden_states"])[0, 0]
        )


@pytest.mark.parametrize("enable_block_reuse", [True, False])
def test_context_outputs_with_reuse_come_from_the_prior_request(
    path: Path, enable_block_reuse: bool
) -> None:
    outputs = (AdditionalModelOutput("hidden_states", gather_context=True),)
    executor_config = ExecutorConfig(
        additional_model_outputs=outputs,
        kv_cache_config=KvCacheConfig(enable_block_reuse=enable_block_reuse),
    )
    request = Request(PROMPT, 2, output_config=OutputConfig(additional_model_outputs=outputs))
    with Executor(path, executor_config) as executor:
        if not executor.capabilities.batch_invariant:
            pytest.skip("only the native kernels reuse prefixes")

        [first] = await_results(executor, executor.enqueue_request(request))
        [second] = await_results(executor, executor.enqueue_request(request))

    rows = [
        array((result.additional_outputs or {})["context_hidden_states"])
        for result in (first, second)
    ]
    assert (second.num_cached_tokens > 0) == enable_block_reuse and first.num_cached_tokens == 0

    np.testing.assert_array_equal(rows[1], rows[0][second.num_cached_tokens :])
