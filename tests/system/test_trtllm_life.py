"""A server whose engine is TensorRT-LLM's double, while processes are killed and the engine stops
to work.

It has two ranks, each with a process of the double.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import pytest

from tests.handlers.trtllm.double import write_double
from tests.handlers.trtllm.double.engine import RANK
from tests.handlers.trtllm.double.knobs import VARIABLE, encoded
from tests.served import Server, launch
from tests.system.container import ROOT, wait_until
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.timeout(600)

# A busy machine takes long to import torch
START_S = 180.0
LONG: dict[str, Any] = {
    "inputs": "abc",
    "stream": True,
    "parameters": {"max_new_tokens": 4000, "ignore_eos_token": True},
}
SHORT = {"inputs": "abc", "parameters": {"max_new_tokens": 5}}
NUM_RANKS = 2
NUM_STREAMS = 4
OPTIONS = (
    "option.rolling_batch=trtllm",
    f"option.tensor_parallel_degree={NUM_RANKS}",
    "log_format=json",
    "step_timeout=3",
    "retry_threshold=20",
    "frontend_workers=1",
)
PARTS = ("lmi-engine", RANK)


class Knobs:
    """The knobs of the double in a process that runs."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.folder = path.parent
        self.reset()

    def reset(self) -> None:
        self.turn()

    def turn(self, **values: Any) -> None:
        new = self._path.with_suffix(".new")
        new.write_text(encoded(**{"step_s": 0.01, "has_workers": True, **values}))
        new.replace(self._path)


def environ(folder: Path) -> dict[str, str]:
    """The environment in which the double is found. The knobs are in a file."""
    write_double(folder / "double", "main-2025-10")
    return {VARIABLE: f"@{folder}/knobs", "PYTHONPATH": f"{folder}/double:{ROOT}"}


def write_settings(folder: Path, *settings: str) -> Path:
    settings_folder = Path(tempfile.mkdtemp(dir=folder))
    lines = [f"option.model_id={tiny_model('llama_long')}", *OPTIONS, *settings]
    (settings_folder / "serving.properties").write_text("\n".join(lines) + "\n")
    return settings_folder


@pytest.fixture(scope="module")
def knobs() -> Iterator[Knobs]:
    with tempfile.TemporaryDirectory() as name:
        yield Knobs(Path(name) / "knobs")


@pytest.fixture(scope="module")
def served(knobs: Knobs) -> Iterator[Server]:
    with launch(write_settings(knobs.folder), environ(knobs.folder)) as server:
        server.wait_ready()
        yield server


def ranks(server: Server) -> list[int]:
    return server.pids(RANK)


@contextmanager
def streaming(server: Server) -> Iterator[list[HTTPResponse]]:
    """The answers of some streams that run."""
    wait_until(
        lambda: server.ping() == 200, "the engine is back, if the test before ended early", START_S
    )
    with ExitStack() as stack:
        answers = [stack.enter_context(server.open(LONG)) for _ in range(NUM_STREAMS)]
        for answer in answers:
            answer.readline()

        yield answers


def last_line(answer: HTTPResponse) -> dict[str, Any]:
    line: dict[str, Any] = json.loads(answer.read().splitlines()[-1])
    return line


def hurt(server: Server, harm: Callable[[], object], mend: Callable[[], object], why: str) -> None:
    """While streams run, the engine is harmed: each ends with 503, and the engine, lost for a
    reason, comes back.
    """
    before = {pid for name in PARTS for pid in server.pids(name)}
    with streaming(server) as answers:
        harm()
        wait_until(lambda: server.ping() == 503, "/ping reports it")
        mend()
        ends = [last_line(answer) for answer in answers]

    assert all(end["code"] == 503 and "engine" in end["error"] for end in ends), ends
    wait_until(
        lambda: not before & set(server.pids()), "nothing is left of the engine and its ranks"
    )
    wait_until(lambda: server.ping() == 200, "the engine is back", START_S)
    wait_until(lambda: len(ranks(server)) == NUM_RANKS, "with all its ranks")
    assert server.post(SHORT).status == 200
    assert (
        why
        in [line["message"] for line in server.log_lines() if " lost: " in line.get("message", "")][
            -1
        ]
    )


def test_an_engine_with_ranks_answers_and_logs_as_one_without(served: Server) -> None:
    assert served.post(SHORT).status == 200
    assert len(ranks(served)) == NUM_RANKS
    lines = [line for line in served.log_lines() if line.get("role") == "engine 0"]
    assert lines and not [line for line in lines if '"message"' in line["message"]], (
        "a line of our form is in another"
    )


def test_streams_end_when_the_engine_is_killed(served: Server, knobs: Knobs) -> None:
    hurt(
        served,
        lambda: os.kill(served.pid("lmi-engine"), signal.SIGKILL),
        knobs.reset,
        "was killed by SIGKILL",
    )


def test_streams_end_when_a_rank_is_killed(served: Server, knobs: Knobs) -> None:
    reason = "the executor has stopped by itself"
    hurt(served, lambda: os.kill(ranks(served)[-1], signal.SIGKILL), knobs.reset, reason)


def test_streams_end_when_the_library_hangs(served: Server, knobs: Knobs) -> None:
    hurt(served, lambda: knobs.turn(hangs=True), knobs.reset, "made no step though work waits")


def test_clients_that_leave_free_their_places(served: Server) -> None:
    cancelled = 'lmi_finished_total{finish_reason="cancelled"}'
    with streaming(served):
        wait_until(
            lambda: served.metrics()["lmi_requests_running"] == NUM_STREAMS, "all streams run"
        )
        before = served.metrics()

    wait_until(
        lambda: served.metrics().get(cancelled, 0) == before.get(cancelled, 0) + NUM_STREAMS,
        "all are cancelled",
    )
    wait_until(served.is_idle, "nothing runs for nobody")


def test_sigterm_lets_a_stream_finish_and_leaves_no_rank(served: Server) -> None:
    with served.open(
        {**LONG, "parameters": {**LONG["parameters"], "max_new_tokens": 150, "details": True}}
    ) as answer:
        answer.readline()
        served.signal(signal.SIGTERM)
        details = last_line(answer)["details"]

    assert (details["finish_reason"], details["generated_tokens"]) == ("length", 150)
    assert served.wait() == 0
    assert served.pids() == []


def test_a_start_that_fails_has_the_line_and_the_exit_code_of_other_engines(tmp_path: Path) -> None:
    knobs = Knobs(tmp_path / "knobs")
    knobs.turn(start_error="the checkpoint is cut short")
    with launch(write_settings(tmp_path), environ(tmp_path)) as server:
        assert server.wait(START_S) == 4
        assert "the checkpoint is cut short" in server.last_words()["message"]
        assert server.pids() == []
