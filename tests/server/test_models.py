"""`/models` of a server with one model."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from lmi.server.model_registry import NO_MEMORY
from tests.scripted import Host, host


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with host(tmp_path_factory.mktemp("one")) as running:
        yield running


def test_the_only_model_is_listed_and_described_as_the_reference_does(server: Host) -> None:
    path = server.config.model.path
    response, body = server.send("GET", "/models")
    assert response.status == 200
    assert json.loads(body) == {"models": [{"modelName": "scripted", "modelUrl": path, "status": "READY"}]}
    [workflow] = json.loads(server.send("GET", "/models/scripted")[1])
    assert (workflow["workflowName"], workflow["version"]) == ("scripted", "1")
    [model] = workflow["models"]
    assert (model["modelName"], model["modelUrl"], model["status"]) == ("scripted", path, "READY")
    [group] = model["workerGroups"]
    assert (group["device"]["deviceType"], group["minWorkers"], group["maxWorkers"]) == ("cpu", 1, 1)
    assert [(worker["id"], worker["status"]) for worker in group["workers"]] == [(1, "READY")]


@pytest.mark.parametrize(("method", "path"), [("POST", "/models"), ("DELETE", "/models/scripted")])
def test_one_model_stays_and_the_answer_says_what_switches_more_on(server: Host, method: str, path: str) -> None:
    response, body = server.send(method, path, b'{"model_name": "a", "url": "/opt/ml/models/a"}')
    assert response.status == 404
    assert "multi_model=true or SAGEMAKER_MULTI_MODEL=true" in json.loads(body)["error"]


def test_another_model_and_another_method_are_refused(server: Host) -> None:
    assert server.send("GET", "/models/other")[0].status == 404
    response, _ = server.send("PATCH", "/models/scripted")
    assert response.status == 405
    assert set(str(response.getheader("allow")).split(", ")) == {"DELETE", "GET", "HEAD"}


@pytest.mark.parametrize(
    "reason",
    [
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
        "engine 0 died 3 times, the last time it MemoryError: no room",
        "/m: vLLM cannot start: Free memory on device cuda:0 (3/80 GiB) on startup is less than desired",
        "No available memory for the cache blocks",
        "was killed by SIGKILL, which the kernel also does when memory runs out",
        "[Errno 12] Cannot allocate memory",
    ],
)
def test_an_engine_that_lacks_memory_is_recognised_by_what_it_says(reason: str) -> None:
    assert NO_MEMORY.search(reason)
