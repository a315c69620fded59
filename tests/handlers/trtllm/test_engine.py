"""The life of the engine: cancels, faults of one request, the end of the engine, and
its shutdown.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest

from handlers.base.sequence import new_sequences
from lmi.errors import (
    InvalidParameter,
    InvalidRequest,
    LmiError,
    PromptTooLong,
    StartError,
    Unsupported,
)
from lmi.executor import (
    ErrorKind,
    FinishReason,
    GuidedDecodingParams,
    GuideType,
    OutputConfig,
    Request,
    SamplingConfig,
)
from tests.conformance.asking import TIMEOUT_S, ask, finish
from tests.descriptors import many_descriptors
from tests.handlers.trtllm.asking import answers, start, tokens, until
from tests.handlers.trtllm.double import double, knobs
from tests.handlers.trtllm.facts import PROFILES

LONG = 400  # tokens
# Of a step, so that LONG takes seconds
SLOW_S = 0.02
# Of the engine's thread
WAIT_FOR_OUTPUT_S = 0.1


@pytest.fixture(scope="module")
def executor_class(line: str) -> Iterator[Any]:
    with double(line) as executor_class:
        yield executor_class


@pytest.fixture
def executor(executor_class: Any) -> Iterator[Any]:
    """One for each test: a knob that ends an engine ends every engine of the process."""
    with start(executor_class) as executor:
        yield executor


@contextmanager
def fresh(executor_class: Any, **options: str) -> Iterator[Any]:
    with start(executor_class, **options) as executor:
        yield executor


def begin(executor: Any, **fields: Any) -> int:
    """Start a long stream and wait for its first token."""
    request_id: int = executor.enqueue_request(
        ask(**{"max_tokens": LONG, "streaming": True, **fields})
    )
    assert executor.await_responses(request_id, TIMEOUT_S)
    return request_id


@pytest.mark.parametrize("finish_after_abort", ["next step", "late", "never"])
def test_a_cancelled_request_ends_at_once_whatever_the_engine_does(
    executor: Any, finish_after_abort: str
) -> None:
    with knobs(finish_after_abort=finish_after_abort, step_s=SLOW_S):
        request_id = begin(executor)
        executor.cancel_request(request_id)
        last = finish(executor, request_id)[-1].get_result()
        assert last.finish_reasons == [FinishReason.CANCELLED]
        assert len(tokens(executor)) == 8, "the next one runs"


def test_a_deadline_ends_a_request(executor: Any) -> None:
    with knobs(step_s=0.02):
        last = answers(executor, max_tokens=LONG, allotted_time_ms=100)[-1].get_result()

    assert last.finish_reasons == [FinishReason.TIMED_OUT]


def test_a_request_that_our_rules_end_is_aborted_in_the_engine(executor: Any) -> None:
    ids = tokens(executor)
    assert tokens(executor, stop_words=((ids[1], ids[2]),), max_tokens=LONG) == ids[:3]
    until(lambda: not executor._trtllm._tasks)


def test_a_guided_request_that_is_wrong_never_reaches_the_engine(executor: Any) -> None:
    guide = GuidedDecodingParams(GuideType.REGEX, "(")
    with knobs(error_budget=1):
        for _ in range(4):
            [response] = answers(executor, guided_decoding_params=guide, end_id=2)
            assert response.error is not None and response.error.kind is ErrorKind.INVALID, (
                response.error_msg
            )

        assert len(tokens(executor)) == 8


def test_a_wait_for_a_guide_is_known_as_such(executor: Any) -> None:
    slow = GuidedDecodingParams(GuideType.REGEX, "((a{0,100}){0,100}){0,100}")
    assert not executor.is_waiting_for_guides
    guided = executor.enqueue_request(ask(max_tokens=4, guided_decoding_params=slow))
    while not executor.is_waiting_for_guides:
        assert not executor.await_responses(guided, 0.001), "it was over before anyone looked"

    begin(executor)
    while executor.is_waiting_for_guides:
        time.sleep(0.001)


LARK = GuidedDecodingParams(GuideType.EBNF_GRAMMAR, 'start: "yes"')
WRONG: dict[str, tuple[dict[str, Any], type[LmiError]]] = {
    "input_token_ids": ({"input_token_ids": (1, 320)}, InvalidParameter),
    "inputs": ({"input_token_ids": (1,) * 512}, PromptTooLong),
    "end_id": ({"end_id": 320}, InvalidParameter),
    "typical_p": ({"sampling_config": SamplingConfig(typical_p=0.5)}, Unsupported),
    "beam_width": ({"sampling_config": SamplingConfig(2)}, InvalidRequest),
    "in EBNF": ({"guided_decoding_params": LARK}, Unsupported),
    "num_top_log_probs": ({"output_config": OutputConfig(num_top_log_probs=21)}, InvalidParameter),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_request_is_refused_before_it_is_submitted(executor: Any, name: str) -> None:
    fields, error = WRONG[name]
    with knobs(error_budget=0), pytest.raises(error, match=name):
        executor.enqueue_request(ask(**fields))

    assert len(tokens(executor)) == 8


def test_a_prompt_that_a_step_cannot_take_whole_is_refused_with_the_options_that_help(
    executor_class: Any,
) -> None:
    with fresh(executor_class, max_num_tokens="16") as executor:
        with pytest.raises(
            PromptTooLong, match="16 tokens at most .*option.enable_chunked_prefill=true"
        ):
            executor.enqueue_request(ask(input_token_ids=(1,) * 17))

        assert len(tokens(executor, input_token_ids=(1,) * 16)) == 8


@pytest.mark.parametrize("knob", [{"dies": "no more memory"}, {"dies_after_steps": 3}])
def test_the_death_of_the_engine_ends_every_request_and_the_executor(
    executor_class: Any, knob: Any
) -> None:
    with knobs(step_s=SLOW_S), fresh(executor_class) as executor:
        ids = [begin(executor) for _ in range(3)]
        with knobs(step_s=SLOW_S, **knob):
            for request_id in ids:
                error = finish(executor, request_id)[-1].error
                assert error is not None and error.kind is ErrorKind.ENGINE_LOST

        until(lambda: not executor.can_enqueue_requests())
        with pytest.raises(RuntimeError):
            executor.enqueue_request(ask())


def test_a_burst_of_failures_that_ends_the_engine_ends_the_executor(executor_class: Any) -> None:
    with knobs(step_s=SLOW_S), fresh(executor_class) as executor:
        request_id = begin(executor)
        with knobs(step_s=SLOW_S, error_budget=0):
            executor._trtllm.add(work(executor, "wrong", input_token_ids=(9999,)))
            error = finish(executor, request_id)[-1].error

        assert error is not None and error.kind is ErrorKind.ENGINE_LOST
        until(lambda: not executor.can_enqueue_requests())


def test_the_death_of_a_process_that_computes_ends_the_executor_though_the_engine_falls_silent(
    executor_class: Any,
) -> None:
    with (
        knobs(has_workers=True, step_s=SLOW_S),
        fresh(executor_class, context_parallel_size="2") as executor,
    ):
        assert len(executor._trtllm._ranks._fds) == 2
        request_id = begin(executor)
        signal.pidfd_send_signal(executor._trtllm._ranks._fds[-1], signal.SIGKILL)
        error = finish(executor, request_id)[-1].error
        assert error is not None and error.kind is ErrorKind.ENGINE_LOST
        until(lambda: not executor.can_enqueue_requests())


def until_idle(executor: Any) -> None:
    """Its own loop sleeps then, so a test may step its engine."""
    until(lambda: not executor._live)


def work(executor: Any, name: str, **fields: Any) -> Any:
    """A sequence in the engine's form, without the checks of the executor."""
    [sequence] = new_sequences(1, ask(**fields), 512)
    return replace(executor._work(sequence), id=name)


