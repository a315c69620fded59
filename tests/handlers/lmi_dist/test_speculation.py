"""Drafts in the executor: every answer is the one without them, in fewer steps."""

from __future__ import annotations

import random
from typing import Any

import pytest

from handlers.lmi_dist import Executor
from lmi.executor import OutputConfig, Request, Response, SamplingConfig
from lmi.settings.config import EngineConfig
from tests.fake_runner import FakeRunner, Floats, SharingRunner
from tests.handlers.lmi_dist.test_equality import take_all
from tests.handlers.lmi_dist.test_executor import ask, collect, drained, mixed_requests
from tests.tiny_models import tiny_model

STEP_S = 0.003
OUTPUT = OutputConfig(return_log_probs=True)


class LoopingRunner(SharingRunner):
    """The next token depends only on the last one, so that answers repeat."""

    def _logits(self, state: int, token_id: int) -> Floats:
        return super()._logits(token_id % 11, token_id)


def config(speculative: str | None, max_kv_cache_tokens: int | None = None) -> EngineConfig:
    return EngineConfig(
        max_num_sequences=6, max_kv_cache_tokens=max_kv_cache_tokens, speculative=speculative
    )


def steady(executor: Executor) -> Executor:
    """Tell it that each step took the same time, whatever its size, so that drafts pay on a busy
    machine too.
    """
    note = executor._pace.note
    executor._pace.note = lambda num_rows, seconds: note(num_rows, STEP_S)  # type: ignore[method-assign]
    return executor


def answers(
    runner: FakeRunner, requests: list[Request], config: EngineConfig
) -> list[list[object]]:
    """Of each sequence: ids, log-probs, alternatives, and why it ended."""
    with steady(Executor(runner, config)) as executor:
        ids = executor.enqueue_requests(requests)
        got = collect(executor, len(requests))

    return [joined(got[request_id]) for request_id in ids]


def joined(responses: list[Response]) -> list[object]:
    results = [result.result for result in responses if result.result is not None]
    assert len(results) == len(responses), responses[-1].error_msg

    parts: dict[int, list[object]] = {}
    for result in results:
        ids, log_probs, top, _ = parts.setdefault(result.sequence_index, [[], [], [], None])
        ids += result.output_token_ids[0]
        log_probs += result.log_probs[0] if result.log_probs else []
        top += result.top_log_probs[0] if result.top_log_probs else []
        parts[result.sequence_index][3] = result.finish_reasons[0]

    return [parts[index] for index in sorted(parts)]


@pytest.mark.parametrize("max_kv_cache_tokens", [None, 320])
def test_any_request_has_the_answer_that_it_has_without_drafts(
    max_kv_cache_tokens: int | None,
) -> None:
    requests = mixed_requests(24, random.Random(5), max_prompt=60, max_tokens=60)
    plain = LoopingRunner()
    drafting = LoopingRunner()
    expected = answers(plain, requests, config(None, max_kv_cache_tokens))

    assert answers(drafting, requests, config("ngram", max_kv_cache_tokens)) == expected
    assert any(len(chunk.token_ids) > 1 for plan in drafting.plans for chunk in plan.decodes)
    assert all(len(chunk.token_ids) == 1 for plan in plain.plans for chunk in plan.decodes)


def test_an_answer_that_repeats_itself_needs_fewer_steps() -> None:
    runner = LoopingRunner()
    requests = [ask(5, max_tokens=150, sampling_config=SamplingConfig(temperature=0))]
    [[[ids, *_]]] = answers(runner, requests, config("ngram"))
    assert isinstance(ids, list) and len(ids) == 150
    assert len(runner.plans) < 75


