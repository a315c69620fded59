"""Beam search on the real engine: equal to transformers', beside other requests, and with all that
a request can ask.

The shared engine's cache holds four blocks, so the beams of long prompts wait for each other.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest

from lmi.errors import InvalidParameter, Unsupported
from lmi.executor import Executor, FinishReason, OutputConfig, Request, Result, SamplingConfig
from tests.handlers.vllm.asking import (
    CONTEXT_LENGTH,
    FAMILY,
    MAX_NUM_SEQUENCES,
    PROMPT,
    TIMEOUT_S,
    TOKENS_PER_BLOCK,
    ask,
    finals,
    tokens,
)
from tests.tiny_models import VOCAB_SIZE, tiny_model

pytestmark = pytest.mark.vllm

NUM_CASES = 40
WIDTH = MAX_NUM_SEQUENCES


@cache
def model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model(FAMILY)).eval()


def search(width: int = WIDTH, prompt: tuple[int, ...] = PROMPT, **fields: Any) -> Request:
    """A request with beams, all of which are returned."""
    sampling = {"num_return_sequences": width} | fields.pop("sampling", {})
    output = fields.pop("output", OutputConfig(return_log_probs=True))
    config = SamplingConfig(width, **sampling)
    return ask(input_token_ids=prompt, sampling_config=config, output_config=output, **fields)


def found(engine: Executor, request: Request) -> Result:
    request_id = engine.enqueue_request(request)
    return finals(engine, [request_id])[request_id].get_result()


def compare(request: Request, got: Result, names: str, comparison: Any) -> None:
    from tests.beam_reference import Found, transformers_beams

    assert got.cum_log_probs is not None
    power = request.sampling_config.length_penalty
    lengths = [len(beam) ** (1.0 if power is None else power) for beam in got.output_token_ids]
    scores = [total / length for total, length in zip(got.cum_log_probs, lengths, strict=True)]
    comparison.check(
        names, Found(got.output_token_ids, scores), transformers_beams(model(), request)
    )


def random_request(dice: random.Random) -> Request:
    width = dice.randint(2, WIDTH)
    return search(
        width,
        tuple(dice.choices(range(3, VOCAB_SIZE), k=dice.randint(1, 40))),
        max_tokens=dice.randint(1, 16),
        end_ids=tuple(dice.sample(range(VOCAB_SIZE), dice.choice((0, 1, 12)))),
        sampling={
            "num_return_sequences": dice.randint(1, width),
            "length_penalty": dice.choice((None, 0.0, 0.5, 2.0)),
            "early_stopping": dice.choice((None, 0, 1, 2)),
            "min_tokens": dice.choice((None, 3)),
        },
    )


def test_beams_and_their_scores_are_those_of_transformers(engine: Executor) -> None:
    from tests.beam_reference import Comparison

    dice = random.Random(13)
    comparison = Comparison()
    requests = [random_request(dice) for _ in range(NUM_CASES)]
    requests = [
        beam_request
        for beam_request in requests
        if (beam_request.sampling_config.min_tokens or 0) <= beam_request.max_tokens
    ]
    # Of all widths at once
    ids = engine.enqueue_requests(requests)
    ended = finals(engine, ids)
    for request_id, request in zip(ids, requests, strict=True):
        compare(request, ended[request_id].get_result(), str(request), comparison)

    assert comparison.num_equal > 0.9 * len(requests), f"ties: {comparison.ties}"


def test_beams_of_a_prompt_of_several_blocks_take_it_from_the_cache(engine: Executor) -> None:
    from tests.beam_reference import Comparison

    prompt = tuple(random.Random(5).choices(range(3, VOCAB_SIZE), k=2 * TOKENS_PER_BLOCK))
    request = search(3, prompt, max_tokens=12)
    comparison = Comparison()
    first = found(engine, request)
    again = found(engine, request)
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, TOKENS_PER_BLOCK)
    compare(request, first, "first", comparison)
    compare(request, again, "again", comparison)


def test_beams_beside_sampled_and_greedy_requests_change_nobody(engine: Executor) -> None:
    alone = [found(engine, search(3)).output_token_ids, tokens(engine)]
    sampled = ask(max_tokens=40, sampling_config=SamplingConfig(temperature=1.0, seed=5))
    ids = engine.enqueue_requests([sampled, search(3), sampled, ask(), sampled])
    ended = finals(engine, ids)

    assert ended[ids[1]].get_result().output_token_ids == alone[0]
    assert ended[ids[3]].get_result().output_token_ids == [alone[1]]


def test_a_result_has_log_probs_of_tokens_alternatives_and_prompt(engine: Executor) -> None:
    import torch

    output = OutputConfig(
        return_log_probs=True,
        num_top_log_probs=10,
        num_prompt_log_probs=2,
        return_perf_metrics=True,
    )
    got = found(engine, search(2, max_tokens=5, output=output))

    assert got.log_probs is not None and got.cum_log_probs is not None
    assert (
        got.top_log_probs is not None
        and got.prompt_log_probs is not None
        and got.request_perf_metrics is not None
    )

    for number, beam in enumerate(got.output_token_ids):
        with torch.inference_mode():
            rows = model()(torch.tensor([[*PROMPT, *beam]])).logits[0].float().log_softmax(-1)

        expected = [
            float(row[token_id])
            for row, token_id in zip(rows[len(PROMPT) - 1 :], beam, strict=False)
        ]

        assert got.log_probs[number] == pytest.approx(expected, abs=1e-3)
        assert got.cum_log_probs[number] == pytest.approx(sum(expected), abs=1e-3)

        for row, top in zip(rows[len(PROMPT) - 1 :], got.top_log_probs[number], strict=False):
            values = row.topk(10).values.tolist()
            assert [top_token.log_prob for top_token in top] == pytest.approx(values, abs=1e-3)

    prompt = [float(row[token_id]) for row, token_id in zip(rows, PROMPT[1:], strict=False)]
    assert [top_token.log_prob for top_token in got.prompt_log_probs[1:]] == pytest.approx(
        prompt, abs=1e-3
    )

    times = got.request_perf_metrics
    assert times.first_token_time is not None and times.last_token_time is not None
    assert times.arrival_time < times.first_token_time < times.last_token_time


def test_a_search_is_one_request_of_the_statistics(engine: Executor) -> None:
    engine.get_latest_iteration_stats()
    found(engine, search(3, max_tokens=6))
    steps = engine.get_latest_iteration_stats()
    assert sum(step.num_context_tokens for step in steps) == len(PROMPT)
    assert sum(step.num_generation_tokens for step in steps) == 5 * 3, (
        "the first token comes with the prompt"
    )
    assert [step.num_active_requests for step in steps] == [1] * 5 + [0]
    assert {step.num_queued_requests for step in steps} == {0}
    assert sum(step.num_completed_requests for step in steps) == 1


def test_a_search_whose_beams_do_not_fit_into_the_cache_together_goes_on(engine: Executor) -> None:
    prompt = tuple(random.Random(6).choices(range(3, VOCAB_SIZE), k=3 * TOKENS_PER_BLOCK - 4))
    ids = engine.enqueue_requests(
        [search(4, prompt, max_tokens=10), search(2, prompt[1:], max_tokens=10)]
    )
    ended = finals(engine, ids)
    for request_id, width in zip(ids, (4, 2), strict=True):
        assert [len(beam) for beam in ended[request_id].get_result().output_token_ids] == [
            10
        ] * width


def test_a_search_fills_the_context_to_its_end(engine: Executor) -> None:
    prompt = (11,) * (CONTEXT_LENGTH - 3)
    got = found(engine, search(2, prompt, max_tokens=100))

    assert [len(beam) for beam in got.output_token_ids] == [3, 3]
    assert got.finish_reasons == [FinishReason.LENGTH] * 2


def test_a_cancelled_search_ends_with_what_was_sent_and_frees_the_engine(engine: Executor) -> None:
    request_id = engine.enqueue_request(search(4, max_tokens=400, streaming=True))
    assert engine.await_responses(request_id, TIMEOUT_S)
    engine.cancel_request(request_id)
    last = finals(engine, [request_id])[request_id].get_result()
    assert last.finish_reasons == [FinishReason.CANCELLED] * 4
    engine.get_latest_iteration_stats()
    assert len(tokens(engine, max_tokens=2)) == 2
    assert engine.get_latest_iteration_stats()[-1].kv_cache_stats.used_num_blocks == 0


def test_a_search_ends_at_a_stop_word_of_several_tokens(engine: Executor) -> None:
    from tests.beam_reference import Comparison

    word = tuple(found(engine, search(2, max_tokens=8)).output_token_ids[0][2:4])
    soon = {"length_penalty": 0.0, "early_stopping": 1}
    request = search(2, max_tokens=8, stop_words=(word,), sampling=soon)
    comparison = Comparison()
    got = found(engine, request)
    compare(request, got, "stop word", comparison)
    ended = [reason is FinishReason.STOP_WORDS for reason in got.finish_reasons]

    assert any(ended), "no beam ends there"
    assert ended == [tuple(beam[-2:]) == word for beam in got.output_token_ids]


def test_a_wider_search_than_the_engine_allows_is_refused_with_the_limit(engine: Executor) -> None:
    assert engine.capabilities.max_beam_width == WIDTH
    with pytest.raises(
        InvalidParameter, match=r"beam_width must be at most 4 \(option.max_beam_width\), given 5"
    ):
        engine.enqueue_request(search(5))


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("embedding_bias", {"embedding_bias": ((5, 1.0),)}),
        ("bad_words", {"bad_words": ((5, 6),)}),
        ("repetition_penalty", {"sampling": {"repetition_penalty": 1.2}}),
        ("no_repeat_ngram_size", {"sampling": {"no_repeat_ngram_size": 2}}),
    ],
)
def test_rules_that_vllm_applies_after_its_log_probs_are_refused_beside_beams(
    engine: Executor, name: str, fields: dict[str, Any]
) -> None:
    with pytest.raises(Unsupported, match=f"{name} is not supported here: vllm has no "):
        engine.enqueue_request(search(**fields))
