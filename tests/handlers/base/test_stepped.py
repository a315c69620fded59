"""The loop around any engine's step."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from handlers.base.stepped import EngineStopped, Step
from handlers.echo import EchoExecutor
from lmi.errors import Overloaded
from lmi.executor import (
    ErrorKind,
    FinishReason,
    IterationStats,
    OutputConfig,
    Request,
    RequestPerfMetrics,
    Response,
    SamplingConfig,
)
from lmi.settings.config import EngineConfig
from tests.system.container import wait_until

TIMEOUT_S = 60.0


class Late(EchoExecutor):
    """Reports every step twice, like an engine that gets the outputs of two steps of another
    process together.
    """

    def _step(self) -> Step:
        step = super()._step()
        step.touched *= 2
        return step


def test_a_sequence_that_is_told_of_twice_in_a_step_ends_once_and_hurts_nobody() -> None:
    with Late(EngineConfig(handler="echo", options={"echo_step_ms": "1"})) as executor:
        for _ in range(2):
            request_id = executor.enqueue_request(Request(input_token_ids=(5, 6), max_tokens=3))
            [response] = executor.await_responses(request_id, TIMEOUT_S)

            assert isinstance(response, Response) and response.result is not None, response
            assert response.result.output_token_ids == [[5, 6, 5]]
            assert response.result.finish_reasons == [FinishReason.LENGTH]

        assert (
            sum(step.num_completed_requests for step in executor.get_latest_iteration_stats()) == 2
        )


def counts(step: IterationStats) -> tuple[int, int]:
    return step.num_active_requests, step.num_queued_requests


def test_statistics_and_the_queue_s_limit_count_requests_and_not_their_sequences() -> None:
    options = {"echo_step_ms": "5", "echo_max_num_sequences": "4"}
    config = EngineConfig(handler="echo", options=options, max_queue_size=2)
    with EchoExecutor(config) as executor:
        four = SamplingConfig(num_return_sequences=4, seed=1)
        ran = executor.enqueue_request(
            Request(input_token_ids=(5, 6), max_tokens=4000, sampling_config=four, streaming=True)
        )
        assert executor.await_responses(ran, TIMEOUT_S), "it runs"

        waiting = [
            executor.enqueue_request(Request(input_token_ids=(5,), max_tokens=1)) for _ in range(2)
        ]
        with pytest.raises(Overloaded, match="2 requests wait already"):
            executor.enqueue_request(Request(input_token_ids=(5,), max_tokens=1))

        wait_until(
            lambda: (1, 2) in map(counts, executor.get_latest_iteration_stats()),
            "one runs and two wait",
        )
        executor.cancel_request(ran)

        assert all(executor.await_responses(request_id, TIMEOUT_S) for request_id in waiting)
        assert (
            sum(step.num_completed_requests for step in executor.get_latest_iteration_stats()) == 3
        )


def test_a_request_that_is_over_cannot_be_cancelled_into_a_step() -> None:
    with EchoExecutor(EngineConfig(handler="echo")) as executor:
        request_id = executor.enqueue_request(Request(input_token_ids=(5,), max_tokens=1))
        executor.await_responses(request_id, TIMEOUT_S)
        executor.get_latest_iteration_stats()
        for _ in range(5):
            executor.cancel_request(request_id)

        neighbour = executor.enqueue_request(Request(input_token_ids=(5,), max_tokens=1))
        executor.await_responses(neighbour, TIMEOUT_S)
        assert len(executor.get_latest_iteration_stats()) == 1


def test_a_request_that_is_cancelled_is_told_to_be_complete_once() -> None:
    options = {"echo_step_ms": "1", "echo_max_num_sequences": "1"}
    config = EngineConfig(handler="echo", options=options, request_stats_max_iterations=1000)
    with EchoExecutor(config) as executor:
        ran, waited = executor.enqueue_requests(
            [Request(input_token_ids=(5,), max_tokens=4000)] * 2
        )
        wait_until(
            lambda: (1, 1) in map(counts, executor.get_latest_iteration_stats()),
            "one runs and one waits",
        )
        for request_id in (waited, ran):
            executor.cancel_request(request_id)
            executor.await_responses(request_id, TIMEOUT_S)

        told_stats = [
            stats for step in executor.get_latest_request_stats() for stats in step.request_stats
        ]

    for request_id in (ran, waited):
        assert [stats.stage for stats in told_stats if stats.id == request_id].count(
            "GENERATION_COMPLETE"
        ) == 1


class Calling(EchoExecutor):
    """Takes calls between two steps, as engines with adapters do."""

    def call(self, function: Callable[[], None]) -> None:
        self._at_boundary(function)


def test_a_call_that_exits_fails_alone_and_nobody_waits_for_ever() -> None:
    is_held = threading.Event()
    go_on = threading.Event()

    def hold() -> None:
        is_held.set()
        go_on.wait(TIMEOUT_S)

    with (
        Calling(EngineConfig(handler="echo")) as executor,
        ThreadPoolExecutor(max_workers=3) as pool,
    ):
        # The next two calls come to the same boundary.
        held = pool.submit(executor.call, hold)
        assert is_held.wait(TIMEOUT_S)
        exiting = pool.submit(executor.call, sys.exit)
        wait_until(lambda: len(executor._calls) == 1, "the call that exits waits")
        next_call = pool.submit(executor.call, lambda: None)
        wait_until(lambda: len(executor._calls) == 2, "another call waits")
        go_on.set()

        held.result(TIMEOUT_S)
        with pytest.raises(RuntimeError, match=r"the call ended with SystemExit"):
            exiting.result(TIMEOUT_S)

        next_call.result(TIMEOUT_S)
        request_id = executor.enqueue_request(Request(input_token_ids=(5,), max_tokens=1))
        assert executor.await_responses(request_id, TIMEOUT_S), "the engine goes on"


class Stopping(EchoExecutor):
    """Holds its first step until it is told to go on, and stops in the second."""

    go_on = threading.Event()

    def _step(self) -> Step:
        if self.go_on.is_set():
            raise EngineStopped("the device is lost")

        self.go_on.wait(TIMEOUT_S)
        return super()._step()


def test_a_request_that_ends_at_the_boundary_of_the_step_that_stops_the_engine_gets_its_end() -> (
    None
):
    with Stopping(EngineConfig(handler="echo")) as executor:
        ran, cancelled = executor.enqueue_requests(
            [Request(input_token_ids=(5,), max_tokens=10)] * 2
        )
        executor.cancel_request(cancelled)
        executor.go_on.set()
        [[lost], [ended]] = executor.await_responses([ran, cancelled], TIMEOUT_S)

        assert (
            isinstance(lost, Response)
            and lost.error is not None
            and lost.error.kind is ErrorKind.ENGINE_LOST
        )
        assert isinstance(ended, Response) and ended.get_result().finish_reasons == [
            FinishReason.CANCELLED
        ]


TIMED = OutputConfig(return_perf_metrics=True)


def test_the_times_of_a_request_are_those_of_its_way() -> None:
    options = {"echo_step_ms": "5", "echo_max_num_sequences": "1"}
    with EchoExecutor(EngineConfig(handler="echo", options=options)) as executor:
        before = time.monotonic()
        requests = [
            Request(input_token_ids=(5, 6), max_tokens=4, output_config=TIMED) for _ in range(2)
        ]
        ids = executor.enqueue_requests(requests)
        answers = [
            response
            for answered in executor.await_responses(ids, TIMEOUT_S)
            for response in answered
        ]  # type: ignore[union-attr]
        after = time.monotonic()
        first, second = (response.result.request_perf_metrics for response in answers)
        for times in (first, second):
            way = [
                times.arrival_time,
                times.first_scheduled_time,
                times.first_token_time,
                times.last_token_time,
            ]
            assert [before, *way, after] == sorted([before, *way, after])
            assert times.last_token_time - times.first_token_time >= 3 * 0.004

        assert second.first_scheduled_time >= first.last_token_time, "it waited for the only place"


def test_no_request_is_scheduled_before_it_arrives_however_many_clients_ask() -> None:
    request = Request(input_token_ids=(5,), max_tokens=2, output_config=TIMED)
    with EchoExecutor(EngineConfig(handler="echo", options={"echo_step_ms": "0"})) as executor:

        def ask(_: int) -> bool:
            [response] = executor.await_responses(executor.enqueue_request(request), TIMEOUT_S)
            times = response.result.request_perf_metrics  # type: ignore[union-attr]
            return times.arrival_time <= times.first_scheduled_time

        with ThreadPoolExecutor(8) as clients:
            assert all(clients.map(ask, range(1000)))


def test_the_times_stand_on_the_last_result_and_only_where_they_are_wanted() -> None:
    with EchoExecutor(EngineConfig(handler="echo", options={"echo_step_ms": "1"})) as executor:
        for output, expected in ((OutputConfig(), [False] * 3), (TIMED, [False, False, True])):
            request = Request(
                input_token_ids=(5,), max_tokens=3, streaming=True, output_config=output
            )
            request_id = executor.enqueue_request(request)
            results = list[Any]()
            while len(results) < 3:
                results += [
                    response.result for response in executor.await_responses(request_id, TIMEOUT_S)
                ]  # type: ignore[union-attr]

            assert [response.request_perf_metrics is not None for response in results] == expected


def test_a_request_that_never_ran_has_only_the_time_of_its_arrival() -> None:
    options = {"echo_step_ms": "1", "echo_max_num_sequences": "1"}
    with EchoExecutor(EngineConfig(handler="echo", options=options)) as executor:
        executor.enqueue_request(Request(input_token_ids=(5,), max_tokens=10_000))
        waiting = executor.enqueue_request(
            Request(input_token_ids=(5,), max_tokens=1, output_config=TIMED)
        )
        executor.cancel_request(waiting)
        [response] = executor.await_responses(waiting, TIMEOUT_S)
        times = response.result.request_perf_metrics  # type: ignore[union-attr]
        assert times == RequestPerfMetrics(arrival_time=times.arrival_time)
