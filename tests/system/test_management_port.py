"""A server with a port for management beside that for inference."""

from __future__ import annotations

from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import pytest

from tests.machine import wait_until
from tests.served import Server, launch
from tests.system.container import free_port, write_model

OF_BOTH = [
    "GET /ping",
    "GET /healthz",
    "GET /readyz",
    "GET /livez",
    "GET /version",
    "GET /pages/docs.js",
]
# Which the playground reads too
OF_BOTH += ["GET /openapi.json"]
OF_MANAGEMENT = ["GET /metrics", "GET /docs", "GET /load", "GET /server_info", "GET /adapters"]
OF_MANAGEMENT += ["POST /v1/load_lora_adapter", "GET /models/model/adapters/a"]
OF_INFERENCE = [
    "GET /playground",
    "GET /v1/models",
    "GET /models",
    "POST /invocations",
    "POST /v1/completions",
]


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, int]]:
    port = free_port()
    folder = write_model(
        tmp_path_factory.mktemp("ports") / "model", management_port=port, frontend_workers=1
    )
    with launch(folder) as server:
        server.wait_200()
        yield server, port


def status(port: int, asked: str) -> int:
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(*asked.split())
        return connection.getresponse().status
    finally:
        connection.close()


def test_each_port_answers_what_belongs_to_it(ports: tuple[Server, int]) -> None:
    server, management = ports
    for path in OF_BOTH:
        assert (status(server.port, path), status(management, path)) == (200, 200), path

    for path in OF_MANAGEMENT:
        assert status(server.port, path) == 404 != status(management, path), path

    for path in OF_INFERENCE:
        assert status(management, path) == 404 != status(server.port, path), path


def test_models_come_and_go_at_the_management_port(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    write_model(tmp_path / "store" / "fox")
    (tmp_path / "serving.properties").write_text(
        f"multi_model=true\nmodel_store={tmp_path / 'store'}\nmanagement_port={(port := free_port())}\n"  # noqa: E501
        "frontend_workers=1\nlog_format=json\n"
    )
    with launch(tmp_path) as server:
        server.wait_200()
        load = "POST", f"/models?model_name=fox&url={tmp_path / 'store' / 'fox'}"

        assert status(server.port, " ".join(load)) == 404 and status(port, " ".join(load)) == 200
        assert status(port, "GET /models") == 404 and status(server.port, "GET /models/fox") == 200
        assert (
            status(server.port, "DELETE /models/fox") == 404
            and status(port, "DELETE /models/fox") == 200
        )


def test_a_server_that_ends_closes_both_ports(tmp_path: Path) -> None:
    port = free_port()
    with launch(
        write_model(tmp_path / "model", management_port=port, frontend_workers=1)
    ) as server:
        server.wait_200()
        assert status(port, "GET /ping") == 200

        server.process.terminate()
        assert server.wait(60) == 0

        with pytest.raises(ConnectionRefusedError):
            status(port, "GET /ping")

    wait_until(lambda: not server.pids(), "no process is left")
