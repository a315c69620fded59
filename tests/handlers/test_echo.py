"""The engine without a model: what it answers, and how it breaks on request."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from handlers.echo import CONTEXT_LENGTH, LOG_PROB, VOCAB_SIZE, EchoExecutor, load
from lmi.executor import ErrorKind, FinishReason, OutputConfig, Request, Response
from lmi.settings.config import EngineConfig

TIMEOUT_S = 60.0


def echo(**options: str) -> EchoExecutor:
    return EchoExecutor(EngineConfig(handler="echo", options={"echo_step_ms": "1", **options}))


def ask(*prompt: int, **fields: Any) -> Request:
    return Request(**{"input_token_ids": prompt, "max_tokens": 7, **fields})


def finish(executor: EchoExecutor, request_id: int) -> Response:
    [response] = executor.await_responses(request_id, TIMEOUT_S)
    assert isinstance(response, Response)
    return response


def test_the_answer_is_the_prompt_again_and_again() -> None:
    with echo() as executor:
        result = finish(executor, executor.enqueue_request(ask(5, 6, 7))).result
        assert result is not None and result.output_token_ids == [[5, 6, 7, 5, 6, 7, 5]]


def test_every_log_prob_is_the_same() -> None:
    output = OutputConfig(return_log_probs=True, num_top_log_probs=1, num_prompt_log_probs=0)
    with echo() as executor:
        result = finish(executor, executor.enqueue_request(ask(5, 6, output_config=output))).result

    assert (
        result is not None
        and result.log_probs == [[LOG_PROB] * 7]
        and result.cum_log_probs == [7 * LOG_PROB]
    )
    assert result.prompt_log_probs is not None
    assert [prompt_log_prob.log_prob for prompt_log_prob in result.prompt_log_probs] == [
        None,
        LOG_PROB,
    ]


def test_there_are_as_many_alternatives_as_a_request_asks_for() -> None:
    output = OutputConfig(num_top_log_probs=3, num_prompt_log_probs=4)
    with echo() as executor:
        result = finish(
            executor, executor.enqueue_request(ask(1, 9, max_tokens=2, output_config=output))
        ).get_result()

    assert result.top_log_probs is not None and result.prompt_log_probs is not None
    assert [[top_token.token_id for top_token in top] for top in result.top_log_probs[0]] == [
        [1, 0, 2],
        [9, 8, 7],
    ]
    assert [
        [top_token.token_id for top_token in position.top] for position in result.prompt_log_probs
    ] == [
        [],
        [9, 8, 7, 6],
    ]


def test_the_statistics_of_requests_are_kept_where_they_are_asked_for() -> None:
    config = EngineConfig(
        handler="echo", options={"echo_step_ms": "1"}, request_stats_max_iterations=2
    )
    with EchoExecutor(config) as executor:
        finish(executor, executor.enqueue_request(ask(5, 6)))
        stages = [
            [request_stats.stage for request_stats in step.request_stats]
            for step in executor.get_latest_request_stats()
        ]

    assert stages == [["GENERATION_IN_PROGRESS"], ["GENERATION_COMPLETE"]]


def test_a_step_takes_its_time_whatever_the_number_of_requests() -> None:
    with echo(echo_step_ms="20") as executor:
        executor.enqueue_requests([ask(1, max_tokens=3) for _ in range(50)])
        num_final = 0
        while num_final < 50:
            num_final += len(executor.await_responses(timeout_s=TIMEOUT_S))

        steps = [
            stats_entry.iter_latency_ms for stats_entry in executor.get_latest_iteration_stats()
        ]

    assert len(steps) == 3 and all(latency_ms >= 20 for latency_ms in steps)


def test_no_more_run_at_once_than_configured() -> None:
    with echo(echo_max_num_sequences="2") as executor:
        ids = executor.enqueue_requests([ask(1, max_tokens=2) for _ in range(5)])
        for request_id in ids:
            finish(executor, request_id)

        assert (
            max(
                stats_entry.num_generation_tokens
                for stats_entry in executor.get_latest_iteration_stats()
            )
            == 2
        )


def test_facts_come_from_the_model_folder_where_it_has_them(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"vocab_size": 10, "max_position_embeddings": 20})
    )
    stages: list[tuple[str, float]] = []
    with load(
        EngineConfig(handler="echo"),
        str(tmp_path),
        lambda stage, share: stages.append((stage, share)),
    ) as executor:
        assert (executor.info.vocab_size, executor.info.max_sequence_length) == (10, 20)

    assert stages[-1][1] == 1.0

    with load(
        EngineConfig(handler="echo"), str(tmp_path / "none"), lambda stage, share: None
    ) as executor:
        assert (executor.info.vocab_size, executor.info.max_sequence_length) == (
            VOCAB_SIZE,
            CONTEXT_LENGTH,
        )


def test_the_fault_token_fails_the_running_requests_and_the_engine_lives_on() -> None:
    with echo(echo_fault_token="666", echo_step_ms="5") as executor:
        executor.enqueue_request(ask(1, max_tokens=4000, streaming=True))
        executor.await_responses(timeout_s=TIMEOUT_S)
        executor.enqueue_request(ask(2, 666))
        failed: set[int] = set()
        deadline = time.monotonic() + TIMEOUT_S
        while len(failed) < 2:
            assert time.monotonic() < deadline
            responses: list[Any] = executor.await_responses(timeout_s=TIMEOUT_S)
            failed |= {
                response.request_id
                for response in responses
                if response.error and response.error.kind is ErrorKind.GENERATION
            }

        result = finish(executor, executor.enqueue_request(ask(3))).result
        assert result is not None and result.finish_reasons == [FinishReason.LENGTH]


def test_three_faults_in_a_row_stop_the_engine() -> None:
    with echo(echo_fault_token="666") as executor:
        for _ in range(3):
            assert finish(executor, executor.enqueue_request(ask(666))).has_error()

        deadline = time.monotonic() + TIMEOUT_S
        while executor.can_enqueue_requests():
            assert time.monotonic() < deadline
            time.sleep(0.001)


def test_the_hang_token_stops_the_steps_and_nothing_else() -> None:
    executor = echo(echo_hang_token="13")
    request_id = executor.enqueue_request(ask(13))
    assert executor.await_responses(request_id, 0.1) == []
    assert executor.can_enqueue_requests() and executor.get_latest_iteration_stats() == []
    assert any(thread.name == "executor" and thread.daemon for thread in threading.enumerate())


@pytest.mark.parametrize(("prompt", "exit_code"), [("(1, 99)", 1), ("(1, 2)", 0)])
def test_the_die_token_ends_the_process_at_once(prompt: str, exit_code: int) -> None:
    code = f"""if True:
        from handlers.echo import EchoExecutor
        from lmi.settings.config import EngineConfig
        from lmi.executor import Request
        with EchoExecutor(EngineConfig(options={{"echo_die_token": "99", "echo_step_ms": "1"}})) as executor:
            executor.await_responses(executor.enqueue_request(Request(input_token_ids={prompt}, max_tokens=2)), 30)
    """  # noqa: E501
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == exit_code
