"""The example of Ray Serve on two real Ray nodes: its answers, a lost node, and a new one."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPException, HTTPResponse

import pytest

from tests.system.container import wait_until
from tests.system.ray_cluster import Node, own_network
from tests.system.ray_serve import (
    ANSWER,
    CHAT,
    FURTHER,
    HEAD,
    PATH,
    START_S,
    ask,
    chat,
    has_ray_serve,
    joined,
    records,
    serving,
    text_of,
    two_nodes,
)

# A mark would skip each test, after it has waited for the whole machine
if not has_ray_serve():
    pytest.skip(
        "pip install -r examples/ray_serve/requirements.txt was not run", allow_module_level=True
    )

pytestmark = pytest.mark.timeout(300)

NODE = "x-lmi-node"
# It takes a while.
LONG = CHAT | {"max_tokens": 480, "ignore_eos": True, "n": 16}
NUM_TOKENS = 480 * 16
STREAM = {"stream": True}


@pytest.fixture(scope="module", autouse=True)
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Node]]:
    log = tmp_path_factory.mktemp("serve") / "log"
    with own_network(), two_nodes() as nodes, serving("serve_lmi:app", nodes, log):
        wait_until(both_answer, "both engines answer", START_S)
        yield nodes


def both_answer() -> bool:
    """Whether engines of both nodes answer some requests."""
    with suppress(OSError, HTTPException):
        return {node_of(ask("/ping")) for _ in range(8)} == {HEAD, FURTHER}

    return False


def node_of(response: HTTPResponse) -> str | None:
    response.read()
    return response.getheader(NODE)


def test_the_engines_of_two_nodes_answer_whole_and_in_streams() -> None:
    whole = chat()
    assert whole.status == 200 and text_of(whole) == ANSWER

    stream = chat(stream=True)
    *chunks, done = records(stream)
    assert stream.getheader("content-type") == "text/event-stream" and done == "[DONE]"
    assert joined(chunks) == ANSWER


def test_bad_input_is_refused_in_the_words_of_its_api() -> None:
    response = chat(temperature="hot")
    error = json.loads(response.read())["error"]
    assert response.status == 400
    assert error["param"] == "temperature" and error["type"] == "invalid_request_error"


def test_a_request_whose_client_leaves_is_dropped() -> None:
    before = {node: metric("lmi_generated_tokens_total", node) for node in (HEAD, FURTHER)}
    response = ask(PATH, LONG | STREAM)
    node = response.getheader(NODE)
    assert response.status == 200 and node is not None
    # More than the beginnings of its choices
    response.read(20_000)
    response.close()

    # They are counted when the answer ends.
    def num_tokens() -> float:
        return metric("lmi_generated_tokens_total", node) - before[node]

    wait_until(num_tokens, "its tokens are counted", 30)
    assert num_tokens() < NUM_TOKENS / 2
    wait_until(lambda: not metric("lmi_requests_running", node), "the engine has dropped it", 30)


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
    pids = nodes[1].pids()
    with ThreadPoolExecutor(10) as pool:
        whole = [pool.submit(answer_of, LONG) for _ in range(2)]
        streams = [ask(PATH, LONG | STREAM) for _ in range(4)]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

        lost_s = time.monotonic()
        short = [pool.submit(answer_of, CHAT) for _ in range(8)]
        nodes[1].kill()
        assert [future.result() for future in short] == [(200, HEAD)] * 8
        print(f"all are answered {time.monotonic() - lost_s:.2f} s after the loss")

        assert [future.result()[0] for future in whole] == [200] * 2

    ends = [(stream.getheader(NODE), end_of(stream)) for stream in streams]
    assert {node for node, _ in ends} == {HEAD, FURTHER}
    assert (FURTHER, "engine_lost") in ends and (HEAD, "engine_lost") not in ends, ends


def end_of(stream: HTTPResponse) -> str:
    """The code of the error that has ended a stream, or the reason why its last choice ended."""
    *_, last, done = records(stream)
    assert done == "[DONE]"
    event = json.loads(last)
    return str(event["error"]["code"] if "error" in event else event["choices"][0]["finish_reason"])


def answer_of(body: object) -> tuple[int, str | None]:
    """The status of an answer, and the node that gave it."""
    response = ask(PATH, body)
    return response.status, node_of(response)


def test_a_new_node_takes_up_the_engine_of_the_lost_one(nodes: list[Node]) -> None:
    nodes[1].start().wait_ready()
    joined_s = time.monotonic()
    wait_until(both_answer, "an engine on the new node answers", START_S)
    print(f"an engine answers {time.monotonic() - joined_s:.2f} s after its node came")
    assert chat().status == 200
