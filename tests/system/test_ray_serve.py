"""The example of Ray Serve on two real Ray nodes, each a separate `ray start` on this machine: its
answers, a node that is lost, and a new one.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse
from importlib.metadata import PackageNotFoundError, distribution, requires

import pytest
from packaging.requirements import Requirement

from tests.system.container import ENVIRON, ROOT, wait_until
from tests.system.ray_cluster import ENVIRONMENT, PATHS, Node, own_network


def has_ray_serve() -> bool:
    if importlib.util.find_spec("ray") is None:
        return False

    for requirement in map(Requirement, requires("ray") or []):
        if requirement.marker is None or not requirement.marker.evaluate({"extra": "serve"}):
            continue

        try:
            distribution(requirement.name)
        except PackageNotFoundError:
            return False

    return True


# A mark would skip each test, after it has waited for the whole machine
if not has_ray_serve():
    pytest.skip(
        "pip install -r examples/ray_serve/requirements.txt was not run", allow_module_level=True
    )

pytestmark = pytest.mark.timeout(300)

EXAMPLE = ROOT / "examples" / "ray_serve"
SERVE = (sys.executable, "-P", "-m", "ray.serve.scripts")
HEAD = "127.0.0.2"
FURTHER = "127.0.0.3"
# Nobody else is in their network.
RAY_PORT = 6379
PORT = 8000
START_S = 120.0
NODE = "x-lmi-node"
CHAT = {
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
}
# It takes seconds.
LONG = CHAT | {"max_tokens": 480, "ignore_eos": True, "n": 16}
NUM_TOKENS = 480 * 16
STREAM = {"stream": True}


@pytest.fixture(scope="module", autouse=True)
def network() -> Iterator[None]:
    with own_network():
        yield


@pytest.fixture(scope="module")
def nodes(network: None) -> Iterator[list[Node]]:
    """The head and a further node, each with room for one engine."""
    nodes: list[Node] = []
    try:
        for address in (HEAD, FURTHER):
            nodes.append(Node(address, f"{HEAD}:{RAY_PORT}").start())
            nodes[-1].wait_ready()

        yield nodes
    finally:
        for node in nodes:
            node.kill()


@pytest.fixture(scope="module", autouse=True)
def application(nodes: list[Node], tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What `serve run` runs, with an engine on each node."""
    log = tmp_path_factory.mktemp("serve") / "log"
    environ = {**ENVIRON, **ENVIRONMENT, "PYTHONPATH": PATHS, "RAY_ADDRESS": nodes[0].head}
    with log.open("wb") as output:
        address = ["--http-host", "127.0.0.1", "--http-port", str(PORT)]
        start = [*SERVE, "start", "--proxy-location", "HeadOnly", *address]
        subprocess.run(start, env=environ, stdout=output, stderr=output, check=True)
        folders = ["--working-dir", str(EXAMPLE), "--app-dir", str(EXAMPLE)]
        run = [*SERVE, "run", *folders, "serve_lmi:app", "model=demo", "replicas=2"]
        process = subprocess.Popen(run, env=environ, stdout=output, stderr=output)

    try:
        wait_until(
            lambda: both_answer() or process.poll() is not None, "both engines answer", START_S
        )
        assert process.poll() is None, log.read_text()
        yield
    finally:
        process.terminate()
        process.wait(60)


def ask(path: str, body: object = None) -> HTTPResponse:
    """Send a request, and return the response when its head has come."""
    connection = HTTPConnection("127.0.0.1", PORT, timeout=120)
    method = "GET" if body is None else "POST"
    text = None if body is None else json.dumps(body)
    connection.request(method, path, text, {"connection": "close"})
    return connection.getresponse()


def chat(**changes: object) -> HTTPResponse:
    return ask("/v1/chat/completions", CHAT | changes)


def both_answer() -> bool:
    """Whether engines of both nodes answer some requests."""
    with suppress(OSError, HTTPException):
        return {node_of(ask("/ping")) for _ in range(8)} == {HEAD, FURTHER}

    return False


def node_of(response: HTTPResponse) -> str | None:
    response.read()
    return response.getheader(NODE)


def records(body: bytes) -> list[str]:
    """The data of server-sent events."""
    return [event.removeprefix("data: ") for event in body.decode().split("\n\n")[:-1]]


def test_the_engines_of_two_nodes_answer_whole_and_in_streams() -> None:
    whole = chat()
    [choice] = json.loads(whole.read())["choices"]
    assert whole.status == 200
    assert choice["message"]["content"] == "The capital of France is Paris."

    stream = chat(stream=True)
    *chunks, done = records(stream.read())
    deltas = [json.loads(chunk)["choices"][0]["delta"] for chunk in chunks]
    assert stream.getheader("content-type") == "text/event-stream" and done == "[DONE]"
    assert "".join(delta["content"] for delta in deltas) == choice["message"]["content"]


def test_bad_input_is_refused_in_the_words_of_its_api() -> None:
    response = chat(temperature="hot")
    error = json.loads(response.read())["error"]
    assert response.status == 400
    assert error["param"] == "temperature" and error["type"] == "invalid_request_error"


def test_a_request_whose_client_leaves_is_dropped() -> None:
    before = {node: metric("lmi_generated_tokens_total", node) for node in (HEAD, FURTHER)}
    response = ask("/v1/chat/completions", LONG | STREAM)
    node = response.getheader(NODE)
    assert node is not None
    response.read(1)

    response.close()
    wait_until(lambda: not metric("lmi_requests_running", node), "the engine has dropped it", 30)
    num_tokens = metric("lmi_generated_tokens_total", node) - before[node]
    assert 0 < num_tokens < NUM_TOKENS / 2


def metric(name: str, node: str) -> float:
    """The value of a metric of one engine, which answers by chance."""
    response = ask("/metrics")
    while response.getheader(NODE) != node:
        response.read()
        response = ask("/metrics")

    lines = response.read().decode().splitlines()
    [line] = [line for line in lines if line.startswith(name)]
    return float(line.split()[-1])


def test_a_lost_node_ends_its_streams_alone_and_other_requests_are_answered(
    nodes: list[Node],
) -> None:
    with ThreadPoolExecutor(8) as pool:
        streams = [ask("/v1/chat/completions", LONG | STREAM) for _ in range(4)]
        whole = [pool.submit(answer_of, LONG) for _ in range(2)]
        assert {stream.getheader(NODE) for stream in streams} == {HEAD, FURTHER}

        nodes[1].kill()
        lost_s = time.monotonic()
        short = [pool.submit(answer_of, CHAT) for _ in range(8)]
        for future in short:
            assert future.result() == (200, HEAD)

        print(f"answered {time.monotonic() - lost_s:.2f} s after the loss")
        assert [future.result() for future in whole] == [(200, HEAD)] * 2

    for stream in streams:
        *_, last, done = records(stream.read())
        error = json.loads(last).get("error", {})
        is_lost = stream.getheader(NODE) == FURTHER
        assert done == "[DONE]" and (error.get("code") == "engine_lost") == is_lost, last


def answer_of(body: object) -> tuple[int, str | None]:
    """The status of an answer, and the node that gave it."""
    response = ask("/v1/chat/completions", body)
    return response.status, node_of(response)


def test_a_new_node_takes_up_the_engine_of_the_lost_one(nodes: list[Node]) -> None:
    nodes[1].start().wait_ready()
    joined_s = time.monotonic()
    wait_until(both_answer, "an engine on the new node answers", START_S)
    print(f"an engine answers {time.monotonic() - joined_s:.2f} s after its node came")
    assert chat().status == 200
