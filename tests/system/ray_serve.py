"""The applications of examples/ray_serve on two Ray nodes, each a separate `ray start` on this
machine in a network of its own.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse
from importlib.metadata import PackageNotFoundError, distribution, requires
from pathlib import Path

from packaging.requirements import Requirement

from tests.system.container import ENVIRON, ROOT, wait_until
from tests.system.ray_cluster import ENVIRONMENT, PATHS, Node

EXAMPLE = ROOT / "examples" / "ray_serve"
SERVE = (sys.executable, "-P", "-m", "ray.serve.scripts")
HEAD = "127.0.0.2"
FURTHER = "127.0.0.3"
# Nobody else is in their network.
RAY_PORT = 6379
PORT = 8000
START_S = 150.0
PATH = "/v1/chat/completions"
CHAT = {
    "model": "demo",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
}
ANSWER = "The capital of France is Paris."


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


@contextmanager
def two_nodes() -> Iterator[list[Node]]:
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


@contextmanager
def serving(application: str, nodes: list[Node], log: Path) -> Iterator[None]:
    """What `serve run` runs, with an engine on each node."""
    environ = {**ENVIRON, **ENVIRONMENT, "PYTHONPATH": PATHS, "RAY_ADDRESS": nodes[0].head}
    with log.open("wb") as output:
        address = ["--http-host", "127.0.0.1", "--http-port", str(PORT)]
        start = [*SERVE, "start", "--proxy-location", "HeadOnly", *address]
        subprocess.run(start, env=environ, stdout=output, stderr=output, check=True)
        folders = ["--working-dir", str(EXAMPLE), "--app-dir", str(EXAMPLE)]
        run = [*SERVE, "run", *folders, application, "model=demo", "replicas=2"]
        process = subprocess.Popen(run, env=environ, stdout=output, stderr=output)

    try:
        wait_until(lambda: answers() or process.poll() is not None, "it answers", START_S)
        assert process.poll() is None, log.read_text()
        yield
    finally:
        process.terminate()
        process.wait(60)


def answers() -> bool:
    with suppress(OSError, HTTPException):
        response = ask(PATH, CHAT)
        response.read()
        return response.status == 200

    return False


def ask(path: str, body: object = None) -> HTTPResponse:
    """Send a request, and return the response when its head has come."""
    connection = HTTPConnection("127.0.0.1", PORT, timeout=120)
    method = "GET" if body is None else "POST"
    text = None if body is None else json.dumps(body)
    headers = {"connection": "close", "content-type": "application/json"}
    connection.request(method, path, text, headers)
    return connection.getresponse()


def chat(**changes: object) -> HTTPResponse:
    return ask(PATH, CHAT | changes)


def text_of(response: HTTPResponse) -> str:
    """The text of a whole answer."""
    [choice] = json.loads(response.read())["choices"]
    return str(choice["message"]["content"])


def records(response: HTTPResponse) -> list[str]:
    """The data of the server-sent events of a stream."""
    return [event.removeprefix("data: ") for event in response.read().decode().split("\n\n")[:-1]]


def joined(chunks: list[str]) -> str:
    """The text of the chunks of a stream."""
    deltas = [json.loads(chunk)["choices"][0]["delta"] for chunk in chunks]
    return "".join(delta["content"] for delta in deltas)