def test_what_the_engine_itself_refuses_ends_only_that_sequence(executor: Any) -> None:
    package = import_module("tensorrt_llm.llmapi")
    engine = executor._trtllm
    ends = dict[str, Any]()
    beams = work(executor, "beams", sampling_config=SamplingConfig(2))
    broken = replace(work(executor, "broken"), more={"lora_request": "none"})
    until_idle(executor)
    for request in (
        work(executor, "token", input_token_ids=(9999,)),
        beams,
        broken,
        work(executor, "good"),
    ):
        engine.add(request)

    while len(ends) < 4:
        ends |= {
            request.id: request.end for request in engine.step() or () if request.end is not None
        }

    assert isinstance(ends["token"], package.RequestError) and isinstance(
        ends["beams"], package.RequestError
    )
    assert isinstance(ends["broken"], Exception)
    assert ends["good"] is FinishReason.LENGTH and engine.is_alive


def test_what_the_check_of_a_submit_refuses_ends_only_that_sequence(
    executor_class: Any, line: str
) -> None:
    with fresh(executor_class, max_num_tokens="16") as executor:
        until_idle(executor)
        engine = executor._trtllm
        ends = dict[str, Any]()
        for name, prompt in (("long", (1,) * 17), ("good", (1,) * 16)):
            engine.add(work(executor, name, input_token_ids=prompt))

        while len(ends) < 2:
            ends |= {
                response.id: response.end
                for response in engine.step() or ()
                if response.end is not None
            }

        assert "should not exceed max_num_tokens" in str(ends["long"])
        assert ends["good"] is FinishReason.LENGTH and engine.is_alive


