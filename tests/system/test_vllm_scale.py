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
    family,
    hurt,
    refuses_a_grammar_and_leaves_no_raw_line,
)
from tests.tiny_models import tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

# Two ranks share two cores, so a stream begins slowly
NUM_STREAMS = 8
# The kernel keeps 15 characters of a name
RANK = "VLLM::Worker_TP"
PROCESSES = {ENGINE: 1, RANK: 2}

GREEDY = {"max_new_tokens": 20}
DRAWN = {"max_new_tokens": 12, "do_sample": True, "temperature": 1.0, "seed": 7}
# What the executor of ranks has a part in
ASKED: dict[str, dict[str, object]] = {
    "greedy": GREEDY,
    "drawn": DRAWN,
    "two beams": GREEDY | {"num_beams": 2},
    "four beams": GREEDY | {"num_beams": 4},
    "JSON": DRAWN | {"response_format": {"type": "json_object"}},
    "schema": GREEDY | {"guided_json": {"type": "boolean"}},
    "pattern": GREEDY | {"guided_regex": "[abc]{3}"},
    "grammar": GREEDY | {"guided_grammar": 'root ::= "yes" | "no"'},
}


@pytest.fixture(scope="module")
def apart() -> Iterator[Server]:
    """Two ranks: an engine process and its two workers."""
    with serve(tiny_model("llama_long"), *SETTINGS, "option.tensor_parallel_degree=2") as server:
        yield server


def test_two_ranks_are_processes_whose_sockets_lie_where_they_go_when_the_server_does(
    apart: Server,
) -> None:
    assert {name: len(pids) for name, pids in family(apart).items()} == PROCESSES
    folder = Path(apart.environ["TMPDIR"])
    assert not any(map(Path.is_socket, folder.iterdir()))


@pytest.mark.parametrize("asked", ASKED)
def test_two_ranks_answer_as_one_does(apart: Server, inside: Server, asked: str) -> None:
    body = {"inputs": "abc", "parameters": ASKED[asked]}
    answer = apart.post(body)
    of_one_rank = inside.post(body)
    assert answer.status == of_one_rank.status == 200, answer.body
    assert answer.lines == of_one_rank.lines and answer.lines[0]["generated_text"]


def test_two_ranks_answer_three_sequences_and_each_is_another(apart: Server) -> None:
    body = {"prompt": "abc", "max_tokens": 12, "temperature": 1.0, "seed": 7, "n": 3}
    [answer] = apart.post(body, "/v1/completions").lines
    assert answer["usage"]["completion_tokens"] == 3 * 12
    assert len({choice["text"] for choice in answer["choices"]}) == 3


def test_two_ranks_count_the_tokens_of_a_prompt_once_and_those_of_each_beam(
    apart: Server,
) -> None:
    before = apart.metrics()
    body = {"inputs": "abcde", "parameters": {"max_new_tokens": 6, "num_beams": 3}}
    assert apart.post(body).status == 200

    after = apart.metrics()
    counted = {
        name: after[name] - before[name]
        for name in ("lmi_prompt_tokens_total", "lmi_generated_tokens_total")
    }
    assert counted == {"lmi_prompt_tokens_total": 5, "lmi_generated_tokens_total": 6 * 3}


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


def test_streams_end_when_a_rank_is_killed(apart: Server) -> None:
    """The last. That an engine of two ranks starts again the nodes show, which start two as well:
    each start takes half a minute of two cores.
    """
    hurt(apart, RANK, signal.SIGKILL, within_s=5, num_streams=NUM_STREAMS)
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
