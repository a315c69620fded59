"""Helpers that start the handler over a double of TensorRT-LLM and send requests to it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, cast

from lmi.executor import Executor, Request, Response, Result, SamplingConfig
from lmi.settings.config import EngineConfig
from tests.tiny_models import tiny_model

FAMILY = "llama_wide"
PROMPT = (11, 12, 13, 14, 15)
GREEDY = SamplingConfig(temperature=0)
MAX_NUM_SEQUENCES = 4
CONTEXT_LENGTH = 512
TIMEOUT_S = 60.0


def start(executor_class: Any, *, max_beam_width: int = 1, **options: str) -> Any:
    config = EngineConfig(
        handler="trtllm",
        dtype="fp32",
        max_num_sequences=MAX_NUM_SEQUENCES,
        max_sequence_length=CONTEXT_LENGTH,
        max_beam_width=max_beam_width,
        options=options,
    )
    return executor_class(tiny_model(FAMILY), config)


def ask(**fields: Any) -> Request:
    return Request(**{"input_token_ids": PROMPT, "max_tokens": 8, "sampling_config": GREEDY, **fields})


def finish(executor: Executor, request_id: int) -> list[Response]:
    """All Responses of one request, up to the last one."""
    responses: list[Response] = []
    deadline = time.monotonic() + TIMEOUT_S
    while not responses or not responses[-1].is_final:
        assert time.monotonic() < deadline, "no final response"
        responses += cast(Sequence[Response], executor.await_responses(request_id, TIMEOUT_S))
    return responses


def answers(executor: Executor, **fields: Any) -> list[Response]:
    return finish(executor, executor.enqueue_request(ask(**fields)))


def result(executor: Executor, **fields: Any) -> Result:
    """The one Result of a request that is not streamed."""
    [response] = answers(executor, **fields)
    return response.get_result()


def tokens(executor: Executor, **fields: Any) -> list[int]:
    return result(executor, **fields).output_token_ids[0]
