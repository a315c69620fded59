"""Beams of an engine that searches by itself: each of its outputs restates all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from handlers.base.beams import Beam
from handlers.driven.outputs import SequenceOutput
from lmi.executor import FinishReason, OutputConfig, Request, Response, SamplingConfig
from lmi.settings.config import EngineConfig
from tests.system.engines import foreign_engine

WIDTH = 2
LENGTH = FinishReason.LENGTH
END = FinishReason.END_ID
STEPS = (
    ([Beam([5], [-1.0], sum=-1.0), Beam([6], [-2.0], sum=-2.0)], None),
    ([Beam([6, 7], [-2.0, -0.1], sum=-2.1), Beam([5, 8], [-1.0, -3.0], sum=-4.0)], None),
    (
        [
            Beam([6, 7, 9], [-2.0, -0.1, -0.3], sum=-2.4, finish_reason=LENGTH),
            Beam([5, 3], [-1.0, -2.0], sum=-3.0, finish_reason=END),
        ],
        LENGTH,
    ),
)


class Searcher(foreign_engine.Engine):
    """It answers every sequence with the same three steps."""

    def __init__(self) -> None:
        super().__init__()
        self.num_steps: dict[str, int] = {}

    def step(self) -> list[SequenceOutput]:
        outputs = []
        for name in self._running:
            beams, end = STEPS[self.num_steps.setdefault(name, 0)]
            self.num_steps[name] += 1
            outputs.append(SequenceOutput(name, [], end=end, beams=beams))

        self.abort(output.id for output in outputs if output.end is not None)
        return outputs


class Executor(foreign_engine.Executor):
    searches_beams = True

    def __init__(self) -> None:
        super().__init__(EngineConfig(handler="foreign"))
        can = replace(self._info.capabilities, max_beam_width=WIDTH, embedding_bias=True)
        self._engine = Searcher()
        self._info = replace(self._info, capabilities=can)


@pytest.fixture
def executor() -> Iterator[Executor]:
    with Executor() as executor:
        yield executor


def ask(**fields: Any) -> Request:
    defaults: dict[str, Any] = {
        "sampling_config": SamplingConfig(WIDTH),
        "output_config": OutputConfig(True),
    }
    return Request(**{"input_token_ids": (1, 2), "max_tokens": 3, **defaults, **fields})


def run(executor: Executor, request: Request) -> list[Response]:
    request_id = executor.enqueue_request(request)
    responses = list[Response]()
    while not responses or not responses[-1].is_final:
        got = executor.await_responses(request_id, 60.0)
        assert got, "no final response"
        responses += got  # type: ignore[arg-type]

    return responses


def test_a_stream_carries_the_beams_of_each_step_in_place_of_those_before(
    executor: Executor,
) -> None:
    results = [response.get_result() for response in run(executor, ask(streaming=True))]
    assert [result.output_token_ids for result in results] == [
        [response.token_ids for response in beams] for beams, _ in STEPS
    ]
    assert [result.finish_reasons for result in results[:2]] == [
        [FinishReason.NOT_FINISHED] * WIDTH
    ] * 2
    assert results[-1].finish_reasons == [LENGTH, END]


def test_the_answer_has_as_many_beams_as_are_asked_for_with_their_log_probs(
    executor: Executor,
) -> None:
    [response] = run(executor, ask(sampling_config=SamplingConfig(WIDTH, num_return_sequences=1)))
    result = response.get_result()

    assert (result.output_token_ids, result.log_probs) == ([[6, 7, 9]], [[-2.0, -0.1, -0.3]])
    assert result.cum_log_probs == pytest.approx([-2.4])


def test_a_rule_that_the_search_by_rows_lacks_is_left_to_the_engine(executor: Executor) -> None:
    [response] = run(executor, ask(embedding_bias=((5, 1.0),)))
    assert response.get_result().is_final


def test_statistics_count_the_tokens_of_the_best_beam(executor: Executor) -> None:
    run(executor, ask())
    stats = executor.get_latest_iteration_stats()
    assert sum(stat.num_context_tokens for stat in stats) == 2
    assert sum(stat.num_generation_tokens for stat in stats) == 2, "the first comes with the prompt"
