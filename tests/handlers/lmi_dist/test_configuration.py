"""How an Executor is built: of a folder or of buffers, with the contract's configuration or the
server's.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

from handlers.base.configuration import both, executor_config
from handlers.lmi_dist import Executor
from lmi.errors import ModelUnusable, Overloaded, Unsupported
from lmi.executor import (
    AdditionalModelOutput,
    BatchingType,
    ExecutorConfig,
    GuidedDecodingParams,
    GuideType,
    KvCacheConfig,
    SamplingConfig,
)
from lmi.settings.config import EngineConfig
from tests.fake_runner import FakeRunner, SharingRunner
from tests.handlers.lmi_dist.test_executor import ask, collect, drained, one_result
from tests.tiny_models import tiny_model

GREEDY = ask(sampling_config=SamplingConfig(temperature=0))


def test_a_model_in_buffers_answers_as_the_same_model_in_a_folder() -> None:
    folder = tiny_model("llama")
    weights = (folder / "model.safetensors").read_bytes()
    text = (folder / "config.json").read_text()
    config = ExecutorConfig(max_batch_size=2)
    with (
        Executor(folder, config) as first_executor,
        Executor(weights, text, config) as second_executor,
    ):
        assert first_executor.info == second_executor.info
        assert (
            one_result(first_executor, GREEDY).output_token_ids
            == one_result(second_executor, GREEDY).output_token_ids
        )

    with Executor(weights, json_config_str=text, config=config) as third:
        assert third.info.max_num_sequences == 2


@pytest.mark.parametrize(
    ("weights", "text", "said"),
    [
        (b"no header", None, "engine_buffer: not a whole safetensors file"),
        (None, "{", "json_config_str: not JSON"),
        (None, "{}", "json_config_str: no architectures"),
    ],
)
def test_a_fault_of_a_buffer_names_the_argument(
    weights: bytes | None, text: str | None, said: str
) -> None:
    folder = tiny_model("llama")
    weights = weights or (folder / "model.safetensors").read_bytes()
    text = text or (folder / "config.json").read_text()
    with pytest.raises(ModelUnusable) as caught:
        Executor(weights, text)

    assert str(caught.value).startswith(said) and "/" not in str(caught.value)


def test_a_buffer_of_weights_needs_the_text_of_its_configuration() -> None:
    with pytest.raises(
        ValueError, match=r"^json_config_str must be the text of config.json, given None$"
    ):
        Executor(b"weights", ExecutorConfig())


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"batching_type": BatchingType.STATIC},
            "batching_type must be BatchingType.INFLIGHT, given <BatchingType.STATIC",
        ),
        ({"max_beam_width": 0}, "max_beam_width must be at least 1, given 0"),
        ({"max_beam_width": 5, "max_batch_size": 4}, "max_beam_width must be from 1 to 4, given 5"),
        ({"max_batch_size": 0}, "max_batch_size must be at least 1, given 0"),
        ({"max_num_tokens": 0}, "max_num_tokens must be at least 1, given 0"),
        ({"max_queue_size": -1}, "max_queue_size must be at least 0, given -1"),
        (
            {"iter_stats_max_iterations": -1},
            "iter_stats_max_iterations must be at least 0, given -1",
        ),
        (
            {"request_stats_max_iterations": 1.5},
            "request_stats_max_iterations must be an integer, given 1.5",
        ),
        (
            {
                "additional_model_outputs": [
                    AdditionalModelOutput("a"),
                    AdditionalModelOutput("a", True),
                ]
            },
            "additional_model_outputs must be outputs of different names, given ['a', 'a']",
        ),
    ],
)
def test_a_configuration_that_breaks_a_rule_is_refused_where_the_executor_is_built(
    fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError) as caught:
        Executor(FakeRunner(), ExecutorConfig(**fields))

    assert str(caught.value).startswith(said)


def test_a_field_that_was_set_later_is_checked_too() -> None:
    config = ExecutorConfig()
    config.kv_cache_config.max_tokens = 0
    with pytest.raises(
        ValueError, match=r"^kv_cache_config.max_tokens must be at least 1, given 0$"
    ):
        Executor(FakeRunner(), config)


def test_each_limit_of_the_configuration_holds() -> None:
    config = ExecutorConfig(
        max_batch_size=3,
        max_num_tokens=5,
        kv_cache_config=KvCacheConfig(max_tokens=64),
        iter_stats_max_iterations=4,
    )
    runner = FakeRunner()
    with Executor(runner, config) as executor:
        assert (executor.info.max_num_sequences, executor.info.max_kv_cache_tokens) == (3, 64)

        collect_all = executor.enqueue_requests([ask(*range(20), max_tokens=3) for _ in range(5)])
        collect(executor, len(collect_all))

        assert len(executor.get_latest_iteration_stats()) == 4, "older ones are dropped"

    assert max(sum(len(chunk.token_ids) for chunk in plan.prefills) for plan in runner.plans) == 5


def test_statistics_are_not_kept_where_nobody_wants_them() -> None:
    with Executor(FakeRunner(), ExecutorConfig(iter_stats_max_iterations=0)) as executor:
        one_result(executor, ask())
        assert executor.get_latest_iteration_stats() == executor.get_latest_request_stats() == []


def test_the_statistics_of_requests_are_kept_for_as_many_steps_as_the_configuration_says() -> None:
    with Executor(FakeRunner(), ExecutorConfig(request_stats_max_iterations=3)) as executor:
        one_result(executor, ask(max_tokens=8))
        drained(executor)
        assert [step.iter for step in executor.get_latest_request_stats()] == [6, 7, 8]


class WaitingRunner(FakeRunner):
    """Waits in a step until it may go on."""

    may_go_on = False

    def forward(self, plan: Any) -> Any:
        deadline = time.monotonic() + 30.0
        while not self.may_go_on:
            assert time.monotonic() < deadline
            time.sleep(0.001)

        return super().forward(plan)


def test_a_full_queue_refuses_more() -> None:
    runner = WaitingRunner()
    with Executor(runner, ExecutorConfig(max_queue_size=2)) as executor:
        with pytest.raises(Overloaded):
            executor.enqueue_requests([ask()] * 3)

        runner.may_go_on = True
        collect(executor, len(executor.enqueue_requests([ask()] * 2)))


@pytest.mark.parametrize("is_on", [True, False])
def test_blocks_are_reused_only_where_the_configuration_says_so(is_on: bool) -> None:
    config = ExecutorConfig(kv_cache_config=KvCacheConfig(enable_block_reuse=is_on))
    with Executor(SharingRunner(), config) as executor:
        one_result(executor, ask(*range(40)))
        assert one_result(executor, ask(*range(40))).num_cached_tokens == (32 if is_on else 0)


def test_a_configuration_may_be_changed_until_it_is_used_and_not_after() -> None:
    config = ExecutorConfig()
    config.max_batch_size = 2
    config.kv_cache_config.max_tokens = 64
    with Executor(FakeRunner(), config) as executor:
        config.max_batch_size = 4
        config.kv_cache_config.max_tokens = 128
        config.iter_stats_max_iterations = 0
        one_result(executor, ask())
        assert drained(executor)
        assert (executor.info.max_num_sequences, executor.info.max_kv_cache_tokens) == (2, 64)


def test_the_options_of_a_server_become_a_configuration() -> None:
    options = EngineConfig(
        max_num_sequences=6,
        max_prefill_tokens=99,
        max_queue_size=7,
        max_kv_cache_tokens=640,
        enable_prefix_caching=False,
        request_stats_max_iterations=5,
        additional_outputs=("logits", "hidden_states.3:context"),
    )

    assert executor_config(options) == ExecutorConfig(
        6,
        max_batch_size=6,
        max_num_tokens=99,
        max_queue_size=7,
        request_stats_max_iterations=5,
        kv_cache_config=KvCacheConfig(enable_block_reuse=False, max_tokens=640),
        additional_model_outputs=(
            AdditionalModelOutput("logits"),
            AdditionalModelOutput("hidden_states.3", True),
        ),
    )
    assert executor_config(EngineConfig()).max_beam_width == 8, "a server offers beams"
    assert both(None)[0] == ExecutorConfig(), "a library has those of the contract"


def test_what_both_forms_have_is_the_same_in_both() -> None:
    config = ExecutorConfig(
        2,
        max_batch_size=3,
        max_num_tokens=4,
        max_queue_size=5,
        kv_cache_config=KvCacheConfig(max_tokens=6),
    )
    engine_config, options = both(config)
    assert engine_config is config
    assert executor_config(options) == config


def test_a_library_has_guides_only_if_it_says_of_which_vocabulary() -> None:
    folder = tiny_model("llama")
    request = ask(guided_decoding_params=GuidedDecodingParams(GuideType.JSON))
    with Executor(folder, ExecutorConfig()) as executor:
        assert executor.capabilities.guided_decoding == ()
        with pytest.raises(Unsupported, match="no GuidedDecodingConfig was given"):
            executor.enqueue_request(request)

    with Executor(folder, EngineConfig()) as executor:
        assert GuideType.JSON in executor.capabilities.guided_decoding, (
            "a server reads the folder's tokenizer"
        )
