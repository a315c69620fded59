"""One model on the ranks of two real Ray nodes. Each node is a separate `ray start` on this
machine.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.served import Server, launch, serve
from tests.system.container import wait_until
from tests.system.ray_cluster import PATHS, RANK, SILENT_S, Node, own_network
from tests.system.vllm_server import BACK_S, SETTINGS, SHORT, end_of, streaming
from tests.tiny_models import tiny_model

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(300),
]
# A mark would skip each test, after it has waited for the whole machine
if importlib.util.find_spec("ray") is None:
    pytest.skip("scripts/install vllm ray was not run", allow_module_level=True)

HEAD = "127.0.0.2"
FURTHER = "127.0.0.3"
# Nobody else is in their network. Ray takes those from 10002 to 19999 for workers.
PORT = 6379
ON_RAY = (*SETTINGS, "option.tensor_parallel_degree=2", "option.distributed_executor_backend=ray")


@pytest.fixture(scope="module", autouse=True)
def network() -> Iterator[None]:
    with own_network():
        yield


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[Node]]:
    """The head, beside which the server runs, and a further node."""
    head = f"{HEAD}:{PORT}"
    nodes: list[Node] = []
    try:
        for address in (HEAD, FURTHER):
            nodes.append(Node(address, head).start())
            nodes[-1].wait_ready()

        yield nodes
    finally:
        for node in nodes:
            node.kill()


@pytest.fixture(scope="module")
def server(nodes: list[Node]) -> Iterator[Server]:
    environ = {"RAY_ADDRESS": nodes[0].head, "VLLM_HOST_IP": HEAD, "PYTHONPATH": PATHS}
    with serve(tiny_model("llama_long"), *ON_RAY, environ=environ) as server:
        yield server


def ranks(nodes: list[Node]) -> list[int]:
    return [pid for node in nodes for pid in node.pids(RANK)]


def hurt(server: Server, pids: Iterable[int], within_s: float) -> None:
    """While 4 streams run, processes are killed. Every stream ends in time, and /ping
    reports it.
    """
    with streaming(server, 4) as streams:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

        hurt_s = time.monotonic()
        ends = [end_of(stream) for stream in streams]
        assert time.monotonic() - hurt_s < within_s

    assert all("engine" in last["error"] and last["code"] == 503 for last in ends), ends
    wait_until(lambda: server.ping() == 503, "/ping reports it")


def comes_back(server: Server, nodes: list[Node], before: list[int]) -> None:
    """The engine is ready again, on one new rank on each node."""
    wait_until(lambda: server.ping() == 200, "the engine is back", BACK_S)
    assert [len(node.pids(RANK)) for node in nodes] == [1, 1] and not set(before) & set(
        ranks(nodes)
    )
    assert server.post(SHORT).status == 200


def last_words(tmp_path: Path, model: Path, code: int, **environ: str) -> str:
    """What a server says that ends at its start with this exit code."""
    lines = [f"option.model_id={model}", "log_format=json", *ON_RAY]
    (tmp_path / "serving.properties").write_text("\n".join(lines) + "\n")
    with launch(tmp_path, environ) as server:
        assert server.wait(120) == code, server.log.read_text()
        return str(server.last_words()["message"])


def test_without_a_cluster_the_start_ends_with_advice(tmp_path: Path) -> None:
    words = last_words(tmp_path, tiny_model("llama_long"), 2, PYTHONPATH=PATHS)
    assert "option.distributed_executor_backend=ray" in words and "ray start" in words, words


def test_vllms_platform_for_cpus_is_refused_as_long_as_it_has_no_name_in_ray(
    nodes: list[Node], tmp_path: Path
) -> None:
    words = last_words(
        tmp_path, tiny_model("llama_long"), 2, RAY_ADDRESS=nodes[0].head, VLLM_HOST_IP=HEAD
    )
    assert "current platform cpu does not support ray" in words and "option.nnodes" in words, words


def test_a_rank_that_cannot_load_the_model_gives_the_cause(
    nodes: list[Node], tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_model("llama_long"), tmp_path / "model")
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    environ = {"RAY_ADDRESS": nodes[0].head, "VLLM_HOST_IP": HEAD, "PYTHONPATH": PATHS}
    words = last_words(tmp_path, model, 4, **environ)
    assert "deserializing header" in words and "ray::" not in words, words


def test_the_ranks_of_two_nodes_answer_as_one_does(server: Server, nodes: list[Node]) -> None:
    assert [len(node.pids(RANK)) for node in nodes] == [1, 1]

    answer = server.post(SHORT)
    with serve(tiny_model("llama_long"), *SETTINGS) as ray_server:
        assert ray_server.post(SHORT).lines == answer.lines and answer.status == 200


def test_streams_end_when_a_node_is_lost_and_the_engine_waits_for_another(
    server: Server, nodes: list[Node]
) -> None:
    before = ranks(nodes)
    hurt(server, nodes[1].pids(), within_s=5)
    nodes[1].kill()
    wait_until(lambda: not set(before) & set(ranks(nodes)), "no rank of before is left", 30)
    nodes[1].start().wait_ready()
    comes_back(server, nodes, before)


def test_a_node_that_falls_silent_is_noticed_without_a_request(
    server: Server, nodes: list[Node]
) -> None:
    before = ranks(nodes)
    for pid in nodes[1].pids():
        os.kill(pid, signal.SIGSTOP)

    wait_until(lambda: server.ping() == 503, "/ping reports it", SILENT_S)
    nodes[1].kill()
    nodes[1].start().wait_ready()
    comes_back(server, nodes, before)


def test_streams_end_when_a_rank_is_killed(server: Server, nodes: list[Node]) -> None:
    before = ranks(nodes)
    hurt(server, nodes[0].pids(RANK), within_s=5)
    comes_back(server, nodes, before)


def test_streams_end_when_the_engine_is_killed(server: Server, nodes: list[Node]) -> None:
    before = ranks(nodes)
    hurt(server, [server.pid("lmi-engine")], within_s=2)
    comes_back(server, nodes, before)


def test_the_log_keeps_its_form(server: Server) -> None:
    # Each is a JSON object
    for line in server.log_lines():
        assert not any("ray" in name for name in line), line


def test_a_server_that_ends_leaves_no_rank(server: Server, nodes: list[Node]) -> None:
    server.signal(signal.SIGTERM)
    assert server.wait(60) == 0
    wait_until(lambda: not ranks(nodes), "no rank is left")
    assert not server.pids()
