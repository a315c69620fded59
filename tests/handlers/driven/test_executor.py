"""The bookkeeping of DrivenExecutor, between the contract and a foreign engine."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from handlers.base.sequence import Sequence
from handlers.base.token_sequence import sequences_of
from handlers.driven.engine import name_of
from handlers.driven.preparation import Preparation
from handlers.driven.turns import Turns
from lmi.errors import InvalidParameter, InvalidRequest, UnknownAdapter
from lmi.executor import ErrorKind, FinishReason, LoraConfig, Request, Response, ResponseError
from lmi.settings.config import EngineConfig
from tests.system.engines.foreign_engine import (
    BREAK,
    FAULT,
    MAX_NUM_SEQUENCES,
    Executor,
    Work,
    write_adapter,
)

TIMEOUT_S = 60.0


@pytest.fixture
def executor() -> Iterator[Executor]:
    with Executor(EngineConfig(handler="foreign")) as executor:
        yield executor


def finals(executor: Executor, ids: list[int]) -> dict[int, Response]:
    ended: dict[int, Response] = {}
    deadline_s = time.monotonic() + TIMEOUT_S
    while len(ended) < len(ids):
        assert time.monotonic() < deadline_s, f"without an end: {set(ids) - set(ended)}"
        for response in executor.await_responses(timeout_s=TIMEOUT_S):
            assert isinstance(response, Response)
            if response.is_final:
                ended[response.request_id] = response

    return ended


def ask(*prompt: int, max_tokens: int = 3) -> Request:
    return Request(input_token_ids=prompt, max_tokens=max_tokens)


def test_what_the_engine_gives_up_ends_with_its_words_and_the_rest_goes_on(
    executor: Executor,
) -> None:
    bad, good = executor.enqueue_requests([ask(1, FAULT), ask(1, 2)])
    ended = finals(executor, [bad, good])

    assert ended[bad].error_msg == "Foreign gave the request up: a fault"
    assert ended[good].result is not None and ended[good].result.output_token_ids == [[1, 2, 1]]


def test_what_the_engine_refuses_is_the_clients_fault(executor: Executor) -> None:
    bad, good = executor.enqueue_requests([ask(FAULT), ask(1, 2)])
    error = finals(executor, [bad, good])[bad].error
    assert error is not None and (error.message, error.kind) == (
        "the engine takes no such prompt",
        ErrorKind.INVALID,
    )


class Broken(Preparation[None]):
    """What it makes for a prompt with `FAULT` is never made."""

    def begin(self, sequence: Sequence) -> Future[None] | None:
        if FAULT not in sequence.request.input_token_ids:
            return None

        future: Future[None] = Future()
        future.set_exception(OSError("no such program"))
        return future

    def equip(self, sequence: Sequence, product: None) -> None:
        raise AssertionError

    def close(self) -> None:
        return None


def test_a_preparation_that_breaks_fails_only_its_request(executor: Executor) -> None:
    executor._preparations = [Broken(executor._wake)]
    bad, good = executor.enqueue_requests([ask(1, FAULT), ask(1, 2)])
    ended = finals(executor, [bad, good])
    assert ended[bad].error == ResponseError(
        "the request was not prepared: no such program", ErrorKind.GENERATION
    )
    assert ended[good].result is not None and ended[good].result.output_token_ids == [[1, 2, 1]]


class Particular(Executor):
    def _work(self, sequence: Sequence) -> Work:
        raise InvalidParameter("seed", "even", 1)


def test_an_error_of_ours_keeps_the_field_that_is_at_fault() -> None:
    with Particular(EngineConfig(handler="foreign")) as executor:
        request_id = executor.enqueue_request(ask(1, 2))
        error = finals(executor, [request_id])[request_id].error

    assert error == ResponseError("must be even, given 1", ErrorKind.INVALID, "seed")


def test_a_step_that_raises_ends_what_ran_and_what_waited_starts_again(executor: Executor) -> None:
    running = [ask(1, BREAK)] * MAX_NUM_SEQUENCES
    *ran, waited = executor.enqueue_requests([*running, ask(1, 2)])
    ended = finals(executor, [*ran, waited])
    assert {ended[request_id].error_msg for request_id in ran} == {
        "the step failed: the step broke"
    }
    assert ended[waited].result is not None and ended[waited].result.finish_reasons == [
        FinishReason.LENGTH
    ]
    assert executor.get_latest_iteration_stats()[-1].num_active_requests == 0


def test_the_cache_of_the_last_request_is_free_once_its_client_has_left(executor: Executor) -> None:
    left = executor.enqueue_request(Request(input_token_ids=(1, 2), max_tokens=400, streaming=True))
    assert executor.await_responses(timeout_s=TIMEOUT_S), "it runs"

    executor.cancel_request(left)
    finals(executor, [left])
    cache = executor.get_latest_iteration_stats()[-1].kv_cache_stats
    assert cache.max_num_blocks and cache.used_num_blocks == 0


def test_what_ends_in_a_step_before_it_raises_is_answered(executor: Executor) -> None:
    refused, broken = executor.enqueue_requests([ask(FAULT), ask(1, BREAK)])
    ended = finals(executor, [refused, broken])
    assert ended[refused].error_msg == "the engine takes no such prompt"
    assert ended[broken].error_msg == "the step failed: the step broke"


def test_a_value_of_a_wrong_type_never_reaches_the_engine(executor: Executor) -> None:
    with pytest.raises(InvalidRequest, match="wrong type"):
        executor.enqueue_request(ask(1, 2.5))  # type: ignore[arg-type]


def test_a_full_batch_leaves_its_express_places_to_express_requests() -> None:
    turns = Turns(2, adapters_take_turns=False)
    running = {}
    for request_id, more in enumerate([{}, {}, {}, {"priority": 0.9}, {"is_express": True}]):
        [sequence] = sequences_of(Sequence, request_id, Request((1,), 3, **more), 512)
        turns.add(sequence)

    for sequence in turns.take(running):
        running[name_of(sequence)] = sequence

    assert list(running) == ["4.0", "3.0", "0.0"]

    del running["4.0"]
    assert not list(turns.take(running))

    del running["3.0"]
    assert next(turns.take(running)).id == 1


def test_an_adapter_that_is_unloaded_stays_in_the_engine_until_its_last_sequence_ends(
    tmp_path: Path,
) -> None:
    path = write_adapter(tmp_path / "formal", shift=5)
    adapted = Request(input_token_ids=(1, 2), max_tokens=20, lora_config=LoraConfig("formal"))
    with Executor(EngineConfig(handler="foreign", options={"enable_lora": "true"})) as executor:
        executor.load_adapter("formal", str(path))
        # Most of them wait
        ids = executor.enqueue_requests([adapted] * (3 * MAX_NUM_SEQUENCES))
        executor.unload_adapter("formal")
        with pytest.raises(UnknownAdapter, match="Adapter formal is not registered"):
            executor.enqueue_request(adapted)

        shutil.rmtree(path)
        # Another one of this name
        executor.load_adapter("formal", str(write_adapter(path, shift=7)))
        executor.cancel_request(ids[0])
        ended = finals(executor, ids)

        assert {
            response.result.output_token_ids[0][0]
            for response in (ended[ended_id] for ended_id in ids[1:])
            if response.result
        } == {6}

        [again] = finals(executor, [executor.enqueue_request(adapted)]).values()
        assert again.result is not None and again.result.output_token_ids[0][0] == 8
        assert list(executor.engine.shifts.values()) == [7], "the first one has left the engine"
