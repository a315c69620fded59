"""Beam search over a foreign engine, which knows only requests of one token."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from handlers.base.beams import Beam, Candidate
from handlers.base.sequence import Sequence, new_sequences
from handlers.driven.beam_rounds import BeamRow
from handlers.driven.executor import DrivenExecutor
from handlers.driven.outputs import LogProbs, SequenceOutput
from lmi.errors import InvalidParameter, Unsupported
from lmi.executor import (
    Capabilities,
    EngineInfo,
    ErrorKind,
    ExecutorConfig,
    FinishReason,
    OutputConfig,
    Request,
    Result,
    SamplingConfig as Sampling,
)
from tests.conformance.asking import TIMEOUT_S, finish
from tests.system.engines import foreign_engine
from tests.system.engines.foreign_engine import BREAK, FAULT, MAX_NUM_SEQUENCES

VOCAB_SIZE = 400
MAX_TOP = 20
PROMPT = (1, 2, 3)


@cache
def log_probs_after(token_ids: tuple[int, ...]) -> list[float]:
    """The log-prob of each next token: any numbers that depend on all tokens before. FAULT and
    BREAK are unlikely.
    """
    dice = random.Random(str(token_ids))
    logits = [dice.uniform(-4, 4) for _ in range(VOCAB_SIZE)]
    logits[FAULT] = logits[BREAK] = -50.0
    log_sum = math.log(sum(map(math.exp, logits)))
    return [logit - log_sum for logit in logits]


def best_after(token_ids: tuple[int, ...], num_top: int) -> list[tuple[int, float]]:
    pairs = enumerate(log_probs_after(token_ids))
    return sorted(pairs, key=lambda pair: -pair[1])[:num_top]


@dataclass
class Work(foreign_engine.Work):
    num_top: int = 1


class Engine(foreign_engine.Engine):
    """It gives the best token and the best `num_top` log-probs. `num_added` and `num_running` count
    what it saw.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_added = 0
        self.most_running = 0

    def add(self, work: foreign_engine.Work) -> None:
        self.num_added += 1
        super().add(work)

    def step(self) -> list[SequenceOutput]:
        self.most_running = max(self.most_running, len(self._running))
        return super().step()

    def _advance(self, work: foreign_engine.Work) -> SequenceOutput:
        assert isinstance(work, Work)
        if FAULT in work.token_ids:
            return SequenceOutput(work.id, [], end=RuntimeError("a fault"))

        top = best_after(tuple(work.token_ids), work.num_top)
        ids, values = [[entry[number] for entry in [top[0], *top]] for number in (0, 1)]
        work.token_ids.append(top[0][0])
        work.num_left -= 1
        is_row = work.id.count(".") > 1
        known_log_probs = LogProbs([[0]] * 2, [[-1.0]] * 2)
        return SequenceOutput(
            work.id,
            [top[0][0]],
            LogProbs([ids], [values]),
            known_log_probs,
            None if work.num_left else FinishReason.LENGTH,
            is_row,
        )

    @property
    def is_empty(self) -> bool:
        return not self._works


class Executor(DrivenExecutor[foreign_engine.Work]):
    title = "Foreign"

    def __init__(self) -> None:
        self.engine = Engine()
        info = EngineInfo(
            name="foreign",
            vocab_size=VOCAB_SIZE,
            max_sequence_length=512,
            max_num_sequences=MAX_NUM_SEQUENCES,
            capabilities=Capabilities(
                max_beam_width=8,
                num_return_sequences=True,
                embedding_bias=True,
                max_top_log_probs=MAX_TOP,
                perf_metrics=True,
            ),
        )
        super().__init__(self.engine, info, ExecutorConfig(request_stats_max_iterations=1000))
        self._start()

    def _work(self, sequence: Sequence) -> Work:
        prompt = sequence.request.input_token_ids
        return Work(
            f"{sequence.id}.{sequence.index}", list(prompt), len(prompt), sequence.max_tokens, None
        )

    def _row_work(self, sequence: Sequence, row: BeamRow) -> Work:
        if row.token_ids[0] == FAULT:
            raise ValueError("the engine takes no such prompt")

        return Work(row.name, row.token_ids, len(row.token_ids), 1, None, num_top=row.num_top)


@pytest.fixture
def executor() -> Iterator[Executor]:
    with Executor() as executor:
        yield executor


def ask(
    width: int = 3, prompt: tuple[int, ...] = PROMPT, max_tokens: int = 8, **fields: Any
) -> Request:
    sampling = {"beam_width": width, "num_return_sequences": width} | fields.pop("sampling", {})
    return Request(prompt, max_tokens, sampling_config=Sampling(**sampling), **fields)


