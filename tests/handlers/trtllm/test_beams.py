"""TensorRT-LLM's own beam search behind the contract: one width for each engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from lmi.errors import InvalidParameter, Unsupported
from lmi.executor import FinishReason, OutputConfig, SamplingConfig
from tests.conformance.asking import ask, finish, run
from tests.handlers.trtllm.asking import answers, start, until
from tests.handlers.trtllm.double import double, knobs

WIDTH = 3
BEAMS = SamplingConfig(WIDTH)
WITH_LOG_PROBS = OutputConfig(True)


@pytest.fixture(scope="module", params=["main-2025-10", "main-2026-08"])
def executor(request: pytest.FixtureRequest) -> Iterator[Any]:
    with (
        double(request.param) as executor_class,
        start(executor_class, max_beam_width=WIDTH) as executor,
    ):
        yield executor


def beams(executor: Any, **fields: Any) -> Any:
    return run(executor, **{"sampling_config": BEAMS, "output_config": WITH_LOG_PROBS, **fields})


def test_an_answer_has_the_best_beams_first_with_parallel_log_probs(executor: Any) -> None:
    answer = beams(executor)
    assert (
        len(answer.output_token_ids) == WIDTH
        and len({tuple(ids) for ids in answer.output_token_ids}) == WIDTH
    )

    assert (
        [len(ids) for ids in answer.output_token_ids]
        == [len(values) for values in answer.log_probs]
        == [8] * WIDTH
    )
    assert answer.cum_log_probs == pytest.approx([sum(values) for values in answer.log_probs])
    assert answer.cum_log_probs == sorted(answer.cum_log_probs, reverse=True)
    assert answer.finish_reasons == [FinishReason.LENGTH] * WIDTH


def test_each_response_of_a_stream_restates_all_beams(executor: Any) -> None:
    *parts, last = answers(executor, streaming=True, sampling_config=BEAMS, max_tokens=60)
    assert last.get_result().output_token_ids == beams(executor, max_tokens=60).output_token_ids
    lengths = [[len(ids) for ids in part.get_result().output_token_ids] for part in parts]
    assert (
        lengths and lengths == sorted(lengths) and all(len(length) == WIDTH for length in lengths)
    )


def test_a_search_with_log_probs_answers_once_because_its_steps_do_not_reorder_them(
    executor: Any,
) -> None:
    fields = {"sampling_config": BEAMS, "output_config": WITH_LOG_PROBS, "max_tokens": 60}
    [only] = answers(executor, streaming=True, **fields)
    assert only.get_result() == beams(executor, **fields)


def test_a_search_that_answers_at_its_end_shows_that_it_goes_on(executor: Any) -> None:
    with knobs(step_s=0.02):
        request_id = executor.enqueue_request(
            ask(sampling_config=BEAMS, output_config=WITH_LOG_PROBS, max_tokens=400)
        )
        executor.get_latest_iteration_stats()
        until(lambda: len(executor.get_latest_iteration_stats()) > 0)
        assert executor.get_num_responses_ready(request_id) == 0
        executor.cancel_request(request_id)


def test_fewer_beams_are_returned_than_searched_if_fewer_are_asked_for(executor: Any) -> None:
    config = SamplingConfig(WIDTH, num_return_sequences=1)
    assert (
        beams(executor, sampling_config=config).output_token_ids
        == beams(executor).output_token_ids[:1]
    )


@pytest.mark.parametrize("end_token", ["kept", "dropped"])
def test_a_beam_that_ends_has_its_end_token(executor: Any, end_token: str) -> None:
    end_id = beams(executor).output_token_ids[0][2]
    with knobs(end_token=end_token):
        answer = beams(executor, end_id=end_id, output_config=OutputConfig())

    ended = [
        ids
        for ids, reason in zip(answer.output_token_ids, answer.finish_reasons, strict=True)
        if reason is FinishReason.END_ID
    ]
    assert ended and all(ids.index(end_id) == len(ids) - 1 for ids in ended)


def test_a_cancelled_search_ends_at_once_and_the_next_one_runs(executor: Any) -> None:
    with knobs(finish_after_abort="never", step_s=0.02):
        request_id = executor.enqueue_request(
            ask(sampling_config=BEAMS, max_tokens=400, streaming=True)
        )
        executor.await_responses(request_id, 60.0)
        executor.cancel_request(request_id)

        assert set(finish(executor, request_id)[-1].get_result().finish_reasons) == {
            FinishReason.CANCELLED
        }

    assert len(beams(executor).output_token_ids) == WIDTH


@pytest.mark.parametrize("width", [1, 2])
def test_another_width_is_refused_with_the_one_that_runs(executor: Any, width: int) -> None:
    with pytest.raises(
        InvalidParameter, match=rf"beam_width must be 3 .* one beam width, given {width}"
    ):
        executor.enqueue_request(ask(sampling_config=SamplingConfig(width)))


REFUSED: dict[str, dict[str, Any]] = {
    "num_top_log_probs": {"output_config": OutputConfig(num_top_log_probs=1)},
    "stop_words": {"stop_words": ((5, 6),)},
    "min_tokens": {"sampling_config": SamplingConfig(WIDTH, min_tokens=2), "end_ids": (5, 6)},
    "bad_words": {"bad_words": ((5, 6),)},
    "return_generation_logits": {"output_config": OutputConfig(return_generation_logits=True)},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_search_lacks_is_refused(executor: Any, name: str) -> None:
    with pytest.raises(Unsupported, match=name):
        executor.enqueue_request(ask(**{"sampling_config": BEAMS, **REFUSED[name]}))
