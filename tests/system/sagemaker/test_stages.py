"""The stages of a start: each shows in `/ping`, and SIGTERM ends a server in every one of them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from lmi.settings.served_folder import demo_folder
from tests.machine import measurements
from tests.served import Server, launch
from tests.sources.hub_server import HubServer
from tests.system.container import ROOT, wait_until, write_model
from tests.wheels import write_wheel

HANDLER = """
import one
from djl_python import Output

def handle(inputs):
    return None if inputs.is_empty() else Output().add_as_json({"version": one.VERSION})
"""
SLOW = """
from time import sleep

def handle(inputs):
    sleep(60)
"""
WARNED = """
import sys
from lmi.supervisor import supervisor
from lmi.cli import main

supervisor.WARN_AFTER_S = 0.5
main(sys.argv[1:])
"""


def ping(server: Server) -> dict[str, object]:
    answer: dict[str, object] = json.loads(server.request("GET", "/ping").body)
    return answer


def needs_a_package(folder: Path, *, has_wheel: bool) -> Path:
    """A folder with user code that imports what its requirements.txt names."""
    write_model(folder)
    (folder / "model.py").write_text(HANDLER)
    (folder / "requirements.txt").write_text("one\n")
    if has_wheel:
        write_wheel(folder / "requirements", "one")

    return folder


@pytest.fixture
def silent_index() -> Iterator[str]:
    """An index that takes connections and never answers."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/simple"


def environ(tmp_path: Path, **more: str) -> dict[str, str]:
    return {
        "SERVING_DOWNLOAD_DIR": str(tmp_path / "downloads"),
        "SERVING_LOG_FORMAT": "json",
        **more,
    }


def test_a_server_installs_what_its_user_code_needs_before_it_starts(tmp_path: Path) -> None:
    folder = needs_a_package(tmp_path / "model", has_wheel=True)
    # The second start uses what the first installed
    for _ in range(2):
        with launch(folder, environ(tmp_path, HF_HUB_OFFLINE="1")) as server:
            server.wait_ready()
            assert json.loads(server.post({}).body) == {"version": "1.0"}
            log = server.log.read_text()

    assert "installing what" not in log


def test_requirements_that_cannot_be_installed_end_the_start_with_pips_last_error(
    tmp_path: Path,
) -> None:
    folder = needs_a_package(tmp_path / "model", has_wheel=False)
    (folder / "requirements").mkdir()
    with launch(folder, environ(tmp_path, HF_HUB_OFFLINE="1")) as server:
        assert server.wait(60) == 4
        words = server.last_words()
        assert (
            words["stage"] == "requirements"
            and "ERROR: No matching distribution" in words["message"]
        )


def installs_first(folder: Path) -> Path:
    """A model whose engines, and so its front ends, wait for what its requirements.txt names."""
    folder.mkdir()
    write_model(folder, **{"option.trust_remote_code": "true"})
    (folder / "requirements.txt").write_text("one\n")
    write_wheel(folder / "requirements", "one")
    return folder


def test_a_tokenizer_that_a_waiting_front_end_cannot_load_ends_the_start_with_one_line(
    tmp_path: Path,
) -> None:
    folder = installs_first(tmp_path / "model")
    (folder / "tokenizer.json").write_text("no JSON")
    with launch(folder, environ(tmp_path, HF_HUB_OFFLINE="1")) as server:
        assert server.wait(60) == 4
        assert "tokenizer.json" in server.last_words()["message"]
        assert (
            '"event":"ready"' not in server.log.read_text()
            and "Traceback" not in server.log.read_text()
        )


def in_download(tmp_path: Path, hub: HubServer, index: str) -> tuple[Path, dict[str, str], str]:
    hub.publish(
        "owner/model",
        {path.name: path.read_bytes() for path in demo_folder().iterdir() if path.is_file()},
    )
    hub.hold("GET .*safetensors", after=1000, times=9)
    return (
        Path("owner/model"),
        {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0"},
        "download",
    )


def in_requirements(tmp_path: Path, hub: HubServer, index: str) -> tuple[Path, dict[str, str], str]:
    folder = needs_a_package(tmp_path / "model", has_wheel=False)
    return (
        folder,
        {"PIP_INDEX_URL": index, "PIP_TIMEOUT": "60", "HF_HUB_OFFLINE": "0"},
        "requirements",
    )


def slow_model(folder: Path) -> Path:
    write_model(folder)
    (folder / "model.py").write_text(SLOW)
    return folder


def in_load(tmp_path: Path, hub: HubServer, index: str) -> tuple[Path, dict[str, str], str]:
    return slow_model(tmp_path / "model"), {}, "initialise"


@pytest.mark.parametrize("begin", [in_download, in_requirements, in_load])
def test_sigterm_ends_every_stage_within_two_seconds_and_with_0(
    begin, tmp_path: Path, silent_index: str
) -> None:  # type: ignore[no-untyped-def]
    with HubServer() as hub:
        folder, more, stage = begin(tmp_path, hub, silent_index)
        for measurement in measurements():
            with launch(folder, environ(tmp_path, **more)) as server:
                wait_until(
                    lambda: server.ping() == 503 and stage in str(ping(server)["stage"]),
                    f"it is in {stage}",
                )
                with measurement.within(2.5):
                    server.signal(signal.SIGTERM)
                    assert server.wait() == 0

                assert server.pids() == []


def test_a_second_sigterm_ends_a_drain_with_143(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    body = {"inputs": "a", "parameters": {"max_new_tokens": 90_000}, "stream": True}
    for measurement in measurements():
        with launch(tmp_path / "model", environ(tmp_path)) as server:
            server.wait_ready()
            with server.open(body) as stream:
                stream.read(10)
                server.drain()
                with measurement.within(2.5):
                    server.signal(signal.SIGTERM)
                    assert server.wait() == 143


@pytest.mark.parametrize(
    ("variable", "is_warned"), [("SAGEMAKER_SUBMIT_DIRECTORY", True), ("OTHER", False)]
)
def test_a_slow_start_on_sagemaker_warns_once_and_goes_on(
    tmp_path: Path, variable: str, is_warned: bool
) -> None:
    folder = slow_model(tmp_path / "model")
    log = tmp_path / "log"
    own_environ = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        variable: "x",
        **environ(tmp_path, TMPDIR=str(tmp_path)),
    }
    with log.open("wb") as output:
        server = subprocess.Popen(
            [sys.executable, "-c", WARNED, "serve", str(folder), "--port", "0"],
            env=own_environ,
            stderr=output,
        )

    try:
        line = "ContainerStartupHealthCheckTimeoutInSeconds"
        wait_until(lambda: "starts as process" in log.read_text(), "it loads")
        if is_warned:
            wait_until(lambda: line in log.read_text(), "it warns")
        else:
            # Three times the budget
            time.sleep(1.5)

        assert log.read_text().count(line) == is_warned and server.poll() is None
    finally:
        server.terminate()
        assert server.wait(60) == 0
