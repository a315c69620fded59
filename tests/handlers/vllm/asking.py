"""Helpers that start the real engine with a small model and send requests to it."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lmi.executor import Executor, Request, Response, Result, SamplingConfig, TokenLogProb
from lmi.settings.annexes import KvEventsConfig
from lmi.settings.config import EngineConfig
from tests.tiny_models import tiny_model

if TYPE_CHECKING:
    from handlers.lmi_vllm.executor import VllmExecutor

FAMILY = "llama_wide"
MAX_NUM_SEQUENCES = 4
CONTEXT_LENGTH = 512
TOKENS_PER_BLOCK = 128
PROMPT = (11, 12, 13, 14, 15)
GREEDY = SamplingConfig(temperature=0)
TIMEOUT_S = 60.0
# Two log-probs this close count as equal
TIE = 1e-4


def executor_of_vllm() -> type[VllmExecutor]:
    with warnings.catch_warnings():
        # Warnings of libraries at their import
        warnings.simplefilter("ignore")
        from handlers.lmi_vllm import Executor

        return Executor


def start(
    folder: Path | None = None,
    *,
    request_stats_max_iterations: int = 0,
    kv_events_config: KvEventsConfig | None = None,
    **options: str,
) -> VllmExecutor:
    config = EngineConfig(
        handler="vllm",
        dtype="fp32",
        max_num_sequences=MAX_NUM_SEQUENCES,
        max_sequence_length=CONTEXT_LENGTH,
        max_kv_cache_tokens=CONTEXT_LENGTH,
        request_stats_max_iterations=request_stats_max_iterations,
        kv_events_config=kv_events_config,
        options=options,
    )

    with warnings.catch_warnings():
        # What vLLM's start warns of
        warnings.simplefilter("ignore")
        return executor_of_vllm()(folder or tiny_model(FAMILY), config)


def ask(**fields: Any) -> Request:
    return Request(
        **{"input_token_ids": PROMPT, "max_tokens": 16, "sampling_config": GREEDY, **fields}
    )


def finals(executor: Executor, request_ids: Sequence[int]) -> dict[int, Response]:
    """The last Response of each request, in the order in which they ended."""
    ended: dict[int, Response] = {}
    deadline = time.monotonic() + TIMEOUT_S
    while len(ended) < len(request_ids):
        assert time.monotonic() < deadline, f"without an end: {set(request_ids) - set(ended)}"
        batch = cast(list[Response], executor.await_responses(timeout_s=TIMEOUT_S))
        ended |= {
            response.request_id: response
            for response in batch
            if response.is_final and response.request_id in request_ids
        }

    return ended


def answer(executor: Executor, **fields: Any) -> Response:
    """The last Response of one request that is not streamed."""
    request_id = executor.enqueue_request(ask(**fields))
    return finals(executor, [request_id])[request_id]


def result(executor: Executor, **fields: Any) -> Result:
    response = answer(executor, **fields)
    assert response.result is not None, response.error_msg
    return response.result


def tokens(executor: Executor, **fields: Any) -> list[int]:
    return result(executor, **fields).output_token_ids[0]


def up_to_a_tie(token_ids: list[int], top: list[list[TokenLogProb]]) -> list[int]:
    """The tokens before the first position where the best two were equally likely."""
    ties = [
        step for step, (best, second, *_) in enumerate(top) if best.log_prob - second.log_prob < TIE
    ]
    return token_ids[: min(ties, default=len(token_ids))]
