"""lmi as an engine of `ray.serve.llm` on two real Ray nodes, behind Ray's own routes."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator

import pytest

from tests.system.container import wait_until
from tests.system.ray_cluster import Node, own_network
from tests.system.ray_serve import (
    ANSWER,
    START_S,
    chat,
    has_ray_serve,
    joined,
    records,
    serving,
    text_of,
    two_nodes,
)

# ray.serve.llm imports all of them.
LIBRARIES = ("vllm", "pyarrow", "jsonref", "typer", "fsspec")
if not has_ray_serve() or not all(map(importlib.util.find_spec, LIBRARIES)):
    pytest.skip(
        "ray[serve] and what ray.serve.llm imports are not installed", allow_module_level=True
    )

pytestmark = pytest.mark.timeout(400)
# The kernel keeps 15 characters of a name
REPLICA = "ray::ServeRepli"


@pytest.fixture(scope="module", autouse=True)
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Node]]:
    log = tmp_path_factory.mktemp("serve") / "log"
    with own_network(), two_nodes() as nodes, serving("serve_llm:app", nodes, log):
        wait_until(lambda: nodes[1].pids(REPLICA), "each node has an engine", START_S)
        yield nodes


def test_rays_routes_answer_whole_and_in_streams() -> None:
    whole = chat()
    assert whole.status == 200 and text_of(whole) == ANSWER

    *chunks, done = records(chat(stream=True))
    assert done == "[DONE]" and joined(chunks) == ANSWER


def test_what_the_engine_refuses_has_its_reason() -> None:
    response = chat(top_k=-7)
    message = json.loads(response.read())["error"]["message"]
    assert response.status == 400 and "top_k must be at least -1, given -7" in message


def test_requests_are_answered_after_a_lost_node_and_a_new_one_takes_up_its_engine(
    nodes: list[Node],
) -> None:
    nodes[1].kill()
    for _ in range(8):
        assert text_of(chat()) == ANSWER

    nodes[1].start().wait_ready()
    wait_until(lambda: nodes[1].pids(REPLICA), "an engine is on the new node", START_S)
    assert text_of(chat()) == ANSWER
