"""Beam search: equal to transformers', and what it does where candidates run out."""

from __future__ import annotations

import math
import random
from functools import cache
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from handlers.base.beams import BeamSearch, Candidate, Continuation
from handlers.base.sequence import Sequence, new_sequences
from lmi.executor import (
    ErrorKind,
    FinishReason,
    OutputConfig,
    Request,
    Result,
    SamplingConfig,
    TokenLogProb,
)
from tests.beam_reference import Comparison, Found, transformers_beams

# So small that end ids come often
VOCAB_SIZE = 24
NUM_CASES = 100


@cache
def model() -> Any:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        initializer_range=0.4,
    )
    return LlamaForCausalLM(config).eval()


def search_with(request: Request) -> BeamSearch:
    """The search of a request after its end: each beam is computed whole in every step."""
    [sequence] = new_sequences(1, request, 1000)
    search = sequence.search
    assert search is not None
    while not sequence.is_finished:
        prompt = [*request.input_token_ids]
        beams = search.running
        with torch.inference_mode():
            logits = model()(torch.tensor([prompt + beam.token_ids for beam in beams])).logits[
                :, -1
            ]

        values, token_ids = logits.log_softmax(-1).topk(min(search.num_candidates, VOCAB_SIZE))
        rows = zip(token_ids.tolist(), values.tolist(), strict=True)
        sequence.advance([list(map(Candidate, *row, row[1])) for row in rows])

    return search


def random_request(random: random.Random) -> Request:
    width = random.randint(2, 6)
    stops = [
        tuple(random.choices(range(VOCAB_SIZE), k=random.randint(1, 2)))
        for _ in range(random.randint(0, 2))
    ]

    return Request(
        input_token_ids=tuple(random.choices(range(VOCAB_SIZE), k=random.randint(1, 6))),
        max_tokens=random.randint(1, 24),
        end_ids=tuple(random.sample(range(VOCAB_SIZE), random.randint(0, 2))),
        stop_words=tuple(stops) if random.random() < 0.5 else (),
        sampling_config=SamplingConfig(
            beam_width=width,
            num_return_sequences=random.randint(1, width),
            length_penalty=random.choice([None, 0.0, 0.6, 1.0, 2.0]),
            early_stopping=random.choice([None, 0, 1, 2]),
        ),
    )


def test_sequences_and_scores_are_those_of_transformers(record_property: Any) -> None:
    comparison = Comparison()
    for case in range(NUM_CASES):
        request = random_request(random.Random(case))
        search = search_with(request)
        best = search.best(request.sampling_config.num_return_sequences)
        scores = [beam.score(search.length_penalty) for beam in best]
        beams_found = Found([beam.token_ids for beam in best], scores)
        comparison.check(f"case {case}", beams_found, transformers_beams(model(), request))

    record_property("ties", comparison.ties)
    assert (
        comparison.num_equal + len(comparison.ties) == NUM_CASES
        and len(comparison.ties) < NUM_CASES // 20
    )


def started(
    width: int, *, num_beams: int = 1, streaming: bool = False, max_tokens: int = 5, **sampling: Any
) -> Sequence:
    """A sequence whose end id is 9. Beams are returned with log-probs and alternatives."""
    request = Request(
        (1, 2),
        max_tokens,
        streaming=streaming,
        end_ids=(9,),
        sampling_config=SamplingConfig(width, num_return_sequences=num_beams, **sampling),
        output_config=OutputConfig(return_log_probs=True, num_top_log_probs=1),
    )
    [sequence] = new_sequences(1, request, 100)
    return sequence


def row(**scores: float) -> list[Candidate]:
    """The candidates of a beam: `t3=-1.0` is token 3. The model's log-prob is half as
    far from 0.
    """
    return [Candidate(int(name[1:]), score, score / 2) for name, score in scores.items()]


def result_of(sequence: Sequence) -> Result:
    [response] = sequence.take_responses()
    return response.get_result()


def test_the_next_beams_are_the_best_of_all_and_say_which_beam_they_continue() -> None:
    sequence = started(2)
    assert sequence.advance([row(t3=-1.0, t4=-2.0, t5=-3.0)]) == [
        Continuation(0, 3),
        Continuation(0, 4),
    ]
    steps = sequence.advance([row(t3=-4.0, t4=-5.0), row(t3=-0.5, t4=-0.6)])
    assert steps == [Continuation(1, 3), Continuation(1, 4)]
    assert sequence.token_ids == [1, 2, 4, 3]


def test_an_end_among_the_best_is_kept_and_a_worse_one_is_passed_over() -> None:
    sequence = started(2)
    search = sequence.search

    assert search is not None
    assert sequence.advance([row(t9=-0.1, t3=-1.0, t4=-2.0)]) == [
        Continuation(0, 3),
        Continuation(0, 4),
    ]
    assert [beam.token_ids for beam in search.finished] == [[9]]
    assert sequence.advance([row(t3=-1.0, t4=-1.5, t9=-2.0), row(t3=-3.0)]) == [
        Continuation(0, 3),
        Continuation(0, 4),
    ]
    assert [beam.token_ids for beam in search.finished] == [[9]]


