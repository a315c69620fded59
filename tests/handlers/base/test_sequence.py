"""A sequence: why it ends, what its Responses carry, what a restart keeps."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from handlers.base.sequence import Sequence, new_sequences
from lmi.executor import FinishReason, OutputConfig, PromptLogProb, Request, SamplingConfig


def sequence(max_length: int = 100, **fields: Any) -> Sequence:
    return new_sequences(
        1, Request(**{"input_token_ids": (1, 2), "max_tokens": 10, **fields}), max_length
    )[0]


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=12),
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), max_size=3).map(tuple),
)
def test_a_stop_word_is_found_exactly_where_the_generated_tokens_end_with_it(
    tokens: list[int], words: tuple[tuple[int, ...], ...]
) -> None:
    tracked = sequence(stop_words=words, max_tokens=100, input_token_ids=(0, 1, 2, 3) * 2)
    for num, token_id in enumerate(tokens, 1):
        tracked.append(token_id)
        is_hit = any(tuple(tokens[:num][-len(word) :]) == word for word in words)
        assert tracked.is_finished == is_hit
        if is_hit:
            assert tracked.finish_reason is FinishReason.STOP_WORDS
            break


def test_min_tokens_holds_back_end_ids_and_stop_words_but_not_the_length() -> None:
    fields: dict[str, Any] = {"end_id": 7, "stop_words": ((8,),), "max_tokens": 4}
    tracked = sequence(sampling_config=SamplingConfig(min_tokens=2), **fields)
    for token_id in (7, 8):
        tracked.append(token_id)
        assert not tracked.is_finished

    tracked.append(7)
    assert tracked.finish_reason is FinishReason.END_ID

    short = sequence(sampling_config=SamplingConfig(min_tokens=50), max_tokens=1)
    short.append(3)

    assert short.finish_reason is FinishReason.LENGTH


def test_max_tokens_is_cut_to_the_context() -> None:
    assert sequence(max_length=5, max_tokens=10).max_tokens == 3
    assert sequence(max_length=50, max_tokens=10).max_tokens == 10


def test_a_seed_is_drawn_afresh_when_there_is_none() -> None:
    assert sequence(sampling_config=SamplingConfig(seed=0)).seed == 0
    assert len({sequence().seed for _ in range(50)}) == 50


def test_a_restart_keeps_every_token_and_computes_all_of_them_again() -> None:
    tracked = sequence()
    tracked.slot = 3
    tracked.num_computed = 2
    tracked.append(5)
    tracked.num_computed = 3
    tracked.restart()

    assert (tracked.slot, tracked.num_computed, tracked.num_prefill, tracked.token_ids) == (
        None,
        0,
        3,
        [1, 2, 5],
    )
    assert tracked.is_prefilling


def test_a_restart_drops_prompt_log_probs_only_when_they_are_not_complete() -> None:
    tracked = sequence(output_config=OutputConfig(num_prompt_log_probs=0))
    tracked.prompt_log_probs = [PromptLogProb(None)]
    tracked.restart()
    assert tracked.prompt_log_probs == []
    tracked.prompt_log_probs = [PromptLogProb(None), PromptLogProb(-1.0)]
    tracked.restart()
    assert len(tracked.prompt_log_probs) == 2


@pytest.mark.parametrize("streaming", [False, True])
def test_what_was_not_sent_is_dropped_when_a_sequence_is_ended_from_outside(
    streaming: bool,
) -> None:
    tracked = sequence(streaming=streaming, output_config=OutputConfig(return_log_probs=True))
    tracked.append(5, -1.0)
    assert len(list(tracked.take_responses())) == streaming
    tracked.append(6, -2.0)
    tracked.finish(FinishReason.CANCELLED)
    [last] = tracked.take_responses()
    assert last.result is not None and last.is_final
    assert (last.result.output_token_ids, last.result.log_probs) == ([[]], [[]])
    assert last.result.cum_log_probs == [-1.0 if streaming else 0.0]


def siblings(**fields: Any) -> list[Sequence]:
    config = SamplingConfig(num_return_sequences=3, seed=5)
    return new_sequences(
        1, Request(input_token_ids=(1, 2), max_tokens=2, sampling_config=config, **fields), 100
    )


def end(one: Sequence) -> None:
    for token_id in (7, 8):
        one.append(token_id)


def test_sequences_of_one_request_have_seeds_of_their_own() -> None:
    assert [(sibling.id, sibling.index, sibling.seed) for sibling in siblings()] == [
        (1, 0, 5),
        (1, 1, 6),
        (1, 2, 7),
    ]


def test_only_the_last_response_of_the_last_sequence_is_final() -> None:
    several = siblings(streaming=True)
    for tracked in several:
        tracked.append(7)

    first = [response.result for tracked in several for response in tracked.take_responses()]
    for tracked in several:
        tracked.append(8)

    last = [
        response.result for tracked in reversed(several) for response in tracked.take_responses()
    ]
    assert [
        (result.sequence_index, result.is_sequence_final, result.is_final)
        for result in first + last
        if result
    ] == [
        *((0, False, False), (1, False, False), (2, False, False)),
        *((2, True, False), (1, True, False), (0, True, True)),
    ]


def test_one_sequence_that_fails_takes_its_request_with_it_in_one_error() -> None:
    several = siblings()
    end(several[0])
    assert [response.is_final for response in several[0].take_responses()] == [False]
    several[1].fail("no luck")
    errors = [response for failing in several[1:] for response in failing.take_responses()]
    assert [(response.is_final, response.error_msg) for response in errors] == [(True, "no luck")]


def test_greedy_sequences_are_computed_once_and_answered_as_often_as_asked() -> None:
    config = SamplingConfig(num_return_sequences=3, temperature=0)
    [tracked] = new_sequences(
        1, Request(input_token_ids=(1,), max_tokens=2, sampling_config=config), 100
    )
    end(tracked)
    results = [response.result for response in tracked.take_responses()]

    assert [(r.sequence_index, r.output_token_ids, r.is_final) for r in results if r] == [
        (0, [[7, 8]], False),
        (1, [[7, 8]], False),
        (2, [[7, 8]], True),
    ]


def test_the_prompts_log_probs_stand_on_the_first_sequence_alone() -> None:
    several = siblings(output_config=OutputConfig(num_prompt_log_probs=0))
    assert [tracked.lacks_prompt_log_probs for tracked in several] == [True, False, False]
    several[0].prompt_log_probs = [PromptLogProb(None), PromptLogProb(-1.0)]
    for tracked in several:
        end(tracked)

    results = [response.result for tracked in several for response in tracked.take_responses()]
    assert [result.prompt_log_probs is None for result in results if result] == [False, True, True]
