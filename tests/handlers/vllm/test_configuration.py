"""An ExecutorConfig on its way to vLLM, and what vLLM refuses of it."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lmi.errors import Unsupported
from lmi.executor import (
    AdditionalModelOutput,
    BatchingType,
    ExecutorConfig,
    GuidedDecodingConfig,
    KvCacheConfig,
    LogitsPostProcessorConfig,
)
from lmi.settings.config import EngineConfig
from tests.handlers.vllm.asking import FAMILY, TOKENS_PER_BLOCK, ask, executor_of_vllm, finals
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.vllm


def test_every_field_of_an_executor_config_reaches_vllm(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "handlers.base.configuration")
    config = ExecutorConfig(
        2,
        max_batch_size=3,
        max_num_tokens=96,
        max_queue_size=1,
        iter_stats_max_iterations=5,
        request_stats_max_iterations=4,
        kv_cache_config=KvCacheConfig(enable_block_reuse=False, max_tokens=4 * TOKENS_PER_BLOCK),
        guided_decoding_config=GuidedDecodingConfig([]),
    )
    with executor_of_vllm()(tiny_model(FAMILY), config) as engine:
        assert engine.info.max_num_sequences == 3
        assert engine.info.max_kv_cache_tokens == 4 * TOKENS_PER_BLOCK
        assert engine.capabilities.max_beam_width == 2

        prompt = tuple(range(10, 10 + 2 * TOKENS_PER_BLOCK))
        for _ in range(2):
            request_id = engine.enqueue_request(ask(input_token_ids=prompt, max_tokens=8))
            assert finals(engine, [request_id])[request_id].get_result().num_cached_tokens == 0, (
                "nothing is reused"
            )

        assert len(engine.get_latest_iteration_stats()) == 5
        assert len(engine.get_latest_request_stats()) == 4

    messages = [record.getMessage() for record in caplog.records]
    assert "guided_decoding_config is not needed: vLLM reads the model's own tokenizer" in messages


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (
            (b"weights", "{}", ExecutorConfig()),
            "engine_buffer .*vLLM reads a model from its folder",
        ),
        ((b"weights", "{}"), "engine_buffer .*vLLM reads a model from its folder"),
        (
            ("folder", ExecutorConfig(logits_post_processor_config=LogitsPostProcessorConfig())),
            "logits_post_processor_config .*vLLM calls no function",
        ),
        (
            ("folder", EngineConfig(logits_post_processors="a.py")),
            "logits_post_processor_config .*calls no function",
        ),
        (
            ("folder", ExecutorConfig(additional_model_outputs=(AdditionalModelOutput("logits"),))),
            "additional_model_outputs .*returns only tokens",
        ),
        (
            ("folder", EngineConfig(additional_outputs=("logits",))),
            "additional_model_outputs .*returns only tokens",
        ),
    ],
)
def test_what_vllm_lacks_is_refused_with_the_reason_before_it_starts(
    arguments: Any, reason: str
) -> None:
    with pytest.raises(Unsupported, match=reason):
        executor_of_vllm()(*arguments)


def test_static_batches_are_refused() -> None:
    with pytest.raises(ValueError, match="batching_type must be BatchingType.INFLIGHT"):
        executor_of_vllm()("folder", ExecutorConfig(batching_type=BatchingType.STATIC))


@pytest.mark.parametrize(
    ("options", "lost"),
    [
        ({}, set()),
        ({"skip_tokenizer_init": "true"}, {"guided_decoding"}),
        (
            {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 2}'},
            {"min_p", "embedding_bias"},
        ),
        ({"scheduling_policy": "fcfs"}, {"priority"}),
        ({"max_logprobs": "-1"}, set()),
    ],
)
def test_capabilities_lack_what_an_option_of_vllm_takes_away(
    arguments: ModuleType, folder: Path, options: dict[str, str], lost: set[str]
) -> None:
    from handlers.lmi_vllm.engine_info import describe

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine_arguments = arguments.engine_arguments(EngineConfig(options=options), str(folder))
        can = describe(
            arguments.AsyncEngineArgs(**engine_arguments).create_engine_config(), 8
        ).capabilities

    names = {"guided_decoding", "min_p", "embedding_bias", "priority"}
    assert {name for name in names if not getattr(can, name)} == lost
    assert can.max_beam_width == 8 and can.max_top_log_probs >= 16
