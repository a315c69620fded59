"""Helpers that start the handler over a double of TensorRT-LLM and send requests to it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from lmi.executor import Executor, Response
from lmi.settings.config import EngineConfig
from tests.conformance.asking import ask, finish, run
from tests.tiny_models import tiny_model

FAMILY = "llama_wide"
MAX_NUM_SEQUENCES = 4
CONTEXT_LENGTH = 512
WAIT_S = 30.0


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


def answers(executor: Executor, **fields: Any) -> list[Response]:
    return finish(executor, executor.enqueue_request(ask(**fields)))


def tokens(executor: Executor, **fields: Any) -> list[int]:
    return run(executor, **fields).output_token_ids[0]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.005)
