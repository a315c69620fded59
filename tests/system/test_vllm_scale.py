"""One model on several real ranks, replicas and nodes. Each node is a separate server on this
machine.
"""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.machine import Measurement
from tests.served import Server, launch, serve
from tests.system.container import free_port, wait_until
from tests.system.vllm_server import (
    BACK_S,
    ENGINE,
    LONG,
    SETTINGS,
    SHORT,
    STEP_TIMEOUT_S,
    end_of,
    family,
    hurt,
    recovers,
    refuses_a_grammar_and_leaves_no_raw_line,
    segments,
    streaming,
)
from tests.tiny_models import tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

NUM_STREAMS = 8  # two ranks share two cores, so a stream begins slowly
RANK = "VLLM::Worker_TP"  # the kernel keeps 15 characters of a name
PROCESSES = {ENGINE: 1, RANK: 2}


@pytest.fixture(scope="module")
def apart() -> Iterator[Server]:
    """Two ranks: an engine process and its two workers."""
    with serve(tiny_model("llama_long"), *SETTINGS, "option.tensor_parallel_degree=2") as server:
        yield server


def node_settings(rank: int, port: int) -> tuple[str, ...]:
    node = {"nnodes": 2, "node_rank": rank, "master_addr": "127.0.0.1", "master_port": port}
    return (
        *SETTINGS,
        "option.tensor_parallel_degree=2",
        *(f"option.{name}={value}" for name, value in node.items()),
    )


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[Server]]:
    """Two servers that form one engine, each with one rank on one core. The first is ready when
    both are.
    """
    port = free_port()

    def start(rank: int) -> Server:
        environ = {"VLLM_HOST_IP": "127.0.0.1", "VLLM_CPU_OMP_THREADS_BIND": str(rank)}
        return stack.enter_context(serve(folder, *node_settings(rank, port), environ=environ))

    folder = tiny_model("llama_long")
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        yield list(pool.map(start, range(2)))


def test_two_ranks_answer_as_one_does(apart: Server, inside: Server) -> None:
    assert {name: len(pids) for name, pids in family(apart).items()} == PROCESSES
    two = apart.post(SHORT)
    one = inside.post(SHORT)
    assert one.status == two.status == 200
    assert one.lines == two.lines and len(one.lines[0]["generated_text"]) > 10
    folder = Path(apart.environ["TMPDIR"])
    assert not any(map(Path.is_socket, folder.iterdir())), (
        "vLLM's sockets lie where they go when the server does"
    )


def test_a_structure_that_vllm_cannot_compile_is_the_clients_fault(apart: Server) -> None:
    body = {"prompt": "The quick", "max_tokens": 4}
    assert (
        apart.post(body | {"guided_regex": "[ab]{3}"}, "/v1/completions").status == 200
    )  # vLLM keeps this compiler
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
    apart.kill()  # nobody needs the engine that starts


def test_two_nodes_answer_as_one_engine(nodes: list[Server]) -> None:
    answer = nodes[0].post(SHORT)
    with serve(
        tiny_model("llama_long"), *SETTINGS, "minWorkers=2", "option.max_rolling_batch_size=1"
    ) as replicas:
        wait_until(
            lambda: replicas.metrics()["lmi_engines_ready"] == 2,
            "the second replica is ready too",
            BACK_S,
        )
        assert replicas.post(SHORT).lines == answer.lines and answer.status == 200
        with ExitStack() as streams:  # each replica has room for one

            def both_work() -> bool:
                """Send another while one waits or was refused: the front end may not have known the
                second replica.
                """
                metrics = replicas.metrics()
                if metrics["lmi_requests_waiting"] or metrics["lmi_requests_in_flight"] < 2:
                    streams.enter_context(replicas.connect(LONG))

                return metrics["lmi_requests_running"] == 2

            wait_until(both_work, "both replicas work", 60)


def test_a_further_node_is_healthy_and_says_who_takes_requests(nodes: list[Server]) -> None:
    assert nodes[1].ping() == 200
    refused = nodes[1].post(SHORT)
    assert refused.status == 503
    assert (
        refused.lines[0]["error"]
        == "this is node 1 of 2 and takes no requests; node 0, 127.0.0.1, does"
    )


@pytest.mark.parametrize("lost", [1, 0])
def test_a_lost_node_ends_the_streams_and_both_nodes_start_again(
    nodes: list[Server], lost: int
) -> None:
    """The process that is killed is the parent of a rank; on node 0 it has the scheduler too."""
    pids = {
        pid for node in nodes for pid in node.pids() if os.getpgid(pid) == node.pid("lmi-engine")
    }
    shared = segments(pids)
    with streaming(nodes[0], 4) as streams, Measurement(is_last=True).within(10):
        os.kill(nodes[lost].pid("lmi-engine"), signal.SIGKILL)
        ends = [end_of(stream) for stream in streams]

    assert all(last["code"] == 503 for last in ends), ends

    wait_until(
        lambda: not pids & {pid for node in nodes for pid in node.pids()},
        "no process of before is left",
    )
    wait_until(lambda: not any(map(os.path.exists, shared)), "nor what they shared")
    wait_until(lambda: [node.ping() for node in nodes] == [200, 200], "both nodes are back", BACK_S)

    assert nodes[0].post(SHORT).status == 200


def test_nothing_is_left_when_the_supervisors_are_killed(nodes: list[Server]) -> None:
    shared = segments(pid for node in nodes for pid in node.pids())
    assert shared
    for node in nodes:
        os.kill(node.pid("lmi-supervisor"), signal.SIGKILL)

    wait_until(lambda: not any(node.pids() for node in nodes), "no process is left")
    wait_until(lambda: not any(map(os.path.exists, shared)), "nor what they shared")


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
