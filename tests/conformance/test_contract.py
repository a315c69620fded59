"""The contract of `lmi.executor.Executor`, held against every engine."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from lmi.errors import InvalidParameter
from lmi.executor import Executor, FinishReason, OutputConfig, Response, SamplingConfig
from tests.conformance.asking import (
    GREEDY,
    PROMPT,
    TIMEOUT_S,
    ask,
    endless,
    finish,
    long_prompt,
    results,
    run,
    several,
    wait_until_idle,
)
from tests.conformance.table import needs


def test_ids_are_unique_and_grow(executor: Executor) -> None:
    ids = executor.enqueue_requests([ask(max_tokens=1) for _ in range(5)])
    ids.append(executor.enqueue_request(ask(max_tokens=1)))
    assert ids == sorted(set(ids))
    executor.await_responses(ids, TIMEOUT_S)


def test_a_request_that_is_not_streamed_has_exactly_one_response(executor: Executor) -> None:
    result = run(executor)
    assert (result.is_final, result.is_sequence_final, result.sequence_index) == (True, True, 0)
    assert len(result.output_token_ids[0]) == 8 and result.finish_reasons == [FinishReason.LENGTH]
    assert (
        result.log_probs is None
        and result.cum_log_probs is None
        and result.prompt_log_probs is None
    )


def test_streamed_tokens_join_to_the_whole_answer(executor: Executor) -> None:
    whole = run(executor)
    streamed = results(finish(executor, executor.enqueue_request(ask(streaming=True))))
    assert [
        token_id for result in streamed for token_id in result.output_token_ids[0]
    ] == whole.output_token_ids[0]
    assert [result.is_final for result in streamed] == [False] * (len(streamed) - 1) + [True]
    assert {result.finish_reasons[0] for result in streamed[:-1]} == {FinishReason.NOT_FINISHED}


def test_a_streamed_result_has_new_tokens_unless_it_is_the_last(executor: Executor) -> None:
    streamed = results(finish(executor, executor.enqueue_request(ask(streaming=True))))
    assert all(result.output_token_ids[0] for result in streamed[:-1])


def test_all_generated_tokens_restates_what_was_sent(executor: Executor) -> None:
    whole = run(executor).output_token_ids[0]
    request = ask(streaming=True, return_all_generated_tokens=True)
    for result in results(finish(executor, executor.enqueue_request(request))):
        assert result.output_token_ids[0] == whole[: len(result.output_token_ids[0])]

    assert result.output_token_ids[0] == whole


def test_the_prompt_is_in_the_output_only_when_asked_for_and_not_streamed(
    executor: Executor,
) -> None:
    included = OutputConfig(exclude_input_from_output=False)
    assert run(executor, output_config=included).output_token_ids[0] == [
        *PROMPT,
        *run(executor).output_token_ids[0],
    ]
    streamed = finish(
        executor, executor.enqueue_request(ask(streaming=True, output_config=included))
    )
    assert sum(len(result.output_token_ids[0]) for result in results(streamed)) == 8


@needs("log_probs")
@pytest.mark.parametrize("streaming", [False, True])
def test_log_probs_are_parallel_to_the_tokens_of_each_result(
    executor: Executor, streaming: bool
) -> None:
    output = OutputConfig(return_log_probs=True, num_top_log_probs=1)
    request = ask(streaming=streaming, output_config=output)
    log_probs: list[float] = []
    for result in results(finish(executor, executor.enqueue_request(request))):
        assert (
            result.log_probs is not None
            and result.top_log_probs is not None
            and result.cum_log_probs is not None
        )
        assert (
            len(result.log_probs[0])
            == len(result.output_token_ids[0])
            == len(result.top_log_probs[0])
        )

        for token_id, log_prob, top in zip(
            result.output_token_ids[0], result.log_probs[0], result.top_log_probs[0], strict=True
        ):
            assert [(top_token.token_id, top_token.log_prob) for top_token in top] == [
                (token_id, log_prob)
            ]  # greedy

        log_probs += result.log_probs[0]
        assert result.cum_log_probs[0] == pytest.approx(sum(log_probs))

    assert len(log_probs) == 8 and all(log_prob <= 0 for log_prob in log_probs)


@needs("prompt_log_probs")
@pytest.mark.parametrize("streaming", [False, True])
def test_prompt_log_probs_stand_on_the_first_result_alone(
    executor: Executor, streaming: bool
) -> None:
    request = ask(streaming=streaming, output_config=OutputConfig(num_prompt_log_probs=0))
    first, *later = results(finish(executor, executor.enqueue_request(request)))
    assert first.prompt_log_probs is not None and len(first.prompt_log_probs) == len(PROMPT)
    assert first.prompt_log_probs[0].log_prob is None
    assert all(
        log_prob.log_prob is not None and log_prob.log_prob <= 0
        for log_prob in first.prompt_log_probs[1:]
    )
    assert all(result.prompt_log_probs is None for result in later)


def test_prompts_of_different_salts_share_no_cached_token(executor: Executor) -> None:
    prompt = long_prompt(executor, 31)
    first, elsewhere, again = (
        run(executor, input_token_ids=prompt, cache_salt=salt) for salt in ("a", "b", "a")
    )
    assert first.num_cached_tokens == elsewhere.num_cached_tokens == 0
    assert again.num_cached_tokens < len(prompt), "the last token is always computed"
    assert first.output_token_ids == elsewhere.output_token_ids == again.output_token_ids


def test_cached_tokens_stand_on_the_first_result_alone(executor: Executor) -> None:
    for _ in range(2):
        request = ask(input_token_ids=long_prompt(executor, 37), max_tokens=100, streaming=True)
        first, *later = results(finish(executor, executor.enqueue_request(request)))

    assert 0 <= first.num_cached_tokens < len(request.input_token_ids)
    assert later and all(result.num_cached_tokens == 0 for result in later)


def test_the_end_token_is_part_of_the_result(executor: Executor) -> None:
    whole = run(executor).output_token_ids[0]
    end = whole[2]
    stopped = run(executor, end_id=end)
    assert stopped.output_token_ids[0] == whole[: whole.index(end) + 1]
    assert stopped.finish_reasons == [FinishReason.END_ID]
    assert run(executor, end_ids=(whole[7], end)).finish_reasons == [FinishReason.END_ID]
    # An end id does not leak into the next request
    assert run(executor).finish_reasons == [FinishReason.LENGTH]


def test_ignore_eos_runs_past_the_end_token(executor: Executor) -> None:
    whole = run(executor).output_token_ids[0]
    result = run(executor, end_id=whole[2], ignore_eos=True)
    assert (result.output_token_ids[0], result.finish_reasons) == (whole, [FinishReason.LENGTH])


def test_min_tokens_holds_the_end_back(executor: Executor) -> None:
    first = run(executor).output_token_ids[0][0]
    config = SamplingConfig(temperature=0, min_tokens=5)

    assert len(run(executor, end_id=first).output_token_ids[0]) == 1
    assert len(run(executor, end_id=first, sampling_config=config).output_token_ids[0]) > 5


@needs("stop_words")
def test_a_stop_word_of_several_tokens_ends_the_answer_and_stays_in_it(executor: Executor) -> None:
    whole = run(executor).output_token_ids[0]
    stopped = run(executor, stop_words=((whole[1], whole[2]), (whole[0], whole[2], whole[1])))

    assert stopped.output_token_ids[0][-2:] == [whole[1], whole[2]]
    assert stopped.output_token_ids[0] == whole[: len(stopped.output_token_ids[0])]
    assert stopped.finish_reasons == [FinishReason.STOP_WORDS]


@needs("stop_words")
def test_a_stop_word_does_not_begin_in_the_prompt(executor: Executor) -> None:
    whole = run(executor).output_token_ids[0]
    result = run(executor, stop_words=((PROMPT[-1], whole[0]),), max_tokens=2)
    assert result.finish_reasons == [FinishReason.LENGTH]


@needs("stop_words")
def test_when_reasons_meet_the_end_wins_then_the_stop_word_then_the_length(
    executor: Executor,
) -> None:
    first = run(executor).output_token_ids[0][0]
    stop = {"stop_words": ((first,),), "max_tokens": 1}

    assert run(executor, end_id=first, **stop).finish_reasons == [FinishReason.END_ID]
    assert run(executor, **stop).finish_reasons == [FinishReason.STOP_WORDS]


def test_more_tokens_than_the_context_has_room_for_are_cut_to_it(executor: Executor) -> None:
    limit = executor.info.max_sequence_length
    result = run(executor, input_token_ids=PROMPT * ((limit - 4) // 5), max_tokens=10_000)
    num_prompt_tokens = (limit - 4) // 5 * 5
    assert len(result.output_token_ids[0]) == limit - num_prompt_tokens
    assert result.finish_reasons == [FinishReason.LENGTH]


def test_a_prompt_that_fills_the_context_is_refused(executor: Executor) -> None:
    with pytest.raises(InvalidParameter, match=f"{executor.info.max_sequence_length} tokens"):
        executor.enqueue_request(ask(input_token_ids=(11,) * executor.info.max_sequence_length))


def test_a_token_id_outside_the_vocabulary_is_refused(executor: Executor) -> None:
    with pytest.raises(InvalidParameter, match="input_token_ids"):
        executor.enqueue_request(ask(input_token_ids=(1, executor.info.vocab_size)))


@pytest.mark.parametrize("wrong", [1.5, True, "7", None, [7]], ids=repr)
def test_an_id_of_a_wrong_type_is_refused_where_it_is_given(executor: Executor, wrong: Any) -> None:
    neighbour = executor.enqueue_request(ask())
    places: list[dict[str, Any]] = [
        {"input_token_ids": (11, wrong)},
        {"end_ids": (wrong,)},
        {"stop_words": ((12, wrong),)},
        {"bad_words": ((12, wrong),)},
        {"embedding_bias": ((wrong, 1.0),)},
        *([{"end_id": wrong}, {"client_id": wrong}] if wrong is not None else []),
    ]
    for fields in places:
        with pytest.raises(TypeError, match=f"wrong type.*{next(iter(fields))}"):
            executor.enqueue_request(ask(**fields))

    # Python's True is the id 1
    if wrong is not True:
        with pytest.raises(TypeError):
            executor.cancel_request(wrong)

    [response] = finish(executor, neighbour)
    assert len(response.get_result().output_token_ids[0]) == 8
    assert len(run(executor).output_token_ids[0]) == 8


def test_ids_of_numpy_are_ids(executor: Executor) -> None:
    plain = run(executor, end_id=9)
    request = ask(input_token_ids=[np.int64(token_id) for token_id in PROMPT], end_id=np.int32(9))
    request_id = executor.enqueue_request(request)

    assert finish(executor, request_id)[0].get_result().output_token_ids == plain.output_token_ids

    executor.cancel_request(np.int64(request_id))  # type: ignore[arg-type]


def test_one_wrong_request_of_several_leaves_none_behind(executor: Executor) -> None:
    with pytest.raises(InvalidParameter):
        executor.enqueue_requests([ask(), ask(input_token_ids=(-1,))])

    [response] = finish(executor, executor.enqueue_request(ask(max_tokens=1)))
    assert executor.await_responses(timeout_s=0.05) == []
    assert not response.has_error()


def test_the_clients_own_id_comes_back(executor: Executor) -> None:
    [response] = finish(executor, executor.enqueue_request(ask(client_id=77)))
    assert response.client_id == 77


def test_a_running_request_is_cancelled_with_a_final_result(executor: Executor) -> None:
    request_id = executor.enqueue_request(endless(executor, streaming=True))
    executor.await_responses(request_id, TIMEOUT_S)
    executor.cancel_request(request_id)
    executor.cancel_request(request_id)
    last = results(finish(executor, request_id))[-1]
    assert last.finish_reasons == [FinishReason.CANCELLED] and last.is_sequence_final
    wait_until_idle(executor)
    assert executor.await_responses(timeout_s=0) == []


def test_a_queued_request_is_cancelled_before_it_was_scheduled(executor: Executor) -> None:
    busy = executor.enqueue_requests([endless(executor)] * executor.info.max_num_sequences)
    queued = executor.enqueue_request(ask(output_config=OutputConfig(return_log_probs=True)))
    executor.cancel_request(queued)
    [result] = results(finish(executor, queued))
    assert result.finish_reasons == [FinishReason.CANCELLED] and result.output_token_ids == [[]]
    assert executor.get_num_responses_ready() == 0, "the others still run"
    for request_id in busy:
        executor.cancel_request(request_id)
        finish(executor, request_id)


def test_cancelling_what_is_unknown_or_done_does_nothing(executor: Executor) -> None:
    request_id = executor.enqueue_request(ask(max_tokens=1))
    finish(executor, request_id)
    executor.cancel_request(request_id)
    executor.cancel_request(10**9)
    assert run(executor).finish_reasons == [FinishReason.LENGTH]


def test_a_request_out_of_time_ends_with_that_reason(executor: Executor) -> None:
    blocked = executor.enqueue_requests([endless(executor)] * executor.info.max_num_sequences)
    [result] = results(
        finish(executor, executor.enqueue_request(ask(max_tokens=400, allotted_time_ms=20)))
    )
    assert result.finish_reasons == [FinishReason.TIMED_OUT]
    for request_id in blocked:
        executor.cancel_request(request_id)
        finish(executor, request_id)

    assert run(executor, allotted_time_ms=60_000).finish_reasons == [FinishReason.LENGTH]


def test_waiting_for_several_ids_answers_in_their_order(executor: Executor) -> None:
    ids = executor.enqueue_requests([ask(max_tokens=num) for num in (3, 1, 2)])
    batches = executor.await_responses(list(reversed(ids)), TIMEOUT_S)
    assert [[response.request_id for response in batch] for batch in batches] == [
        [request_id] for request_id in reversed(ids)
    ]  # type: ignore[union-attr]


def test_waiting_for_one_id_leaves_the_others_alone(executor: Executor) -> None:
    first, second = executor.enqueue_requests([ask(max_tokens=1), ask(max_tokens=2)])
    assert [response.request_id for response in finish(executor, second)] == [second]
    assert executor.get_num_responses_ready(first) == 1 == executor.get_num_responses_ready()

    finish(executor, first)
    assert executor.get_num_responses_ready() == executor.get_num_responses_ready(10**9) == 0


def test_waiting_ends_empty_after_its_time(executor: Executor) -> None:
    request_ids = executor.enqueue_requests([endless(executor, max_tokens=900) for _ in range(8)])
    request_id = request_ids[-1]
    started = time.monotonic()
    assert executor.await_responses(request_id, 0.02) == []
    assert executor.await_responses([request_id, request_id], 0.02) == [[], []]
    assert executor.await_responses(timeout_s=0.02) == []
    assert 0.06 <= time.monotonic() - started < TIMEOUT_S
    for waiting_id in request_ids:
        executor.cancel_request(waiting_id)
        finish(executor, waiting_id)


def test_an_id_whose_end_was_handed_out_says_so(executor: Executor) -> None:
    request_id = executor.enqueue_request(ask(max_tokens=1))
    finish(executor, request_id)
    [again] = finish(executor, request_id)
    assert (
        again.has_error()
        and "already finished" in again.error_msg
        and str(request_id) in again.error_msg
    )


def test_an_id_whose_end_was_handed_out_holds_up_no_other(executor: Executor) -> None:
    ended = executor.enqueue_request(ask(max_tokens=1))
    finish(executor, ended)
    running = executor.enqueue_request(ask(max_tokens=2))
    [[again], [response]] = executor.await_responses([ended, running], TIMEOUT_S)  # type: ignore[misc]
    assert again.has_error() and response.result is not None and response.is_final


@pytest.mark.parametrize("request_id", [0, -1, 10**9])
def test_an_id_that_was_never_given_out_raises(executor: Executor, request_id: int) -> None:
    with pytest.raises(ValueError, match=f"given {request_id}"):
        executor.await_responses(request_id, 0)

    with pytest.raises(ValueError, match=f"given {request_id}"):
        executor.await_responses([request_id], 0)


def test_responses_of_one_step_become_ready_together(executor: Executor) -> None:
    """It holds while all of them run. An engine in another process may begin them in different
    steps.
    """
    ids = executor.enqueue_requests([ask(streaming=True, max_tokens=400)] * 3)
    begun: set[int] = set()
    num_final = 0
    num_compared = 0
    while num_final < 3:
        batch: list[Response] = executor.await_responses(timeout_s=TIMEOUT_S)  # type: ignore[assignment]
        counts = [
            sum(response.request_id == request_id for response in batch) for request_id in ids
        ]
        num_final += sum(response.is_final for response in batch)
        if len(begun) == 3 and num_final == 0:
            assert counts[0] == counts[1] == counts[2] > 0
            num_compared += 1

        begun |= {response.request_id for response in batch}

    assert num_compared > 0


def test_many_threads_each_get_their_own_answers(executor: Executor) -> None:
    alone = {num: run(executor, max_tokens=num).output_token_ids for num in range(1, 13)}
    got: dict[int, list[list[int]]] = {}

    def work(num: int) -> None:
        got[num] = run(executor, max_tokens=num).output_token_ids

    threads = [threading.Thread(target=work, args=(num,)) for num in alone]
    for thread in threads:
        thread.start()

    for thread in threads:
        thread.join(TIMEOUT_S)

    assert got == alone


@needs("seed")
def test_a_seed_repeats_its_tokens(executor: Executor) -> None:
    config = SamplingConfig(seed=5, temperature=1.5)
    first = run(executor, sampling_config=config, max_tokens=20).output_token_ids
    assert run(executor, sampling_config=config, max_tokens=20).output_token_ids == first


@needs("num_return_sequences")
@needs("seed")
def test_each_sequence_of_a_request_ends_for_itself_and_the_last_end_is_final(
    executor: Executor,
) -> None:
    config = SamplingConfig(num_return_sequences=3, seed=5)
    streamed = several(executor, streaming=True, sampling_config=config)
    ends = [result for result in streamed if result.is_sequence_final]

    assert sorted(result.sequence_index for result in ends) == [0, 1, 2]
    assert [result.is_final for result in streamed] == [False] * (len(streamed) - 1) + [True]

    whole = several(executor, sampling_config=config)
    assert len(whole) == 3 and whole[-1].is_final

    for result in whole:
        pieces = [part for part in streamed if part.sequence_index == result.sequence_index]
        assert [
            token_id for part in pieces for token_id in part.output_token_ids[0]
        ] == result.output_token_ids[0]


@needs("num_return_sequences")
@needs("seed")
def test_sequence_i_is_what_its_own_seed_gives(executor: Executor) -> None:
    together = several(executor, sampling_config=SamplingConfig(num_return_sequences=2, seed=5))
    alone = [run(executor, sampling_config=SamplingConfig(seed=seed)) for seed in (5, 6)]
    ordered = sorted(together, key=lambda result: result.sequence_index)
    assert [result.output_token_ids for result in ordered] == [
        result.output_token_ids for result in alone
    ]


@needs("num_return_sequences")
def test_greedy_sequences_are_equal_copies(executor: Executor) -> None:
    copies = several(
        executor, sampling_config=SamplingConfig(num_return_sequences=3, temperature=0)
    )
    assert [result.output_token_ids for result in copies] == [run(executor).output_token_ids] * 3


@needs("num_return_sequences")
def test_a_request_of_several_sequences_is_cancelled_as_one(executor: Executor) -> None:
    config = SamplingConfig(num_return_sequences=2)
    request_id = executor.enqueue_request(endless(executor, streaming=True, sampling_config=config))
    executor.await_responses(request_id, TIMEOUT_S)
    executor.cancel_request(request_id)
    ends = [result for result in results(finish(executor, request_id)) if result.is_sequence_final]
    assert [result.finish_reasons for result in ends] == [[FinishReason.CANCELLED]] * 2


@needs("batch_invariant")
def test_neighbours_change_nothing(executor: Executor) -> None:
    output = OutputConfig(return_log_probs=executor.capabilities.log_probs_invariant)
    requests = [
        ask(
            input_token_ids=tuple(
                (7 * index + step) % 100 + 10 for step in range(1 + 37 * index % 200)
            ),
            max_tokens=5 + index,
            output_config=output,
            sampling_config=GREEDY if index % 2 else SamplingConfig(seed=index),
        )
        for index in range(8)
    ]
    together = [
        results(finish(executor, request_id))[0]
        for request_id in executor.enqueue_requests(requests)
    ]
    alone = [
        results(finish(executor, executor.enqueue_request(request)))[0] for request in requests
    ]
    for result in together + alone:
        # The second time more is cached
        result.num_cached_tokens = 0

    assert together == alone


def test_statistics_are_drained_and_count_the_work(executor: Executor) -> None:
    finish(executor, executor.enqueue_request(ask(max_tokens=5)))
    wait = executor.get_latest_iteration_stats()

    assert sum(stats.num_context_tokens + stats.num_reused_tokens for stats in wait) == len(PROMPT)
    # The first token comes with the prompt
    assert sum(stats.num_generation_tokens for stats in wait) == 4
    assert sum(stats.num_completed_requests for stats in wait) == 1
    assert [stats.iter for stats in wait] == list(range(wait[0].iter, wait[0].iter + len(wait)))
    assert all(stats.max_num_active_requests == executor.info.max_num_sequences for stats in wait)
    assert (wait[-1].num_active_requests, wait[-1].num_queued_requests) == (0, 0)
    assert executor.get_latest_iteration_stats() == []


def test_responses_go_to_whoever_takes_them_step_by_step_to_the_last(fresh: Executor) -> None:
    steps: list[list[Response]] = []
    is_over = threading.Event()

    def take(responses: list[Response]) -> None:
        steps.append(responses)
        if sum(response.is_final for step in steps for response in step) == 3:
            is_over.set()

    fresh.pass_responses_to(take)
    ids = fresh.enqueue_requests([ask(streaming=True)] * 3)
    assert is_over.wait(TIMEOUT_S)

    answers = [
        [
            one_response
            for step in steps
            for one_response in step
            if one_response.request_id == request_id
        ]
        for request_id in ids
    ]
    num_tokens = [
        sum(len(one_response.output_token_ids[0]) for one_response in results(answer))
        for answer in answers
    ]

    assert num_tokens == [8] * 3 and all(answer[-1].is_final for answer in answers)
    assert max(map(len, steps)) == 3, "those of one step come together"
    assert fresh.await_responses(timeout_s=0) == [] and fresh.get_num_responses_ready() == 0

    running = fresh.enqueue_request(endless(fresh))
    fresh.shutdown()
    [last] = [
        one_response
        for step in steps
        for one_response in step
        if one_response.request_id == running
    ]

    assert (
        last.is_final
        and last.result is not None
        and last.result.finish_reasons == [FinishReason.CANCELLED]
    )


def test_shutdown_wakes_who_waits_ends_what_is_left_and_accepts_nothing_more(
    fresh: Executor,
) -> None:
    assert fresh.can_enqueue_requests()

    request_id = fresh.enqueue_request(endless(fresh))
    queued = fresh.enqueue_requests([endless(fresh)] * fresh.info.max_num_sequences)
    woken: list[Any] = []
    waiter = threading.Thread(target=lambda: woken.append(fresh.await_responses(request_id)))
    waiter.start()
    fresh.shutdown()
    fresh.shutdown()
    waiter.join(TIMEOUT_S)
    assert len(woken) == 1

    responses = [*woken[0], *fresh.await_responses()]
    assert {response.request_id for response in responses if response.is_final} == {
        request_id,
        *queued,
    }
    assert all(result.finish_reasons == [FinishReason.CANCELLED] for result in results(responses))
    assert not fresh.can_enqueue_requests()

    with pytest.raises(RuntimeError, match="shut down"):
        fresh.enqueue_request(ask())

    assert fresh.await_responses() == []
    assert not fresh.is_loading_adapter

    fresh.cancel_request(1)
