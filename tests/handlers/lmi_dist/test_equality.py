"""The whole embedded executor on real checkpoints: an answer does not depend on the requests beside
it.

On native kernels ids and the bits of log-probs equal those of a lone run whose prompt is computed
whole: while requests come, go and are cancelled, after a preemption, and where a prompt's beginning
is reused. Torch keeps the ids. Greedy ids equal those of transformers' generate.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM

from handlers.lmi_dist import Executor
from lmi.executor import (
    FinishReason,
    IterationStats,
    KvCacheRetentionConfig,
    OutputConfig,
    Request,
    Response,
    SamplingConfig,
    TokenRangeRetentionConfig,
)
from lmi.settings.config import EngineConfig
from tests.tiny_models import VOCAB_SIZE, tiny_model

TIMEOUT_S = 60.0
# The last runs through the fallback, on torch
FAMILIES = (
    "llama",
    "mistral",
    "gpt2",
    "gemma3",
    "olmo2",
)
Answer: TypeAlias = tuple[list[int], list[float], Any, FinishReason]
"""Token ids, their log-probs, those of the prompt, and why it ended."""

WITHOUT_REUSE = EngineConfig(enable_prefix_caching=False)
KEPT = KvCacheRetentionConfig((TokenRangeRetentionConfig(0, 64, 90, 60_000),), 50)
LEFT = KvCacheRetentionConfig((TokenRangeRetentionConfig(0, None, 0),), 100, 1)


def staggered(num: int, choice: random.Random, max_prompt: int, max_tokens: int) -> list[Request]:
    """Random requests, of which every second one is greedy."""
    sampled = [
        SamplingConfig(seed=1),
        SamplingConfig(seed=2, temperature=0.7, top_p=0.9),
        SamplingConfig(seed=3, top_k=50, repetition_penalty=1.1),
        SamplingConfig(seed=4, min_p=0.02, presence_penalty=0.5),
    ]

    return [
        Request(
            input_token_ids=tuple(
                choice.choices(range(3, VOCAB_SIZE), k=choice.randint(1, max_prompt))
            ),
            max_tokens=choice.randint(max_tokens // 4, max_tokens),
            streaming=choice.random() < 0.5,
            sampling_config=choice.choice(sampled) if number % 2 else SamplingConfig(temperature=0),
            output_config=OutputConfig(
                return_log_probs=True, num_prompt_log_probs=choice.choice([None, None, 2])
            ),
        )
        for number in range(num)
    ]


def answer(responses: list[Response]) -> Answer:
    results = [result.result for result in responses if result.result is not None]
    assert len(results) == len(responses), responses[-1].error_msg
    return (
        [token_id for result in results for token_id in result.output_token_ids[0]],
        [log_prob for result in results for log_prob in (result.log_probs or [[]])[0]],
        results[0].prompt_log_probs,
        results[-1].finish_reasons[0],
    )


def take_all(executor: Executor, ids: list[int]) -> list[Answer]:
    deadline = time.monotonic() + TIMEOUT_S
    got: dict[int, list[Response]] = {open_id: [] for open_id in ids}
    for request_id, responses in got.items():
        while not responses or not responses[-1].is_final:
            assert time.monotonic() < deadline, "requests without an end"
            responses += executor.await_responses(request_id, TIMEOUT_S)  # type: ignore[arg-type]

    return [answer(got[open_id]) for open_id in ids]


def alone(executor: Executor, requests: list[Request]) -> list[Answer]:
    return [take_all(executor, [executor.enqueue_request(request)])[0] for request in requests]


def last_stats(executor: Executor) -> tuple[int, IterationStats]:
    """The number of preemptions so far, and the statistics of the last step."""
    stats = executor.get_latest_iteration_stats()
    return sum(stat.num_preemptions for stat in stats), stats[-1]


@pytest.mark.parametrize("family", FAMILIES)
def test_requests_that_come_go_and_are_cancelled_change_no_bit_of_the_others(family: str) -> None:
    choice = random.Random(family)
    requests = staggered(32, choice, max_prompt=300, max_tokens=40)
    doomed = []
    with Executor(tiny_model(family), WITHOUT_REUSE) as executor:
        expected = alone(executor, requests)

    with Executor(tiny_model(family), EngineConfig(max_num_sequences=12)) as executor:
        # torch keeps only the ids
        is_exact = executor.capabilities.log_probs_invariant
        ids: list[int] = []
        for request in requests:
            ids.append(executor.enqueue_request(request))
            if choice.random() < 0.2:
                doomed.append(choice.choice(ids))
                executor.cancel_request(doomed[-1])

            time.sleep(choice.random() * 0.01)

        got = take_all(executor, ids)
        assert last_stats(executor)[1].kv_cache_stats.used_num_blocks == 0

    for request_id, mine, lone in zip(ids, got, expected, strict=True):
        if mine[3] is FinishReason.CANCELLED:
            assert request_id in doomed
            lone = (lone[0][: len(mine[0])], lone[1][: len(mine[1])], mine[2], mine[3])

        assert mine == lone if is_exact else mine[0] == lone[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_each_sequence_of_a_request_is_bit_by_bit_what_its_own_seed_gives(family: str) -> None:
    """Shared or copied keys and values of a prompt give the same bits."""
    choice = random.Random(3)
    requests = [
        Request(
            input_token_ids=tuple(choice.choices(range(3, VOCAB_SIZE), k=num_prompt_tokens)),
            max_tokens=choice.randint(5, 20),
            sampling_config=SamplingConfig(seed=10, temperature=1.2, num_return_sequences=4),
            output_config=OutputConfig(return_log_probs=True, num_top_log_probs=2),
        )
        for num_prompt_tokens in (1, 16, 128, 300)
    ]
    with Executor(tiny_model(family), EngineConfig(max_num_sequences=16)) as executor:
        is_exact = executor.capabilities.log_probs_invariant
        ids = executor.enqueue_requests(requests)
        together = [executor.await_responses(seed_config, TIMEOUT_S) for seed_config in ids]
        executor.get_latest_iteration_stats()
        for request, so_far, request_id in zip(requests, together, ids, strict=True):
            while not so_far[-1].is_final:
                so_far += executor.await_responses(request_id, TIMEOUT_S)

            seeds = [
                replace(request.sampling_config, seed=10 + i, num_return_sequences=1)
                for i in range(4)
            ]
            lone = alone(
                executor, [replace(request, sampling_config=seed_config) for seed_config in seeds]
            )
            for response in so_far:
                mine = answer([response])
                lone_answer = lone[response.result.sequence_index]
                assert mine == lone_answer if is_exact else mine[0] == lone_answer[0]


def test_a_preempted_request_has_the_bits_of_its_lone_run() -> None:
    requests = staggered(16, random.Random(9), max_prompt=60, max_tokens=360)
    with Executor(tiny_model("llama"), WITHOUT_REUSE) as executor:
        expected = alone(executor, requests)
        assert last_stats(executor)[0] == 0
        is_exact = executor.capabilities.log_probs_invariant

    config = EngineConfig(max_num_sequences=12, max_kv_cache_tokens=1280)
    with Executor(tiny_model("llama"), config) as executor:
        got = take_all(executor, executor.enqueue_requests(requests))
        num_preemptions, last = last_stats(executor)

    assert num_preemptions > 0 and last.kv_cache_stats.used_num_blocks == 0

    for mine, lone in zip(got, expected, strict=True):
        assert mine == lone if is_exact else mine[0] == lone[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_reused_beginning_gives_the_bits_of_a_whole_prompt(family: str) -> None:
    """Conversations: each request begins with an earlier one and its answer, all cut somewhere."""
    choice = random.Random(family)
    tokens = list[int]()
    with (
        Executor(tiny_model(family), WITHOUT_REUSE) as plain,
        Executor(tiny_model(family)) as executor,
    ):
        is_exact = executor.capabilities.log_probs_invariant
        for _ in range(12):
            tokens = tokens[: choice.randint(0, 500)] + choice.choices(
                range(3, VOCAB_SIZE), k=choice.randint(1, 60)
            )
            request = Request(
                input_token_ids=tuple(tokens),
                max_tokens=20,
                sampling_config=SamplingConfig(seed=1),
                output_config=OutputConfig(return_log_probs=True),
            )
            (mine,), (lone,) = alone(executor, [request]), alone(plain, [request])
            assert mine == lone if is_exact else mine[0] == lone[0]

            tokens += mine[0]

        num_cached = sum(
            stats_entry.num_reused_tokens for stats_entry in executor.get_latest_iteration_stats()
        )
        assert num_cached > 100 or not is_exact
        assert (
            sum(stats_entry.num_reused_tokens for stats_entry in plain.get_latest_iteration_stats())
            == 0
        )


# test_families has the others, on the runners
@pytest.mark.parametrize("family", ["llama", "olmo2"])
def test_greedy_ids_are_those_of_generate(family: str) -> None:
    requests = [
        plain_request
        for plain_request in staggered(16, random.Random(5), 200, 60)
        if plain_request.sampling_config.is_greedy
    ]
    with Executor(tiny_model(family)) as executor:
        got = take_all(executor, executor.enqueue_requests(requests))

    model = AutoModelForCausalLM.from_pretrained(tiny_model(family)).eval()
    for request, (tokens, *_) in zip(requests, got, strict=True):
        check_against_generate(model, request, tokens)


def check_against_generate(model: Any, request: Request, tokens: list[int]) -> None:
    """They are equal up to the first place where the two best logits of the reference are closer
    than 1e-4.
    """
    prompt = torch.tensor([request.input_token_ids])
    with torch.inference_mode():
        reference = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=request.max_tokens,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )

    expected = reference.sequences[0, prompt.shape[1] :].tolist()
    if tokens != expected:
        place = next(
            index
            for index, pair in enumerate(zip(tokens, expected, strict=True))
            if pair[0] != pair[1]
        )
        best, second = reference.logits[place][0].topk(2).values.tolist()
        assert best - second < 1e-4, f"token {place}: {tokens[place]} for {expected[place]}"


def test_the_demo_model_gives_the_same_answers_alone_and_together() -> None:
    demo = Path(__file__).parents[3] / "handlers" / "lmi_dist" / "demo"
    requests = staggered(16, random.Random(7), max_prompt=60, max_tokens=40)
    with Executor(demo, WITHOUT_REUSE) as executor:
        expected = alone(executor, requests)

    with Executor(demo) as executor:
        got = take_all(executor, executor.enqueue_requests(requests))
        is_exact = executor.capabilities.log_probs_invariant

    assert (
        got == expected if is_exact else [mine[0] for mine in got] == [lone[0] for lone in expected]
    )


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_no_bit_of_an_answer_says_that_a_prefix_was_reused(family: str) -> None:
    """Prompts with few beginnings, a cache that is too small, and a second round, in which some are
    to be kept.
    """
    choice = random.Random(family)
    stems = [
        tuple(choice.choices(range(3, VOCAB_SIZE), k=num_tokens)) for num_tokens in (70, 128, 200)
    ]
    requests = [
        replace(
            request,
            input_token_ids=choice.choice(stems)[: choice.randint(20, 200)]
            + request.input_token_ids,
        )
        for request in staggered(16, choice, max_prompt=40, max_tokens=160)
    ]
    with Executor(tiny_model(family), WITHOUT_REUSE) as executor:
        if not executor.capabilities.log_probs_invariant:
            pytest.skip("only the native kernels reuse prefixes")

        expected = alone(executor, requests)

    config = EngineConfig(max_num_sequences=8, max_kv_cache_tokens=512, max_prefill_tokens=100)
    with Executor(tiny_model(family), config) as executor:
        for retentions in ([None], [None, KEPT, LEFT]):
            retained = [
                replace(plain_request, kv_cache_retention_config=choice.choice(retentions))
                for plain_request in requests
            ]
            assert take_all(executor, executor.enqueue_requests(retained)) == expected

        stats = executor.get_latest_iteration_stats()

    assert (
        sum(plain_request.num_reused_tokens for plain_request in stats) > 500
        and sum(plain_request.num_preemptions for plain_request in stats) > 0
    )
    assert stats[-1].kv_cache_stats.used_num_blocks == 0
