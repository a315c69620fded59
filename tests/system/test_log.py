"""The log of a whole server, on a disk that is full and with a reader that leaves: the server
serves on.
"""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.machine import measurements, wait_until
from tests.served import Server, launch
from tests.system.container import write_model

LIMIT_BYTES = 256 << 10
TO_LOG = ["sh", "-c", 'exec "$@" >>"$LOG" 2>&1', "sh"]
ON_A_SMALL_DISK = 'mount -t tmpfs -o size=256k tmpfs "$(dirname "$LOG")" && exec "$@" >>"$LOG" 2>&1'
NAMESPACE = ["unshare", "--map-root-user", "--mount"]
LIMITS = {
    "a full disk": [*NAMESPACE, "sh", "-c", ON_A_SMALL_DISK, "sh"],
    "a limit of the size of files": ["prlimit", f"--fsize={LIMIT_BYTES}", *TO_LOG],
}


@contextmanager
def logging_to(path: Path, folder: Path, command_prefix: list[str]) -> Iterator[Server]:
    """A server with two front ends whose standard output and error are at `path`."""
    model = write_model(folder / "model", frontend_workers=2)
    with launch(model, {"LOG": str(path)}, command_prefix) as server:
        server.wait_200()
        server.wait_for_front_ends(2)
        yield server


def fill(server: Server) -> None:
    """Ask for log lines of more than LIMIT_BYTES."""
    for _ in range(2 * LIMIT_BYTES // 1000):
        assert server.request("GET", "/" + "x" * 1000).status == 404


def num_dropped(server: Server) -> float:
    return server.metrics()["lmi_log_lines_dropped_total"]


def processes(server: Server) -> list[int]:
    """All but the engine."""
    return [
        pid for name in ("lmi-supervisor", "lmi-gunicorn", "lmi-front") for pid in server.pids(name)
    ]


def assert_serves_on_without_a_log(server: Server) -> None:
    """Lines are lost and counted, nobody waits for the log, and every process lives but the engine
    that is killed.
    """
    other_processes = processes(server)
    fill(server)
    for measurement in measurements():
        num_before = num_dropped(server)
        with measurement.within(2.0):
            for _ in range(20):
                assert server.request("GET", "/nowhere").status == 404

            assert server.ping() == 200

        wait_until(
            lambda num=num_before + 20: num_dropped(server) >= num, "each of their lines is counted"
        )

    engine = server.lose_engine()
    wait_until(lambda: engine.is_alive and server.ping() == 200, "there is another engine")
    assert server.generate(5).status == 200
    assert processes(server) == other_processes


def assert_ends_in_order(server: Server) -> None:
    server.signal(signal.SIGTERM)
    assert server.wait() == 0
    wait_until(lambda: not server.pids(), "every process is gone")


@pytest.mark.parametrize("kind", LIMITS)
def test_a_log_that_grows_no_further_ends_nothing_and_goes_on_when_there_is_room(
    tmp_path: Path, kind: str
) -> None:
    if "disk" in kind and subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode:
        pytest.skip("this user may not mount a file system of its own")

    (tmp_path / "disk").mkdir()
    with logging_to(tmp_path / "disk" / "log", tmp_path, LIMITS[kind]) as server:
        log = Path(f"/proc/{server.pid('lmi-supervisor')}/root{tmp_path}/disk/log")
        assert_serves_on_without_a_log(server)
        assert log.stat().st_size <= LIMIT_BYTES

        os.truncate(log, 0)

        def is_told() -> bool:
            assert server.request("GET", "/nowhere").status == 404
            return log.read_text().count("lines of this process were dropped here") >= 2

        wait_until(is_told, "both front ends say that lines are missing")
        lines = log.read_text().splitlines()
        whole = [json.loads(line) for line in lines if line.startswith('{"ts"')]

        assert ("GET /nowhere", 404) in [(line["message"], line.get("status")) for line in whole]
        assert len(lines) - len(whole) <= 4, (
            "each process may have begun a line when the room ended"
        )

        assert_ends_in_order(server)


def test_a_pipe_whose_reader_leaves_ends_nothing_and_goes_on_with_the_next_reader(
    tmp_path: Path,
) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with logging_to(tmp_path / "pipe", tmp_path, TO_LOG) as server:
        os.close(reader)
        assert_serves_on_without_a_log(server)

        reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
        heard = b""

        def is_told() -> bool:
            nonlocal heard
            assert server.request("GET", "/nowhere").status == 404

            # A line may come after its answer
            with suppress(BlockingIOError):
                heard += os.read(reader, 65536)

            return heard.count(b"lines of this process were dropped here") >= 2

        wait_until(is_told, "both front ends say that lines are missing")
        assert all(json.loads(line) for line in heard[: heard.rindex(b"\n")].splitlines())

        os.close(reader)
        assert_ends_in_order(server)


def test_a_terminal_that_is_closed_ends_nothing(tmp_path: Path) -> None:
    keyboard, terminal = pty.openpty()
    with logging_to(Path(os.ttyname(terminal)), tmp_path, TO_LOG) as server:
        os.close(terminal)
        os.close(keyboard)
        assert_serves_on_without_a_log(server)
        assert_ends_in_order(server)


CLOSING = """
import os, sys
from djl_python import Output

def handle(inputs):
    if not inputs.is_empty() and inputs.get_as_json().get("close"):
        os.closerange(1, 3)
    print("to standard output")
    print("to standard error", file=sys.stderr)
    return Output().add_as_json({"done": True})
"""


def test_code_that_closes_its_own_output_answers_on(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.py").write_text(CLOSING)
    (folder / "serving.properties").write_text("log_format=json\n")
    with launch(folder) as server:
        server.wait_ready()
        [code] = server.pids("lmi-code")
        for body in ({}, {"close": True}, {}, {}):
            assert json.loads(server.post(body).body) == {"done": True}

        assert server.pids("lmi-code") == [code]

        assert_ends_in_order(server)