def test_an_engine_that_ignores_its_shutdown_is_killed() -> None:
    # It takes seconds, and lines do not differ
    with (
        double(PROFILES[-1]) as executor_class,
        knobs(has_workers=True),
    ):
        executor = start(executor_class)
        llm = executor._trtllm._llm
        ranks = executor._trtllm._ranks
        end = llm.shutdown
        was_killed = threading.Event()

        def wait_for_the_kill() -> None:
            until(lambda: not ranks.are_alive)
            was_killed.set()
            end()

        llm.shutdown = wait_for_the_kill
        executor.shutdown()

        assert was_killed.is_set()


def test_a_sequence_that_is_aborted_before_it_began_leaves_nothing_behind(executor: Any) -> None:
    until_idle(executor)
    executor._trtllm.add(work(executor, "brief"))
    executor._trtllm.abort(["brief"])
    until(lambda: not executor._trtllm._tasks)


def test_an_engine_that_hangs_makes_no_steps(executor_class: Any) -> None:
    with fresh(executor_class) as executor:
        begin(executor)

        def is_still() -> bool:
            executor.get_latest_iteration_stats()
            time.sleep(3 * WAIT_FOR_OUTPUT_S)
            return executor.get_latest_iteration_stats() == []

        with knobs(hangs=True):
            # The supervisor sees it by that
            until(is_still)


def test_a_shutdown_amid_requests_does_not_wait_for_them(executor_class: Any) -> None:
    executor = start(executor_class)
    with knobs(finish_after_abort="never", step_s=SLOW_S):
        request_id = begin(executor)
        executor.shutdown()

    responses = executor.await_responses(request_id, 0.0)
    assert responses[-1].get_result().finish_reasons == [FinishReason.CANCELLED]
    assert not executor._trtllm._thread.is_alive()


def test_a_start_that_fails_says_why_in_one_line(executor_class: Any) -> None:
    with (
        knobs(start_error="CUDA out of memory"),
        pytest.raises(StartError, match="CUDA out of memory; set option"),
    ):
        start(executor_class)


