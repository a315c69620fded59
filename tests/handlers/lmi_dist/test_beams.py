"""Beam search in the embedded executor: what it finds, how its rows share blocks, and which widths
run together.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from handlers.base.beams import Candidate
from handlers.base.token_sequence import sequences_of
from handlers.lmi_dist import Executor
from handlers.lmi_dist.native.sampling_records import Sampling, new_row_params
from handlers.lmi_dist.plan import Plan
from handlers.lmi_dist.sampler import Sampler
from handlers.lmi_dist.sequence import EmbeddedSequence
from lmi.errors import InvalidParameter
from lmi.executor import (
    ErrorKind,
    FinishReason,
    LoraConfig,
    OutputConfig,
    Request,
    RequestStats,
    Result,
    SamplingConfig,
)
from lmi.settings.config import EngineConfig
from tests.beam_reference import Comparison, Found, transformers_beams
from tests.fake_runner import FakeRunner, Floats, SharingRunner
from tests.handlers.lmi_dist import peft_adapters
from tests.handlers.lmi_dist.test_executor import collect, drained
from tests.tiny_models import VOCAB_SIZE, tiny_model

RUNNERS = [SharingRunner, FakeRunner]
SIZE = SharingRunner.tokens_per_block


def beams(width: int, *prompt: int, num: int | None = None, **fields: Any) -> Request:
    """A request for `num` beams of a search, or for all of them. Fields of the SamplingConfig are
    its own.
    """
    names = (
        "length_penalty",
        "early_stopping",
        "min_tokens",
        "no_repeat_ngram_size",
        "repetition_penalty",
    )
    sampling = {name: fields.pop(name) for name in names if name in fields}
    return Request(
        **{
            "input_token_ids": prompt or (1, 2, 3),
            "max_tokens": 8,
            "sampling_config": SamplingConfig(width, num_return_sequences=num or width, **sampling),
            "output_config": OutputConfig(return_log_probs=True),
            **fields,
        }
    )


def random_beams(
    choice: random.Random, vocab_size: int, max_prompt: int, max_tokens: int, **fields: Any
) -> Request:
    width = fields.pop("width", None) or choice.randint(2, 5)
    return beams(
        width,
        *choice.choices(range(3, vocab_size), k=choice.randint(1, max_prompt)),
        num=choice.randint(1, width),
        max_tokens=choice.randint(1, max_tokens),
        end_ids=tuple(choice.sample(range(3, vocab_size), choice.choice([0, 3, vocab_size // 8]))),
        length_penalty=choice.choice([None, 0.0, 0.6, 1.0, 2.0]),
        early_stopping=choice.choice([None, 0, 1, 2]),
        **fields,
    )


def random_rules(choice: random.Random) -> dict[str, Any]:
    token_ids = range(3, VOCAB_SIZE)
    rules = {
        "repetition_penalty": choice.choice([1.3, 0.8]),
        "no_repeat_ngram_size": choice.choice([1, 2, 3]),
        "min_tokens": choice.choice([2, 5]),
        "bad_words": tuple(
            tuple(choice.choices(token_ids, k=choice.choice([1, 1, 2]))) for _ in range(30)
        ),
        "embedding_bias": tuple(
            (token_id, choice.uniform(-3, 3)) for token_id in choice.sample(token_ids, 20)
        ),
        "stop_words": tuple(
            tuple(choice.choices(token_ids, k=choice.choice([1, 2]))) for _ in range(6)
        ),
    }
    return {name: rules[name] for name in choice.sample(list(rules), choice.choice([0, 0, 1, 2]))}


def results(executor: Executor, requests: list[Request]) -> list[Result]:
    """The last Result of each request. They arrive together."""
    ids = executor.enqueue_requests(requests)
    got = collect(executor, len(requests))
    return [got[request_id][-1].get_result() for request_id in ids]


def same(one: Result, other: Result) -> bool:
    """Whether both have the same beams, bit by bit."""
    return (one.output_token_ids, one.log_probs, one.finish_reasons) == (
        other.output_token_ids,
        other.log_probs,
        other.finish_reasons,
    )


def alone(request: Request, runner: FakeRunner) -> EmbeddedSequence:
    """The search of a request, with each beam computed from the first token on."""
    [sequence] = sequences_of(EmbeddedSequence, 1, request, runner.context_length)
    search = sequence.search
    assert search is not None
    while not sequence.is_finished:
        states = [[*request.input_token_ids, *beam.token_ids] for beam in search.running]
        sequence.advance(candidates(runner, states, min(search.num_candidates, runner.vocab_size)))

    return sequence


def candidates(runner: FakeRunner, states: list[list[int]], num: int) -> list[list[Candidate]]:
    """The best tokens after each of these beginnings."""
    params = new_row_params(len(states), row=range(len(states)), num_candidates=num)
    answers = Sampler(runner.vocab_size).sample_rows(
        Sampling(np.stack([runner.logits(state) for state in states]), params)
    )
    rows = answers.best.reshape(len(states), num).tolist()
    return [[Candidate(*state) for state in row] for row in rows]


def check_alone(result: Result, request: Request, runner: FakeRunner) -> None:
    [response] = alone(request, runner).take_responses()
    assert same(result, response.get_result())


# What it finds.

FAMILIES = ["llama", "mistral", "qwen3", "gemma3", "phi3", "gpt2", "opt", "olmo2"]
NUM_CASES = 200


@pytest.mark.parametrize("family", FAMILIES)
def test_sequences_and_scores_are_those_of_transformers(family: str, record_property: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model(family), dtype=torch.float32).eval()
    choice = random.Random(family)
    comparison = Comparison()
    requests = [
        random_beams(choice, VOCAB_SIZE, max_prompt=70, max_tokens=16, **random_rules(choice))
        for _ in range(NUM_CASES // len(FAMILIES))
    ]
    with Executor(tiny_model(family), EngineConfig(max_num_sequences=16)) as executor:
        ids = executor.enqueue_requests(requests)
        got = collect(executor, len(requests))

    for request_id, request in zip(ids, requests, strict=True):
        result = got[request_id][-1].get_result()
        expected = transformers_beams(model, request)
        comparison.check(f"{family} {request}", found(request, result, expected), expected)

    record_property("ties", comparison.ties)
    assert comparison.num_equal > len(comparison.ties)


def found(request: Request, result: Result, expected: Found) -> Found:
    """The beams with their scores. With rules the search's scores are not the log-probs that a
    Result reports.
    """
    sampling = request.sampling_config
    has_rules = sampling.repetition_penalty is not None or bool(request.embedding_bias)
    penalty = 1.0 if sampling.length_penalty is None else sampling.length_penalty
    assert result.cum_log_probs is not None
    scores = [
        total / len(beam) ** penalty
        for total, beam in zip(result.cum_log_probs, result.output_token_ids, strict=True)
    ]
    return Found(result.output_token_ids, expected.scores if has_rules else scores)


def test_an_adapter_searches_as_the_merged_model(tmp_path: Path) -> None:
    model = tiny_model("llama")
    prompt = range(5, 75)
    adapter = peft_adapters.make(model, tmp_path / "mine", target_modules="all-linear")
    requests = [
        beams(3, *prompt, max_tokens=12, lora_config=LoraConfig("mine")),
        beams(3, *prompt, max_tokens=12),
    ]
    with Executor(
        model, EngineConfig(options={"enable_lora": "true", "max_lora_rank": "8"})
    ) as executor:
        executor.load_adapter("mine", str(adapter))
        answers = results(executor, requests)

    comparison = Comparison()
    for request, answer, folder in zip(requests, answers, (adapter, None), strict=True):
        expected = transformers_beams(peft_adapters.merged(model, folder), request)
        comparison.check(f"with {folder}", found(request, answer, expected), expected)

    assert comparison.num_equal == 2 and answers[0].output_token_ids != answers[1].output_token_ids


# Rows, slots and blocks.


@pytest.mark.parametrize("max_kv_cache_tokens", [None, 512, 640])
@pytest.mark.parametrize("max_prefill_tokens", [7, 256])
@pytest.mark.parametrize("kind", RUNNERS)
def test_every_search_is_the_one_of_whole_sequences(
    kind: type[FakeRunner], max_prefill_tokens: int, max_kv_cache_tokens: int | None
) -> None:
    """SharingRunner refuses to read keys of other tokens, and to write where another row writes."""
    choice = random.Random(repr((kind, max_prefill_tokens, max_kv_cache_tokens)))
    requests = [
        random_beams(choice, 50, max_prompt=60, max_tokens=40, streaming=choice.random() < 0.5)
        for _ in range(16)
    ]
    config = EngineConfig(
        max_num_sequences=12,
        max_prefill_tokens=max_prefill_tokens,
        max_kv_cache_tokens=max_kv_cache_tokens,
    )
    with Executor(kind(), config) as executor:
        assert executor.info.max_sequence_length == 512
        answers = results(executor, requests)
        assert drained(executor)[-1].kv_cache_stats.used_num_blocks == 0

    for request, answer in zip(requests, answers, strict=True):
        check_alone(answer, request, kind())


@pytest.mark.parametrize("kind", RUNNERS)
def test_searches_that_are_preempted_find_the_same(kind: type[FakeRunner]) -> None:
    requests = [beams(4, number, max_tokens=150) for number in range(8)]
    with Executor(kind(context_length=160), EngineConfig(max_kv_cache_tokens=640)) as executor:
        answers = results(executor, requests)
        stats = drained(executor)

    assert sum(stat.num_preemptions for stat in stats) > 0
    assert stats[-1].kv_cache_stats.used_num_blocks == 0
    for request, answer in zip(requests, answers, strict=True):
        check_alone(answer, request, kind())


def test_a_stream_goes_on_after_a_preemption_where_it_was() -> None:
    requests = [beams(4, number, max_tokens=150, streaming=True) for number in range(8)]
    with Executor(
        SharingRunner(context_length=160), EngineConfig(max_kv_cache_tokens=640)
    ) as executor:
        executor.enqueue_requests(requests)
        got = collect(executor, len(requests))
        assert sum(stats_entry.num_preemptions for stats_entry in drained(executor)) > 0

    for responses in got.values():
        lengths = [len(stats_entry.get_result().output_token_ids[0]) for stats_entry in responses]
        assert lengths == list(range(1, 151))


def test_drafts_leave_searches_alone() -> None:
    single = Request((1, 2) * 20, 20, sampling_config=SamplingConfig(temperature=0))
    requests = [single, beams(4, *(1, 2) * 20, max_tokens=20)]
    with Executor(SharingRunner(), EngineConfig(speculative="ngram")) as executor:
        _, answer = results(executor, requests)

    check_alone(answer, requests[1], SharingRunner())


def test_the_prompt_is_computed_once_and_its_full_blocks_are_shared() -> None:
    runner = SharingRunner()
    with Executor(runner, EngineConfig()) as executor:
        results(executor, [beams(4, *range(40), max_tokens=8)])

    assert [len(plan.chunks) for plan in runner.plans] == [1] + [4] * 7
    assert len(runner.plans[0].prefills[0].token_ids) == 40

    for plan in runner.plans[1:]:
        tables = [chunk.table for chunk in plan.decodes]
        # The full blocks of the prompt
        assert len({tuple(table[:2]) for table in tables}) == 1
        assert len({table[2] for table in tables}) == 4


def test_only_beams_that_change_their_place_copy_a_block() -> None:
    """A row copies if another one goes on in the slot of the row that both continue."""
    runner = SharingRunner()
    request = beams(4, *range(40), max_tokens=30)
    with Executor(runner, EngineConfig()) as executor:
        results(executor, [request])

    [sequence] = sequences_of(EmbeddedSequence, 1, request, 512)
    parents: list[Counter[int]] = []
    assert sequence.search is not None

    while not sequence.is_finished:
        states = [[*request.input_token_ids, *beam.token_ids] for beam in sequence.search.running]
        steps = sequence.advance(candidates(runner, states, sequence.search.num_candidates))
        parents.append(Counter(step.parent for step in steps))

    for place, (plan, counts) in enumerate(zip(runner.plans[1:], parents, strict=False), start=40):
        num_forked = counts.total() - len(counts)
        assert len(plan.copies) == (num_forked if place % SIZE else 0)


def test_nothing_is_copied_at_the_end_of_a_block() -> None:
    runner = SharingRunner()
    with Executor(runner, EngineConfig()) as executor:
        results(executor, [beams(4, *range(2 * SIZE), max_tokens=2)])

    assert runner.plans[1].copies == []


def test_a_search_reuses_a_prompt_and_gives_the_same() -> None:
    runner = SharingRunner()
    request = beams(3, *range(40), max_tokens=20)
    with Executor(runner, EngineConfig()) as executor:
        [first] = results(executor, [request])
        [again] = results(executor, [request])
        [unrelated] = results(executor, [beams(3, *range(20), 7, 8, 9, max_tokens=20)])

    assert same(first, again)
    assert (first.num_cached_tokens, again.num_cached_tokens, unrelated.num_cached_tokens) == (
        0,
        32,
        16,
    )


def test_what_beams_have_written_can_be_reused() -> None:
    runner = SharingRunner()
    with Executor(runner, EngineConfig()) as executor:
        [first] = results(executor, [beams(3, *range(40), max_tokens=60)])
        [longer] = results(
            executor, [beams(2, *range(40), *first.output_token_ids[0], max_tokens=4)]
        )

    assert longer.num_cached_tokens >= 80


@pytest.mark.parametrize("kind", RUNNERS)
def test_a_search_that_needs_more_than_the_whole_cache_says_so(kind: type[FakeRunner]) -> None:
    """20 blocks of 16 tokens, and a prompt of 40. With shared blocks beams share what they have in
    common.
    """
    with Executor(kind(), EngineConfig(max_kv_cache_tokens=320)) as executor:
        executor.enqueue_request(beams(4, *range(40), max_tokens=280, early_stopping=2))
        [[response]] = collect(executor, 1).values()
        [after] = results(executor, [beams(4, *range(40), max_tokens=4)])
        stats = drained(executor)

    assert response.error is not None and response.error.kind is ErrorKind.INVALID
    assert (
        response.error.field == "beam_width"
        and "the KV cache of 320 tokens after" in response.error_msg
    )

    num_generated = int(response.error_msg.split()[-5])
    assert num_generated >= 5 * SIZE - 40 + 1, "no block was left"
    assert {len(beam) for beam in after.output_token_ids} == {4}
    assert (
        sum(stat.num_preemptions for stat in stats) == 0
        and stats[-1].kv_cache_stats.used_num_blocks == 0
    )


@pytest.mark.parametrize(("kind", "max_tokens"), [(SharingRunner, 200), (FakeRunner, 50)])
def test_a_search_that_fits_alone_is_never_cut_short_by_others(
    kind: type[FakeRunner], max_tokens: int
) -> None:
    requests = [
        beams(4, *range(start, start + 20), max_tokens=max_tokens, early_stopping=2)
        for start in (0, 9, 18)
    ]
    with Executor(kind(), EngineConfig()) as executor:
        whole = results(executor, requests)

    with Executor(kind(), EngineConfig(max_kv_cache_tokens=320)) as executor:
        tight = results(executor, requests)
        num_preemptions = sum(stats_entry.num_preemptions for stats_entry in drained(executor))

    assert all(map(same, whole, tight)) and num_preemptions > 0
    assert {len(beam) for stats_entry in tight for beam in stats_entry.output_token_ids} == {
        max_tokens
    }


def test_beams_that_share_their_beginning_need_no_room_of_their_own_for_it() -> None:
    """Two beams of 240 tokens, in a cache with room for 320 of one."""
    request = beams(2, *range(40), max_tokens=200, embedding_bias=((7, 1000.0),), end_ids=(8,))
    with Executor(SharingRunner(), EngineConfig(max_kv_cache_tokens=320)) as executor:
        [tight] = results(executor, [request])

    assert {len(beam) for beam in tight.output_token_ids} == {200}


def test_a_search_without_any_room_fails() -> None:
    config = EngineConfig(max_kv_cache_tokens=64)
    with Executor(FakeRunner(), config) as executor:
        executor.enqueue_request(beams(4, *range(40)))
        [[response]] = collect(executor, 1).values()

        assert response.error is not None and response.error.kind is ErrorKind.INVALID
        assert (
            response.error_msg
            == "beam_width of 4 needs more than the KV cache of 64 tokens for this prompt"
        )

        [answer] = results(executor, [beams(2, 1)])

    assert len(answer.output_token_ids) == 2


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_reuse_and_preemption_change_no_bit_of_a_search(family: str) -> None:
    """With 64 tokens in a block. Rules are copied when a beam forks another."""
    prompts = [[3], [4], [*range(5, 140)], [*range(5, 100), 7, 8, 9]]
    requests = [
        beams(4, *prompt, max_tokens=240, **rules)
        for prompt in prompts
        for rules in (
            {},
            {"repetition_penalty": 1.2, "no_repeat_ngram_size": 2, "bad_words": ((9, 8), (7,))},
        )
    ]
    config = EngineConfig(max_num_sequences=16, max_sequence_length=256)
    with Executor(tiny_model(family), replace(config, enable_prefix_caching=False)) as executor:
        lone = [results(executor, [request])[0] for request in requests]

    with Executor(tiny_model(family), replace(config, max_kv_cache_tokens=1024)) as executor:
        tight = results(executor, requests)
        stats = drained(executor)
        again = results(executor, requests)

    assert all(map(same, lone, tight)) and all(map(same, lone, again))
    assert (
        sum(stats_entry.num_preemptions for stats_entry in stats) > 0
        and stats[-1].kv_cache_stats.used_num_blocks == 0
    )
    assert any(stats_entry.num_cached_tokens for stats_entry in again)


# The life of a request.


def test_a_request_is_counted_once() -> None:
    config = EngineConfig(request_stats_max_iterations=100)
    with Executor(SharingRunner(), config) as executor:
        results(executor, [beams(4, *range(20)), beams(4, *range(30))])
        stats = drained(executor)
        per_step = executor.get_latest_request_stats()

    assert max(stats_entry.num_active_requests for stats_entry in stats) == 2
    assert sum(stats_entry.num_completed_requests for stats_entry in stats) == 2

    told_stats: list[RequestStats] = [
        stats_entry for step in per_step for stats_entry in step.request_stats
    ]
    assert all(
        len({stats_entry.id for stats_entry in step.request_stats}) == len(step.request_stats)
        for step in per_step
    )
    assert max(stats_entry.num_generated_tokens for stats_entry in told_stats) == 8
    assert {stats_entry.stage for stats_entry in told_stats} >= {
        "GENERATION_IN_PROGRESS",
        "GENERATION_COMPLETE",
    }


def test_a_stream_restates_whole_beams() -> None:
    with Executor(SharingRunner(), EngineConfig()) as executor:
        executor.enqueue_request(beams(3, num=2, max_tokens=5, streaming=True))
        [responses] = collect(executor, 1).values()

    told_results = [response.get_result() for response in responses]
    assert [[len(beam) for beam in response.output_token_ids] for response in told_results] == [
        [num] * 2 for num in range(1, 6)
    ]
    assert [response.is_final for response in told_results] == [False] * 4 + [True]
    assert {response.sequence_index for response in told_results} == {0}
    assert told_results[0].finish_reasons == [FinishReason.NOT_FINISHED] * 2
    assert told_results[-1].finish_reasons == [FinishReason.LENGTH] * 2


class GatedRunner(SharingRunner):
    """Asks for something to be done before its step `place`, once."""

    def __init__(self, place: int, act: Callable[[], object]) -> None:
        super().__init__()
        self.place = place
        self.act = act

    def forward(self, plan: Plan) -> Floats:
        if len(self.plans) == self.place:
            self.act()

        return super().forward(plan)


@pytest.mark.parametrize("place", [0, 1, 5])
@pytest.mark.parametrize("streaming", [True, False])
def test_a_cancel_frees_every_slot_and_answers_with_what_was_sent(
    streaming: bool, place: int
) -> None:
    runner = GatedRunner(place, lambda: executor.cancel_request(1))
    with Executor(runner, EngineConfig()) as executor:
        assert (
            executor.enqueue_request(beams(4, *range(40), max_tokens=400, streaming=streaming)) == 1
        )

        [responses] = collect(executor, 1).values()
        assert drained(executor)[-1].kv_cache_stats.used_num_blocks == 0

        [after] = results(executor, [beams(8)])

    last = responses[-1].get_result()
    assert set(last.finish_reasons) == {FinishReason.CANCELLED}
    assert {len(beam) for beam in last.output_token_ids} == {place + 1 if streaming else 0}
    assert len(after.output_token_ids) == 8


def test_a_deadline_ends_a_search() -> None:
    runner = GatedRunner(3, lambda: time.sleep(0.2))
    with Executor(runner, EngineConfig()) as executor:
        [answer] = results(executor, [beams(4, max_tokens=400, allotted_time_ms=100)])

    assert set(answer.finish_reasons) == {FinishReason.TIMED_OUT}


def test_a_prompt_whose_logits_are_no_numbers_fails_and_harms_nobody() -> None:
    poison = {49: float("nan")}
    with Executor(SharingRunner(poison=poison), EngineConfig()) as executor:
        bad, good = executor.enqueue_requests([beams(4, 1, 49), beams(4, 1, 2)])
        got = collect(executor, 2)

        assert drained(executor)[-1].kv_cache_stats.used_num_blocks == 0

    assert "not numbers" in got[bad][-1].error_msg

    check_alone(got[good][-1].get_result(), beams(4, 1, 2), SharingRunner(poison=poison))


def raising(*errors: Exception) -> Callable[[], None]:
    """Raises each error once."""
    left_errors = list(errors)

    def act() -> None:
        if left_errors:
            raise left_errors.pop(0)

    return act


def test_memory_that_runs_out_ends_one_search_and_the_others_go_on() -> None:
    requests = [beams(4, *range(number, number + 20)) for number in (1, 2)]
    with Executor(GatedRunner(4, raising(MemoryError("no memory"))), EngineConfig()) as executor:
        ids = executor.enqueue_requests(requests)
        got = collect(executor, 2)
        assert drained(executor)[-1].kv_cache_stats.used_num_blocks == 0

    [(request, responses)] = [
        (request, got[request_id])
        for request, request_id in zip(requests, ids, strict=True)
        if got[request_id][-1].error is None
    ]
    check_alone(responses[-1].get_result(), request, SharingRunner())


def test_a_step_that_breaks_ends_its_searches_and_the_next_one_is_served() -> None:
    request = beams(4, *range(40))
    with Executor(GatedRunner(4, raising(RuntimeError("broken"))), EngineConfig()) as executor:
        executor.enqueue_request(request)
        [[response]] = collect(executor, 1).values()
        assert "broken" in response.error_msg
        [answer] = results(executor, [request])

    check_alone(answer, request, SharingRunner())


def test_prompt_log_probs_and_alternatives_come_with_beams() -> None:
    output = OutputConfig(return_log_probs=True, num_top_log_probs=3, num_prompt_log_probs=1)
    with Executor(SharingRunner(), EngineConfig()) as executor:
        [answer] = results(executor, [beams(4, *range(20), output_config=output)])

    assert answer.prompt_log_probs is not None and len(answer.prompt_log_probs) == 20
    assert answer.top_log_probs is not None and answer.log_probs is not None

    for tops, log_probs in zip(answer.top_log_probs, answer.log_probs, strict=True):
        assert [len(top) for top in tops] == [3] * 8 and len(log_probs) == 8
        assert all(
            top[0].log_prob >= log_prob for top, log_prob in zip(tops, log_probs, strict=True)
        )


# Widths in flight.


def test_requests_of_another_width_wait_until_nothing_runs() -> None:
    """1, 4 and 1 are queued: the third starts after the second has ended."""
    runner = SharingRunner()
    single = Request((1, 1), 6, sampling_config=SamplingConfig(temperature=0))
    with Executor(runner, EngineConfig()) as executor:
        results(executor, [single, beams(4, 2, 2, max_tokens=6), single])

    assert [len(plan.prefills) for plan in runner.plans] == [1, 0, 0, 0, 0, 0] * 3
    assert [len(plan.decodes) for plan in runner.plans] == [
        0,
        1,
        1,
        1,
        1,
        1,
        0,
        4,
        4,
        4,
        4,
        4,
        0,
        1,
        1,
        1,
        1,
        1,
    ]


def test_nobody_of_the_running_width_overtakes_another_width() -> None:
    """The first answer is long. While it runs, a wide request waits, and a narrow one behind it,
    though it has room.
    """
    runner = SharingRunner()
    long, short = (
        Request((1, 1), num, sampling_config=SamplingConfig(temperature=0)) for num in (40, 2)
    )
    with Executor(runner, EngineConfig()) as executor:
        ids = executor.enqueue_requests([long, beams(2, 2, 2, max_tokens=3), short])
        got = collect(executor, 3)

    assert all(len(plan.chunks) == 1 for plan in runner.plans[:40])
    assert list(got) == ids


def test_a_priority_changes_the_order_and_not_the_rule() -> None:
    runner = SharingRunner()
    low, high = (
        Request((number,), 4, priority=priority) for number, priority in ((1, 0.1), (2, 0.9))
    )
    with Executor(runner, EngineConfig()) as executor:
        ids = executor.enqueue_requests([low, beams(4, 3, max_tokens=4, priority=0.5), high])
        got = collect(executor, 3)

    assert list(got) == [ids[2], ids[1], ids[0]]
    assert [len(plan.decodes) for plan in runner.plans] == [0, 1, 1, 1, 0, 4, 4, 4, 0, 1, 1, 1]


def test_searches_of_one_width_run_together() -> None:
    runner = SharingRunner()
    with Executor(runner, EngineConfig()) as executor:
        results(executor, [beams(4, *range(number, number + 20)) for number in range(4)])

    assert max(len(plan.decodes) for plan in runner.plans) == 16


def test_widths_beyond_the_bound_are_refused() -> None:
    with Executor(SharingRunner(), EngineConfig()) as executor:
        assert executor.info.capabilities.max_beam_width == 8
        with pytest.raises(
            InvalidParameter,
            match=r"^beam_width must be at most 8 \(option.max_beam_width\), given 16$",
        ):
            executor.enqueue_request(beams(16))

    with Executor(SharingRunner(), EngineConfig(max_num_sequences=4)) as executor:
        assert executor.info.capabilities.max_beam_width == 4
