"""The contract's rules on beam search."""

from __future__ import annotations

import pytest

from lmi.executor import Executor, FinishReason, OutputConfig, SamplingConfig
from tests.conformance.asking import TIMEOUT_S, ask, endless, finish, results, run
from tests.conformance.table import needs

pytestmark = needs("max_beam_width")

WIDTH = 3
SEARCH = SamplingConfig(WIDTH, num_return_sequences=WIDTH)
LOG_PROBS = OutputConfig(return_log_probs=True)


def score(log_probs: list[float], length_penalty: float) -> float:
    return sum(log_probs) / len(log_probs) ** length_penalty


def test_a_search_answers_with_all_its_beams_at_once(executor: Executor) -> None:
    result = run(executor, sampling_config=SEARCH)
    assert (result.is_final, result.is_sequence_final, result.sequence_index) == (True, True, 0)
    assert (
        len({tuple(ids) for ids in result.output_token_ids}) == WIDTH == len(result.finish_reasons)
    )
    assert set(result.finish_reasons) == {FinishReason.LENGTH}


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
def test_beams_are_ranked_by_their_log_probs_over_a_power_of_their_length(
    executor: Executor, length_penalty: float
) -> None:
    config = SamplingConfig(WIDTH, num_return_sequences=WIDTH, length_penalty=length_penalty)
    result = run(executor, sampling_config=config, output_config=LOG_PROBS)
    assert result.log_probs is not None and result.cum_log_probs is not None
    assert [len(log_prob) for log_prob in result.log_probs] == [
        len(ids) for ids in result.output_token_ids
    ]
    assert result.cum_log_probs == pytest.approx([sum(log_prob) for log_prob in result.log_probs])
    scores = [score(log_prob, length_penalty) for log_prob in result.log_probs]
    assert scores == sorted(scores, reverse=True)


def test_the_best_beam_is_at_least_as_probable_as_the_greedy_answer(executor: Executor) -> None:
    greedy, searched = (
        run(executor, sampling_config=config, output_config=LOG_PROBS)
        for config in (SamplingConfig(temperature=0), SEARCH)
    )
    assert greedy.cum_log_probs is not None and searched.cum_log_probs is not None
    assert searched.cum_log_probs[0] >= greedy.cum_log_probs[0] - 1e-4


def test_fewer_beams_may_be_returned_than_are_searched(executor: Executor) -> None:
    all_beams = run(executor, sampling_config=SEARCH).output_token_ids
    config = SamplingConfig(WIDTH, num_return_sequences=2)
    assert run(executor, sampling_config=config).output_token_ids == all_beams[:2]
    assert run(executor, sampling_config=SamplingConfig(WIDTH)).output_token_ids == all_beams


def test_a_streamed_search_restates_whole_beams(executor: Executor) -> None:
    whole = run(executor, sampling_config=SEARCH)
    *earlier, last = results(
        finish(executor, executor.enqueue_request(ask(streaming=True, sampling_config=SEARCH)))
    )
    assert earlier and all(
        not earlier_result.is_final and not earlier_result.is_sequence_final
        for earlier_result in earlier
    )

    for result in earlier:
        assert (
            set(result.finish_reasons) == {FinishReason.NOT_FINISHED} and result.sequence_index == 0
        )
        assert 1 <= len(result.output_token_ids) <= WIDTH

    assert (last.output_token_ids, last.finish_reasons) == (
        whole.output_token_ids,
        whole.finish_reasons,
    )


def test_an_end_token_ends_a_beam_and_stays_in_it(executor: Executor) -> None:
    # Short beams are better
    config = SamplingConfig(WIDTH, num_return_sequences=WIDTH, length_penalty=0.0)
    end = run(executor, sampling_config=config).output_token_ids[0][2]
    result = run(executor, sampling_config=config, end_id=end)
    for ids, reason in zip(result.output_token_ids, result.finish_reasons, strict=True):
        assert (ids[-1] == end) == (reason is FinishReason.END_ID)
        assert end not in ids[:-1]

    assert FinishReason.END_ID in result.finish_reasons


def test_requests_of_several_widths_are_all_answered_as_alone(executor: Executor) -> None:
    configs = [
        SamplingConfig(width, temperature=0, num_return_sequences=width)
        for width in (1, 3, 1, 2, 3)
    ]
    alone = [run(executor, sampling_config=config).output_token_ids for config in configs]
    ids = executor.enqueue_requests([ask(sampling_config=config) for config in configs])
    together = [results(finish(executor, request_id))[-1] for request_id in ids]
    assert [result.output_token_ids for result in together] == alone


def test_a_search_is_cancelled_as_one(executor: Executor) -> None:
    request = endless(executor, streaming=True, sampling_config=SEARCH)
    request_id = executor.enqueue_request(request)
    executor.await_responses(request_id, TIMEOUT_S)
    executor.cancel_request(request_id)
    last = results(finish(executor, request_id))[-1]
    assert set(last.finish_reasons) == {FinishReason.CANCELLED} and last.is_sequence_final
    assert run(executor).finish_reasons == [FinishReason.LENGTH]


@needs("no_repeat_ngram_size")
def test_no_beam_repeats_an_ngram(executor: Executor) -> None:
    config = SamplingConfig(WIDTH, num_return_sequences=WIDTH, no_repeat_ngram_size=2)
    for ids in run(executor, sampling_config=config, max_tokens=40).output_token_ids:
        pairs = list(zip(ids, ids[1:], strict=False))
        assert len(set(pairs)) == len(pairs)
