"""One model on several real ranks of one server."""

from __future__ import annotations

import importlib.util
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.served import Server, launch, serve
from tests.system.vllm_server import (
    ENGINE,
    SETTINGS,
    SHORT,
    STEP_TIMEOUT_S,
    family,
    hurt,
    recovers,
    refuses_a_grammar_and_leaves_no_raw_line,
)
from tests.tiny_models import tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

# Two ranks share two cores, so a stream begins slowly
NUM_STREAMS = 8
# The kernel keeps 15 characters of a name
RANK = "VLLM::Worker_TP"
PROCESSES = {ENGINE: 1, RANK: 2}


@pytest.fixture(scope="module")
def apart() -> Iterator[Server]:
    """Two ranks: an engine process and its two workers."""
    with serve(tiny_model("llama_long"), *SETTINGS, "option.tensor_parallel_degree=2") as server:
        yield server


def test_two_ranks_answer_as_one_does(apart: Server, inside: Server) -> None:
    assert {name: len(pids) for name, pids in family(apart).items()} == PROCESSES
    two = apart.post(SHORT)
    answer = inside.post(SHORT)
    assert answer.status == two.status == 200
    assert answer.lines == two.lines and len(answer.lines[0]["generated_text"]) > 10
    folder = Path(apart.environ["TMPDIR"])
    assert not any(map(Path.is_socket, folder.iterdir())), (
        "vLLM's sockets lie where they go when the server does"
    )


def test_a_structure_that_vllm_cannot_compile_is_the_clients_fault(apart: Server) -> None:
    body = {"prompt": "The quick", "max_tokens": 4}
    # vLLM keeps this compiler
    assert apart.post(body | {"guided_regex": "[ab]{3}"}, "/v1/completions").status == 200
    answer = apart.post(body | {"guided_regex": r"\p{L}{1,500}" * 20}, "/v1/completions")
    assert (
        answer.status == 400 and b"not supported" in answer.body and b"guided_regex" in answer.body
    ), answer.body


def test_a_refused_grammar_leaves_no_raw_line_in_the_log(apart: Server) -> None:
    refuses_a_grammar_and_leaves_no_raw_line(apart)


# Each of these but the last waits for the engine that the next one hurts.


def test_streams_end_when_a_rank_is_killed(apart: Server) -> None:
    hurt(apart, RANK, signal.SIGKILL, within_s=5, num_streams=NUM_STREAMS)
    recovers(apart, PROCESSES)


def test_streams_end_when_a_rank_stands_still(apart: Server) -> None:
    hurt(apart, RANK, signal.SIGSTOP, within_s=STEP_TIMEOUT_S + 3, num_streams=NUM_STREAMS)
    # Nobody needs the engine that starts
    apart.kill()


@pytest.mark.skipif(
    importlib.util.find_spec("ray") is not None, reason="Ray is installed; test_vllm_ray.py runs it"
)
def test_ray_is_asked_of_vllm_and_missed_by_name(tmp_path) -> None:
    (tmp_path / "serving.properties").write_text(
        "\n".join(
            [
                f"option.model_id={tiny_model('llama_wide')}",
                "option.rolling_batch=vllm",
                "option.tensor_parallel_degree=2",
                "option.distributed_executor_backend=ray",
                "log_format=json",
            ]
        )
    )
    with launch(tmp_path) as server:
        assert server.wait(120) == 2

        words = server.last_words()["message"]
        assert "pip install ray" in words and "option.distributed_executor_backend" in words
        assert "Traceback" not in server.log.read_text()