def result(executor: Executor, request: Request) -> Result:
    return finish(executor, executor.enqueue_request(request))[-1].get_result()


def beams_of(request: Request, vocab_size: int = VOCAB_SIZE) -> list[Beam]:
    """What the search finds if it sees the log-probs of the whole vocabulary."""
    [sequence] = new_sequences(1, request, 512)
    assert sequence.search is not None
    while not sequence.is_finished:
        tokens = [(*request.input_token_ids, *beam.token_ids) for beam in sequence.search.running]
        is_early = sequence.num_generated < (request.sampling_config.min_tokens or 0)
        banned = sequence.end_ids if is_early else frozenset[int]()
        sequence.advance(
            [
                [
                    Candidate(token_id, -math.inf if token_id in banned else value, value)
                    for token_id, value in best_after(ids, vocab_size)
                ]
                for ids in tokens
            ]
        )

    return sequence.search.best(request.sampling_config.num_return_sequences)


REQUESTS = [
    ask(),
    ask(2, sampling={"num_return_sequences": 1}),
    # More than the engine runs at once
    ask(8, max_tokens=5),
    ask(3, sampling={"length_penalty": 0.3, "early_stopping": 1}, end_ids=tuple(range(0, 400, 80))),
    # Many ends among few candidates
    ask(2, end_ids=tuple(range(0, 400, 25))),
    ask(3, stop_words=tuple((one,) for one in range(0, 400, 50)), end_id=7),
    ask(3, end_ids=tuple(range(0, 400, 40)), sampling={"min_tokens": 4}),
    ask(3, end_ids=tuple(range(0, 400, 40)), ignore_eos=True),
    ask(3, max_tokens=1),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=range(len(REQUESTS)))
def test_the_beams_are_those_of_a_search_that_sees_the_whole_vocabulary(
    executor: Executor, request_: Request
) -> None:
    expected = beams_of(request_)
    answer = result(executor, request_)
    assert answer.output_token_ids == [beam.token_ids for beam in expected]
    assert answer.finish_reasons == [beam.finish_reason for beam in expected]
    assert executor.engine.is_empty


def test_a_result_has_the_log_probs_that_it_was_asked_for(executor: Executor) -> None:
    output = OutputConfig(
        return_log_probs=True,
        num_top_log_probs=15,
        num_prompt_log_probs=0,
        return_perf_metrics=True,
    )
    answer = result(executor, ask(output_config=output))

    assert (
        answer.log_probs is not None
        and answer.cum_log_probs is not None
        and answer.top_log_probs is not None
    )

    for token_ids, log_probs, total, tops in zip(
        answer.output_token_ids,
        answer.log_probs,
        answer.cum_log_probs,
        answer.top_log_probs,
        strict=True,
    ):
        tokens = PROMPT
        for token_id, log_prob, top in zip(token_ids, log_probs, tops, strict=True):
            assert log_prob == log_probs_after(tokens)[token_id]
            assert [(top_token.token_id, top_token.log_prob) for top_token in top] == best_after(
                tokens, 15
            )
            tokens += (token_id,)

        assert total == pytest.approx(sum(log_probs))

    assert answer.prompt_log_probs is not None and len(answer.prompt_log_probs) == len(PROMPT)
    assert answer.num_cached_tokens == 1, "what the engine says of the prompt"

    times = answer.request_perf_metrics
    assert (
        times is not None
        and times.first_scheduled_time is not None
        and times.first_token_time is not None
    )
    assert (
        times.arrival_time
        <= times.first_scheduled_time
        <= times.first_token_time
        < (times.last_token_time or 0)
    )


def test_each_response_of_a_stream_restates_all_beams(executor: Executor) -> None:
    request_id = executor.enqueue_request(ask(streaming=True))
    results = [response.get_result() for response in finish(executor, request_id)]

    assert [len(result.output_token_ids[0]) for result in results] == list(range(1, 9))
    assert [result.is_final for result in results] == [False] * 7 + [True]
    assert results[-1].output_token_ids == [beam.token_ids for beam in beams_of(ask())]
    assert all(
        result.sequence_index == 0 and len(result.output_token_ids) == 3 for result in results
    )


def test_statistics_count_a_search_as_one_request_and_its_beams_as_tokens(
    executor: Executor,
) -> None:
    plain, wide = executor.enqueue_requests([Request(PROMPT, 8), ask()])
    finish(executor, plain), finish(executor, wide)
    steps = executor.get_latest_iteration_stats()

    assert sum(step.num_context_tokens for step in steps) == 2 * len(PROMPT)
    assert sum(step.num_generation_tokens for step in steps) == 7 + 7 * 3, (
        "the first token comes with the prompt"
    )
    assert sum(step.num_completed_requests for step in steps) == 2
    assert {step.num_active_requests for step in steps[:-2]} == {2}
    assert {step.num_queued_requests for step in steps} == {0}

    stages = [
        request_stats.stage
        for iteration_stats in executor.get_latest_request_stats()
        for request_stats in iteration_stats.request_stats
        if request_stats.id == wide
    ]

    assert stages == ["GENERATION_IN_PROGRESS"] * 7 + ["GENERATION_COMPLETE"]


