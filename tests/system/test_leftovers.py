"""What a killed server leaves, and how a health check finds a server that runs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.served import Server
from tests.system.container import ENVIRON, ROOT, free_port, wait_until, write_model

Make = Callable[..., Server]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """A function that makes servers that share one folder for temporary files."""
    servers: list[Server] = []

    def make(**options: object) -> Server:
        folder = write_model(tmp_path / f"model-{len(servers)}", **options)
        servers.append(
            Server(folder, tmp_path / f"log-{len(servers)}", free_port(), {"TMPDIR": temporary})
        )
        return servers[-1]

    with ExitStack() as folders:
        temporary = folders.enter_context(tempfile.TemporaryDirectory(prefix="lmi-"))
        yield make
        for started in servers:
            started.kill()


def folder_of(server: Server) -> Path:
    """The runtime folder of a server, found by its port."""
    [folder_found] = (
        url.parent
        for url in Path(server.environ["TMPDIR"]).glob("lmi-*/url")
        if url.read_text().endswith(f":{server.port}")
    )
    return folder_found


def test_the_folder_of_a_killed_server_is_removed_and_that_of_a_running_one_stays(
    make: Make,
) -> None:
    killed = make()
    neighbour = make()
    for server in (killed, neighbour):
        server.start_and_wait()

    old = folder_of(killed)
    kept_folder = folder_of(neighbour)
    foreign = old.with_name("lmi-of_somebody_else")
    foreign.mkdir()
    link = old.with_name("lmi-link")
    link.symlink_to(old)
    for pid in killed.pids():
        os.kill(pid, signal.SIGKILL)

    wait_until(lambda: not killed.pids(), "every process is gone")
    killed.process.wait()
    assert old.is_dir()

    new = make().start_and_wait()
    assert (
        not old.exists() and kept_folder.is_dir() and foreign.is_dir() and folder_of(new).is_dir()
    )
    assert f"removed {old}" in new.log.read_text()
    assert neighbour.generate(3).status == new.generate(3).status == 200


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_the_folder_of_another_users_killed_server_stays(make: Make) -> None:
    server = make()
    folder = Path(server.environ["TMPDIR"]) / "lmi-other"
    folder.mkdir()
    (folder / "url").write_text("http://127.0.0.1:1")
    os.chown(folder, 65534, 65534)
    server.start_and_wait()
    assert folder.is_dir()


HOST = {"host": "127.0.0.1"}
PLACES: dict[str, Callable[[int], tuple[dict[str, object], dict[str, str], list[str]]]] = {
    "serving.properties": lambda port: ({**HOST, "port": port}, {}, []),
    "a variable": lambda port: (HOST, {"SERVING_PORT": str(port)}, []),
    "SageMaker's variable": lambda port: (HOST, {"SAGEMAKER_BIND_TO_PORT": str(port)}, []),
    "a flag": lambda port: (HOST, {}, ["--port", str(port)]),
    "nowhere, any free one": lambda port: ({**HOST, "port": 0}, {}, []),
}


@pytest.mark.parametrize("place", PLACES)
def test_the_health_check_finds_the_port_wherever_it_was_set(place: str, tmp_path: Path) -> None:
    options, variables, flags = PLACES[place](free_port())
    folder = write_model(tmp_path / "model", **options)
    with tempfile.TemporaryDirectory(prefix="lmi-") as temporary:
        environ = {**ENVIRON, "TMPDIR": temporary, "http_proxy": "http://127.0.0.1:1", **variables}
        assert not is_healthy(environ)

        command = [sys.executable, "-P", "-m", "lmi", "serve", str(folder), *flags]
        with subprocess.Popen(
            command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as server:
            try:
                wait_until(lambda: is_healthy(environ), "it is healthy")
            finally:
                server.send_signal(signal.SIGINT)

        assert not is_healthy(environ)


def is_healthy(environ: dict[str, str]) -> bool:
    """What the image's health check says."""
    [words] = re.findall(
        r"^HEALTHCHECK .*\\\n +CMD (.*)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE
    )
    command = [sys.executable, *json.loads(words)[1:]]
    return subprocess.run(command, env=environ, capture_output=True, check=False).returncode == 0