@pytest.mark.parametrize(
    ("early_stopping", "is_over"), [(1, True), (0, False), (2, False), (None, False)]
)
def test_early_stopping_ends_the_search_with_the_last_hypothesis(
    early_stopping: int | None, is_over: bool
) -> None:
    sequence = started(2, early_stopping=early_stopping, length_penalty=0.0)
    sequence.advance([row(t9=-3.0, t3=-1.0, t4=-2.0)])
    sequence.advance([row(t9=-0.4, t3=-0.1), row(t9=-0.1, t4=-0.9)])
    sequence.advance([row(t9=-0.4, t3=-0.1), row(t9=-9.0, t4=-9.0)])

    assert sequence.is_finished == is_over


def test_a_search_ends_when_nothing_can_become_better() -> None:
    """After one step: the best running beam sums to -4. Over the length it could reach, it may be
    better still.
    """
    for early_stopping, is_over in ((0, True), (2, False)):
        sequence = started(2, early_stopping=early_stopping, max_tokens=50)
        sequence.advance([row(t9=-1.0, t3=-1.1, t4=-1.2)])
        sequence.advance([row(t9=-0.1, t3=-2.9), row(t3=-2.9)])

        assert sequence.is_finished == is_over


def test_a_result_has_the_best_beams_with_log_probs_of_the_model() -> None:
    sequence = started(3, num_beams=2, max_tokens=2)
    sequence.advance([row(t3=-1.0, t4=-2.0, t5=-4.0)], [[TokenLogProb(3, -0.5)]])
    tops = [[TokenLogProb(token_id, -0.1)] for token_id in (6, 7, 8)]

    assert sequence.advance([row(t6=-9.0), row(t7=-2.0, t9=-0.2), row(t8=-1.0)], tops) == []

    result = result_of(sequence)
    assert result.output_token_ids == [[4, 9], [4, 7]]
    assert result.finish_reasons == [FinishReason.END_ID, FinishReason.LENGTH]
    assert result.log_probs == [[-1.0, -0.1], [-1.0, -1.0]] and result.cum_log_probs == [-1.1, -2.0]
    assert result.top_log_probs == [[[TokenLogProb(3, -0.5)], [TokenLogProb(7, -0.1)]]] * 2
    assert result.is_final and result.is_sequence_final and result.sequence_index == 0


def test_a_streamed_result_restates_whole_beams() -> None:
    sequence = started(2, num_beams=2, streaming=True)
    sequence.advance([row(t3=-1.0, t4=-2.0)])

    assert result_of(sequence).output_token_ids == [[3], [4]]

    sequence.advance([row(t3=-4.0), row(t5=-0.5, t6=-0.6)])
    result = result_of(sequence)

    assert result.output_token_ids == [[4, 5], [4, 6]]
    assert result.finish_reasons == [FinishReason.NOT_FINISHED] * 2 and not result.is_final


def test_after_a_restart_only_what_is_new_is_sent() -> None:
    sequence = started(2, streaming=True)
    sequence.advance([row(t3=-1.0, t4=-2.0)])
    assert result_of(sequence).output_token_ids == [[3]]
    sequence.restart()
    assert sequence.num_prefill == 2
    sequence.advance([row(t3=-1.0, t4=-2.0)])
    assert list(sequence.take_responses()) == []
    sequence.advance([row(t5=-1.0), row(t6=-2.0)])
    assert result_of(sequence).output_token_ids == [[3, 5]]


@pytest.mark.parametrize("streaming", [True, False])
def test_a_cancelled_search_answers_with_what_was_sent(streaming: bool) -> None:
    sequence = started(2, num_beams=2, streaming=streaming)
    sequence.advance([row(t3=-1.0, t4=-2.0)])
    sent = [response.get_result().output_token_ids for response in sequence.take_responses()]
    sequence.restart()
    sequence.finish(FinishReason.CANCELLED)
    result = result_of(sequence)
    assert result.is_final and set(result.finish_reasons) == {FinishReason.CANCELLED}
    assert result.output_token_ids == (sent[0] if streaming else [[]])


def test_fewer_candidates_make_fewer_beams() -> None:
    sequence = started(3, num_beams=3)
    assert sequence.advance([row(t3=-1.0, t4=-math.inf)]) == [Continuation(0, 3)]
    assert sequence.advance([row(t5=-1.0, t6=-2.0)]) == [Continuation(0, 5), Continuation(0, 6)]


def test_a_search_without_a_candidate_fails() -> None:
    sequence = started(2)
    sequence.advance([row(t3=-1.0, t4=-2.0)])
    assert sequence.advance([row(t3=-math.inf), []]) == []
    [response] = sequence.take_responses()
    assert response.error is not None and response.error.kind is ErrorKind.GENERATION
    assert "no token can be chosen" in response.error.message


def test_enough_candidates_are_asked_for_that_all_beams_can_run_on() -> None:
    def num_candidates(width: int, **fields: Any) -> int:
        [sequence] = new_sequences(
            1, Request((1,), 5, sampling_config=SamplingConfig(width), **fields), 100
        )
        assert sequence.search is not None
        return sequence.search.num_candidates

    assert num_candidates(4) == 8
    assert num_candidates(4, end_ids=(1, 2), stop_words=((3, 4), (5, 4))) == 8
    assert num_candidates(2, end_ids=(1, 2), stop_words=((3,), (4,))) == 6
    assert num_candidates(2, end_ids=(1, 2, 3, 4), ignore_eos=True) == 4


def test_a_huge_length_penalty_does_not_overflow() -> None:
    sequence = started(2, length_penalty=1e6, max_tokens=3)
    for _ in range(3):
        sequence.advance([row(t3=-1.0, t4=-2.0)] * (1 if sequence.num_generated == 0 else 2))

    assert len(result_of(sequence).output_token_ids[0]) == 3