def test_a_step_with_drafts_reports_how_much_of_them_was_right() -> None:
    runner = LoopingRunner()
    with steady(Executor(runner, config("ngram"))) as executor:
        executor.enqueue_request(
            ask(5, max_tokens=150, sampling_config=SamplingConfig(temperature=0))
        )
        collect(executor, 1)
        steps = drained(executor)

    draft_stats = [
        step.spec_decoding_stats for step in steps if step.spec_decoding_stats is not None
    ]
    drafts = [chunk for plan in runner.plans for chunk in plan.decodes if len(chunk.token_ids) > 1]

    assert sum(step.num_requests_with_draft_tokens for step in draft_stats) == len(drafts) > 0
    assert sum(step.num_draft_tokens for step in draft_stats) == sum(
        len(chunk.token_ids) - 1 for chunk in drafts
    )
    assert sum(step.num_accepted_tokens for step in draft_stats) == 150 - len(runner.plans)
    assert sum(step.num_generation_tokens for step in steps) == 150 - 1, (
        "the first token comes with the prompt"
    )


def test_a_draft_never_goes_past_the_last_token_or_the_blocks_of_its_sequence() -> None:
    runner = LoopingRunner()
    requests = [
        ask(5, max_tokens=num, sampling_config=SamplingConfig(temperature=0))
        for num in range(1, 60)
    ]
    for request_answer, request in zip(
        answers(runner, requests, config("ngram")), requests, strict=True
    ):
        [[ids, *_]] = request_answer
        assert isinstance(ids, list) and len(ids) == request.max_tokens

    for plan in runner.plans:
        assert all(
            chunk.end <= len(chunk.table) * runner.tokens_per_block for chunk in plan.decodes
        )


def test_a_step_without_memory_to_draw_for_drafts_keeps_its_first_tokens() -> None:
    """Some prompts are reused or shared, so that a step which was repeated would copy over what it
    has written.
    """
    choice = random.Random(6)
    stems = [tuple(choice.choices(range(50), k=num_tokens)) for num_tokens in (20, 40)]
    requests = [
        ask(
            *choice.choice(stems),
            *choice.choices(range(50), k=choice.randint(1, 4)),
            max_tokens=50,
            sampling_config=SamplingConfig(
                seed=number, top_k=2, num_return_sequences=choice.choice([1, 1, 3])
            ),
            output_config=OUTPUT,
        )
        for number in range(12)
    ]
    expected = answers(LoopingRunner(), requests, config(None))
    runner = LoopingRunner()
    errors = list[MemoryError]()
    with steady(Executor(runner, config("ngram"))) as executor:
        sample = executor._sampler.sample
        last = [0]

        def sample_or_fail(*args: Any) -> Any:
            is_draft, last[0] = last[0] == len(runner.plans), len(runner.plans)
            if is_draft and choice.random() < 0.3:
                errors.append(MemoryError("no memory"))
                raise errors[-1]

            return sample(*args)

        executor._sampler.sample = sample_or_fail  # type: ignore[method-assign]
        ids = executor.enqueue_requests(requests)
        got = collect(executor, len(ids))

    assert errors and [joined(got[request_id]) for request_id in ids] == expected


def test_a_model_that_is_not_invariant_has_no_drafts_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    runner = LoopingRunner()
    runner.is_batch_invariant = False
    answers(runner, [ask(5, max_tokens=60)], config("ngram"))
    assert all(len(chunk.token_ids) == 1 for plan in runner.plans for chunk in plan.decodes)
    assert "option.speculative" in caplog.text


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_real_model_gives_the_same_bits_with_drafts(family: str) -> None:
    choice = random.Random(8)
    requests = [
        ask(
            *choice.choices(range(3, 300), k=choice.randint(2, 40)) * 3,
            max_tokens=80,
            sampling_config=SamplingConfig(temperature=0)
            if number % 2
            else SamplingConfig(seed=number, top_k=3),
            output_config=OUTPUT,
        )
        for number in range(8)
    ]
    got = []
    for speculative in (None, "ngram"):
        with Executor(tiny_model(family), config(speculative)) as executor:
            if not executor.capabilities.batch_invariant:
                pytest.skip("torch computes here")

            got.append(take_all(executor, executor.enqueue_requests(requests)))
            num_steps = len(executor.get_latest_iteration_stats())

    assert got[0] == got[1]
    assert num_steps > 0
