"""One model on several nodes, each a separate server on this machine."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from tests.machine import Measurement
from tests.served import Server, serve
from tests.system.container import free_port, wait_until
from tests.system.vllm_server import BACK_S, SETTINGS, SHORT, end_of, segments, streaming
from tests.tiny_models import tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


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


def test_two_nodes_answer_as_one_engine(nodes: list[Server], inside: Server) -> None:
    answer = nodes[0].post(SHORT)
    assert answer.status == 200 and answer.lines == inside.post(SHORT).lines


def test_a_further_node_is_healthy_and_says_who_takes_requests(nodes: list[Server]) -> None:
    assert nodes[1].ping() == 200
    refused = nodes[1].post(SHORT)
    assert refused.status == 503
    assert (
        refused.lines[0]["error"]
        == "this is node 1 of 2 and takes no requests; node 0, 127.0.0.1, does"
    )


def end_of_streams_when_lost(nodes: list[Server], lost: int) -> None:
    """The process that is killed is the parent of a rank; on node 0 it has the scheduler too."""
    with streaming(nodes[0], 4) as streams, Measurement(is_last=True).within(10):
        os.kill(nodes[lost].pid("lmi-engine"), signal.SIGKILL)
        ends = [end_of(stream) for stream in streams]

    assert all(last["code"] == 503 for last in ends), ends


def test_a_lost_node_ends_the_streams_and_both_nodes_start_again(nodes: list[Server]) -> None:
    pids = {
        pid for node in nodes for pid in node.pids() if os.getpgid(pid) == node.pid("lmi-engine")
    }
    shared = segments(pids)

    end_of_streams_when_lost(nodes, 1)

    wait_until(
        lambda: not pids & {pid for node in nodes for pid in node.pids()},
        "no process of before is left",
    )
    wait_until(lambda: not any(map(os.path.exists, shared)), "nor what they shared")
    wait_until(lambda: [node.ping() for node in nodes] == [200, 200], "both nodes are back", BACK_S)

    assert nodes[0].post(SHORT).status == 200


def test_nothing_is_left_when_the_first_node_is_lost_and_the_supervisors_are_killed(
    nodes: list[Server],
) -> None:
    """The last: each start of two ranks takes half a minute of two cores."""
    shared = segments(pid for node in nodes for pid in node.pids())
    assert shared

    end_of_streams_when_lost(nodes, 0)
    for node in nodes:
        os.kill(node.pid("lmi-supervisor"), signal.SIGKILL)

    wait_until(lambda: not any(node.pids() for node in nodes), "no process is left")
    wait_until(lambda: not any(map(os.path.exists, shared)), "nor what they shared")