def test_several_sequences_of_a_request_end_each_by_themselves(executor: Any, line: str) -> None:
    config = SamplingConfig(temperature=3, num_return_sequences=3)
    results = [response.get_result() for response in answers(executor, sampling_config=config)]
    assert sorted(response.sequence_index for response in results) == [0, 1, 2]
    assert [response.is_final for response in results] == [False, False, True]
    if line == "main-2026-08":
        assert len({tuple(response.output_token_ids[0]) for response in results}) > 1, (
            "each has its own seed"
        )


def test_prompts_of_one_salt_share_what_was_computed(executor: Any) -> None:
    prompt = tuple(20 + position % 200 for position in range(300))
    first, again, unrelated = (
        answers(executor, input_token_ids=prompt, cache_salt=salt)[0].get_result()
        for salt in ("a", "a", "b")
    )

    assert (first.num_cached_tokens, unrelated.num_cached_tokens, again.num_cached_tokens) == (
        0,
        0,
        288,
    ), "blocks of 32"

    output = OutputConfig(num_prompt_log_probs=0)
    whole = answers(executor, input_token_ids=prompt, cache_salt="a", output_config=output)[
        0
    ].get_result()

    assert whole.num_cached_tokens == 0 and len(whole.prompt_log_probs or ()) == len(prompt)


def test_statistics_of_the_cache_come_where_they_are_asked_for(executor_class: Any) -> None:
    with fresh(executor_class, enable_iter_perf_stats="true") as executor:
        begin(executor)
        until(lambda: executor._trtllm.load().kv_cache.max_num_blocks > 0)
        with knobs(missing_stats=("kvCacheStats",)):
            assert len(tokens(executor)) == 8


def test_statistics_with_missing_parts_are_read_as_far_as_they_go(line: str) -> None:
    statistics = import_module("handlers.lmi_trtllm.engine").Statistics()
    assert not statistics.has_news()
    statistics.take({"iter": 1, "kvCacheStats": {"maxNumBlocks": 9, "usedNumBlocks": 2}})
    assert (statistics.kv_cache.max_num_blocks, statistics.kv_cache.used_num_blocks) == (9, 2)
    statistics.take({"kvCacheStats": None})
    assert statistics.has_news() and not statistics.has_news()
    assert statistics.kv_cache.max_num_blocks == 9


def begun(command: list[str]) -> subprocess.Popen[bytes]:
    """Start a program and wait for its first line: before it runs, /proc does not have
    its words.
    """
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline()
    return process


def test_the_end_of_a_process_that_computes_is_noticed_whatever_the_number_of_its_descriptor(
    line: str,
) -> None:
    ranks = import_module("handlers.lmi_trtllm.engine").ranks
    code = [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"]
    rank = [*code, "mpi4py.futures.server"]
    with many_descriptors(), begun(rank) as worker, begun(code) as code_worker:
        try:
            watched = ranks()
            assert len(watched._fds) == 1 and watched.are_alive

            code_worker.kill()
            code_worker.wait()
            assert watched.are_alive, "a process of another kind may end"

            watched.kill()
            until(lambda: not watched.are_alive)
            watched.close()
        finally:
            worker.kill()
            code_worker.kill()


def test_rows_of_logits_are_whole_where_an_output_brings_several_steps(executor_class: Any) -> None:
    output = OutputConfig(return_generation_logits=True)
    options = {"stream_interval": "3", "gather_generation_logits": "true"}
    with fresh(executor_class, **options) as executor:
        [response] = answers(executor, output_config=output)
        logits = response.get_result().generation_logits
        assert logits is not None and logits.shape == (1, 8, executor.info.vocab_size)
        assert len(tokens(executor)) == 8


def test_a_request_of_a_wrong_type_is_refused(executor: Any) -> None:
    with pytest.raises(InvalidRequest, match="wrong type"):
        executor.enqueue_request(Request(input_token_ids=(1, 2.5), max_tokens=1))  # type: ignore[arg-type]
