"""Everything that a request can ask for, in the same steps: no bit of an answer depends on it."""

from __future__ import annotations

import random
from typing import Any

import pytest
from msgspec.structs import replace

from handlers.lmi_dist import Executor
from lmi.executor import (
    AdditionalModelOutput,
    GuidedDecodingParams,
    GuideType,
    IterationStats,
    LoraConfig,
    OutputConfig,
    Request,
    Result,
    SamplingConfig,
)
from lmi.settings.config import EngineConfig
from tests.handlers.lmi_dist.test_equality import KEPT, LEFT
from tests.handlers.lmi_dist.test_executor import collect
from tests.handlers.vllm.small_adapters import write_adapter
from tests.tiny_models import VOCAB_SIZE, tiny_model

LORA = {"enable_lora": "true", "max_lora_rank": "8", "max_loras": "2"}
CONFIG: dict[str, Any] = {
    "options": LORA,
    "max_num_sequences": 12,
    "additional_outputs": ("hidden_states",),
}
SAMPLINGS = (
    SamplingConfig(temperature=0),
    SamplingConfig(seed=3, repetition_penalty=1.2),
    SamplingConfig(seed=4, num_return_sequences=2),
    SamplingConfig(3, num_return_sequences=2),
)
OUTPUTS = (
    OutputConfig(return_log_probs=True),
    OutputConfig(
        return_log_probs=True, additional_model_outputs=(AdditionalModelOutput("hidden_states"),)
    ),
    OutputConfig(return_log_probs=True, return_generation_logits=True),
)
COUNTS = "num_reused_tokens", "num_preemptions"
GUIDE = GuidedDecodingParams(GuideType.REGEX, "([a-z]{1,9} ){30}")


def mixed(num: int, choice: random.Random) -> list[Request]:
    """Requests over few beginnings, each with some of what a request can ask for."""
    beginnings = [tuple(choice.choices(range(3, VOCAB_SIZE), k=length)) for length in (3, 66, 90)]
    requests = []
    for _ in range(num):
        sampling = choice.choice(SAMPLINGS)
        guide = choice.choice([None, None, GUIDE]) if sampling.beam_width == 1 else None
        requests.append(
            Request(
                choice.choice(beginnings)
                + tuple(choice.choices(range(3, VOCAB_SIZE), k=choice.randint(1, 20))),
                choice.randint(60, 200 if sampling.beam_width == 1 else 120),
                choice.random() < 0.3 and sampling.beam_width == 1,
                sampling,
                choice.choice(OUTPUTS),
                end_id=1,
                guided_decoding_params=guide,
                lora_config=choice.choice([None, None, LoraConfig("one"), LoraConfig("two")]),
                cache_salt=choice.choice([None] * 5 + ["salt"]),
            )
        )

    # So that more of them run together
    return sorted(requests, key=lambda one: one.sampling_config.beam_width)


def answers(executor: Executor, requests: list[Request]) -> list[list[Any]]:
    """What each request got, by its sequences, whether it was streamed or not."""
    ids = executor.enqueue_requests(requests)
    got = collect(executor, len(requests))
    return [[joined(results) for results in by_sequence(got[request_id])] for request_id in ids]


def by_sequence(responses: list[Any]) -> list[list[Result]]:
    results = [response.get_result() for response in responses]
    return [
        [result for result in results if result.sequence_index == index]
        for index in {result.sequence_index for result in results}
    ]


def joined(results: list[Result]) -> Any:
    rows = [
        result.additional_outputs["generation_hidden_states"].data
        for result in results
        if result.additional_outputs
    ]
    logits = [
        result.generation_logits.data for result in results if result.generation_logits is not None
    ]
    tokens = [
        [token for result in results for token in result.output_token_ids[beam]]
        for beam in range(len(results[0].output_token_ids))
    ]
    log_probs = [result.log_probs for result in results]
    flat = [value for lists in log_probs if lists is not None for value in sum(lists, [])]
    return (
        tokens,
        flat,
        results[-1].finish_reasons,
        results[-1].cum_log_probs,
        b"".join(rows),
        b"".join(logits),
    )


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("two")
    return {
        name: str(write_adapter(folder / name, seed))
        for seed, name in enumerate(("one", "two"), start=1)
    }


def started(adapters: dict[str, str], **more: Any) -> Any:
    executor = Executor(tiny_model("llama_wide"), EngineConfig(**CONFIG, **more))
    for name, path in adapters.items():
        executor.load_adapter(name, path)

    return executor


def test_no_bit_depends_on_neighbours_reuse_retention_or_preemption(
    adapters: dict[str, str],
) -> None:
    choice = random.Random(13)
    requests = mixed(24, choice)
    with started(adapters, enable_prefix_caching=False) as executor:
        if not executor.capabilities.log_probs_invariant:
            pytest.skip("only the native kernels reuse prefixes")

        expected = [answers(executor, [request])[0] for request in requests]

    stats: list[IterationStats] = []
    with started(adapters, max_kv_cache_tokens=704, max_prefill_tokens=100) as executor:
        for retentions in ([None], [None, KEPT, LEFT]):
            retained = [
                replace(plain_request, kv_cache_retention_config=choice.choice(retentions))
                for plain_request in requests
            ]
            assert answers(executor, retained) == expected
            stats += executor.get_latest_iteration_stats()

    num_reused, num_preemptions = (
        sum(getattr(plain_request, name) for plain_request in stats) for name in COUNTS
    )
    assert num_reused > 200 and num_preemptions > 0
    assert stats[-1].kv_cache_stats.used_num_blocks == 0