def test_a_search_runs_beside_more_requests_than_the_engine_runs_at_once(
    executor: Executor,
) -> None:
    ids = executor.enqueue_requests(
        [ask(4, (break_id, 5)) for break_id in range(6)] + [Request(PROMPT, 8)] * 6
    )
    answers = [finish(executor, break_id)[-1].get_result() for break_id in ids]
    for number in range(6):
        expected = [beam.token_ids for beam in beams_of(ask(4, (number, 5)))]
        assert answers[number].output_token_ids == expected

    assert executor.engine.most_running == MAX_NUM_SEQUENCES


def test_a_cancelled_search_leaves_nothing_in_the_engine(executor: Executor) -> None:
    request_id = executor.enqueue_request(ask(4, max_tokens=400, streaming=True))
    first = executor.await_responses(request_id, TIMEOUT_S)
    assert first and not first[-1].is_final  # type: ignore[union-attr]
    executor.cancel_request(request_id)
    last = finish(executor, request_id)[-1].get_result()
    assert last.finish_reasons == [FinishReason.CANCELLED] * 4
    assert len(last.output_token_ids[0]) >= 1
    assert executor.engine.is_empty
    assert len(result(executor, ask()).output_token_ids) == 3


def test_a_search_ends_at_its_deadline(executor: Executor) -> None:
    last = result(executor, ask(max_tokens=400, allotted_time_ms=50))
    assert set(last.finish_reasons) == {FinishReason.TIMED_OUT}
    assert executor.engine.is_empty


def test_what_the_engine_refuses_or_gives_up_ends_only_that_search(executor: Executor) -> None:
    refused, given_up, good = executor.enqueue_requests(
        [ask(prompt=(FAULT,)), ask(prompt=(1, FAULT)), ask()]
    )
    error = finish(executor, refused)[-1].error

    assert error is not None and (error.message, error.kind) == (
        "the engine takes no such prompt",
        ErrorKind.INVALID,
    )
    assert finish(executor, given_up)[-1].error_msg == "Foreign gave the request up: a fault"
    assert finish(executor, good)[-1].get_result().output_token_ids == [
        beam.token_ids for beam in beams_of(ask())
    ]
    assert executor.engine.is_empty


def test_a_search_that_waited_when_a_step_raised_starts_again_and_one_that_ran_ends(
    executor: Executor,
) -> None:
    running = [ask(2, (number, BREAK)) for number in range(MAX_NUM_SEQUENCES)]
    *ran, waited = executor.enqueue_requests([*running, ask()])
    assert {finish(executor, number)[-1].error_msg for number in ran} == {
        "the step failed: the step broke"
    }
    assert finish(executor, waited)[-1].get_result().output_token_ids == [
        beam.token_ids for beam in beams_of(ask())
    ]
    assert executor.engine.is_empty


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("embedding_bias", {"embedding_bias": ((5, 1.0),)}),
        ("bad_words", {"bad_words": ((5,),)}),
        ("repetition_penalty", {"sampling": {"repetition_penalty": 1.2}}),
        ("presence_penalty", {"sampling": {"presence_penalty": 0.5}}),
        ("frequency_penalty", {"sampling": {"frequency_penalty": -0.5}}),
    ],
)
def test_rules_that_change_logits_are_refused_beside_beams(
    executor: Executor, name: str, fields: dict[str, Any]
) -> None:
    with pytest.raises(
        Unsupported, match=f"{name} is not supported here: foreign has no .* in a beam search"
    ):
        executor.enqueue_request(ask(**fields))


def test_penalties_that_change_nothing_are_taken_beside_beams(executor: Executor) -> None:
    off = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    assert (
        result(executor, ask(sampling=off)).output_token_ids
        == result(executor, ask()).output_token_ids
    )


def test_more_ends_than_the_engine_has_log_probs_for_are_refused(executor: Executor) -> None:
    assert result(executor, ask(8, max_tokens=2, end_ids=tuple(range(100, 112)))).output_token_ids
    with pytest.raises(InvalidParameter, match="end_ids must be at most 12 .*, given 13"):
        executor.enqueue_request(ask(8, end_ids=tuple(range(100, 112)), stop_words=((3, 150),)))
