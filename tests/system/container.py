"""`lmi serve` as a platform runs it: a process with a port, signals, logs and an exit code.

Each of its processes inherits a mark in its environment, so a test can find all of them and check
that none is left.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from lmi.runtime import Runtime, ServerRuntime
from lmi.shared.processes import descendants, title
from lmi.shared.state import Block, EngineRecord, Phase
from tests import machine
from tests.machine import WAIT_S, wait_until
from tests.scripted import write_byte_tokenizer

ENGINES = Path(__file__).parent / "engines"
ROOT = Path(__file__).parents[2]
# A busy machine takes long to import torch
START_TIMEOUT_S = 180.0
PING_TIMEOUT_S = 10.0
# Below those that the kernel gives to whoever asks for any
PORTS = range(15_000, 32_000)
MAX_LOG_LINES = 100  # in an account
# As before vllm, in another test of this process, wrote into it
ENVIRON = dict(os.environ)
# Of tests/conftest.py; an engine sets it itself
ENVIRON.pop("VLLM_CONFIGURE_LOGGING", None)


def write_model(folder: Path, **options: object) -> Path:
    """Write a folder to serve: a tokenizer of bytes, a config.json and a serving.properties for the
    echo engine.
    """
    write_byte_tokenizer(folder)
    (folder / "config.json").write_text(
        json.dumps({"vocab_size": 257, "max_position_embeddings": 100_000})
    )
    settings = {"option.rolling_batch": "echo", "log_format": "json", **options}
    lines = [f"{key}={value}" for key, value in settings.items()]
    (folder / "serving.properties").write_text("\n".join(lines) + "\n")
    return folder


def free_port() -> int:
    """A port on which nobody listens, and which the kernel gives to nobody before a server of the
    test listens.
    """
    while True:
        with (
            suppress(OSError),
            socket.create_server(("127.0.0.1", secrets.choice(PORTS))) as listener,
        ):
            return int(listener.getsockname()[1])


def wait_within(bound_s: float, condition: Callable[[], Any], what: str) -> None:
    """Poll until `condition` is true, within a bound that a test checks; time in which cores were
    short is extra.
    """
    started_s = machine.own_s()
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        is_late = machine.own_s() - started_s > bound_s or time.monotonic() > deadline_s
        assert not is_late, f"within {bound_s} s it did not happen that {what}"
        time.sleep(0.02)


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes
    # The connection ended where HTTP ends it, not in the middle
    is_whole: bool = True

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.body.splitlines()]


@dataclass
class Container:
    folder: Path
    log: Path
    port: int = field(default_factory=free_port)
    environ: dict[str, str] = field(default_factory=dict)
    command_prefix: list[str] = field(default_factory=list)
    # A file to write to instead of the log
    stderr: str | None = None
    python: str = sys.executable
    last_ping: str = field(default="none", init=False)

    def start(self, from_its_folder: bool = False) -> Container:
        self.mark = uuid.uuid4().hex
        paths = [str(ENGINES), str(ROOT), ENVIRON.get("PYTHONPATH", "")]
        environ = {
            **ENVIRON,
            "LMI_TEST_MARK": self.mark,
            "PYTHONPATH": ":".join(filter(None, paths)),
            **self.environ,
        }
        words = [
            "serve",
            "." if from_its_folder else str(self.folder),
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
        ]
        command = [*self.command_prefix, self.python, "-P", "-m", "lmi", *words]
        with open(self.stderr or self.log, "ab") as errors, open(self.log, "ab") as output:
            self.process = subprocess.Popen(
                command,
                env=environ,
                stdout=output,
                stderr=errors,
                # not a session: Linux may keep one from the cores for seconds while another spins
                process_group=0,
                cwd=self.folder if from_its_folder else None,
            )

        machine.SERVERS.append(self)
        return self

    def start_and_wait(self, from_its_folder: bool = False) -> Container:
        """Start, and wait until /ping is 200 and every front end that serving.properties asks for
        takes requests.
        """
        self.start(from_its_folder)
        self.wait_200()
        if match := re.search(
            r"^frontend_workers=(\d+)$",
            (self.folder / "serving.properties").read_text(),
            re.MULTILINE,
        ):
            self.wait_for_front_ends(int(match[1]))

        return self

    def wait_200(self) -> None:
        """Wait until /ping is 200; fail if the server ends."""
        wait_until(
            lambda: self.ping() == 200 or self.process.poll() is not None,
            "the server got ready",
            START_TIMEOUT_S,
        )
        assert self.process.poll() is None, self.account()

    # Requests to it.

    def request(
        self, method: str, path: str, body: object = None, timeout_s: float = 30.0
    ) -> Answer:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, path, data)
            response = connection.getresponse()
            heard = b""
            is_whole = True
            try:
                while piece := response.read1(65536):
                    heard += piece
            except (HTTPException, OSError):
                is_whole = False

            return Answer(
                response.status,
                {name.lower(): value for name, value in response.getheaders()},
                heard,
                is_whole,
            )
        finally:
            connection.close()

    def ping(self) -> int:
        """The status of /ping, or 0 if no server answers."""
        started_s = time.monotonic()
        status = 0
        try:
            answer = self.request("GET", "/ping", timeout_s=PING_TIMEOUT_S)
            status = answer.status
            last_answer = f"{answer.status} {answer.body!r}"
        except (OSError, HTTPException) as error:
            last_answer = repr(error)

        self.last_ping = f"{last_answer} after {time.monotonic() - started_s:.2f} s"
        return status

    def generate(self, num_tokens: int, prompt: str = "abc", stream: bool = True) -> Answer:
        parameters = {"max_new_tokens": num_tokens}
        return self.request(
            "POST", "/invocations", {"inputs": prompt, "parameters": parameters, "stream": stream}
        )

    def metric(self, name: str) -> float:
        for line in self.request("GET", "/metrics").body.decode().splitlines():
            if line.startswith((name + " ", name + "{")):
                return float(line.rsplit(" ", 1)[1])

        raise AssertionError(f"/metrics has no {name}")

    # Its processes.

    def block(self) -> Block:
        """The shared memory with the records of its supervisor and front ends."""
        [folder] = Path(self.environ["TMPDIR"]).glob("lmi-*")
        return ServerRuntime.at(folder).attach()

    def wait_for_front_ends(self, number: int) -> None:
        """Wait until so many front ends take requests."""
        frontends = self.block().frontends
        wait_until(
            lambda: sum(record.beat_s > 0 for record in frontends) == number,
            f"{number} front ends serve",
            60.0,
        )

    def engines(self) -> list[EngineRecord]:
        """The records of the engines of its first model."""
        [folder] = Path(self.environ["TMPDIR"]).glob("lmi-*/1")
        return Runtime.at(folder).attach().engines

    def pids(self, name: str = "") -> list[int]:
        """Live processes of this container whose name begins with `name`."""
        descriptors = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdigit() and self._owns(entry):
                    if (entry / "comm").read_text().startswith(name):
                        descriptors.append(int(entry.name))

        return sorted(descriptors)

    def _owns(self, process: Path) -> bool:
        try:
            return self.mark.encode() in (process / "environ").read_bytes()
        except PermissionError:
            # Processes with secrets show their environment only to root
            pid = int(process.name)
            is_alive = "State:\tZ" not in (process / "status").read_text()
            family = (
                (self.process.pid, *descendants(self.process.pid))
                if title(pid).startswith("lmi-")
                else ()
            )
            return is_alive and pid in family

    def pid(self, name: str) -> int:
        wait_until(lambda: len(self.pids(name)) == 1, f"there is one {name}")
        return self.pids(name)[0]

    def signal(self, signum: signal.Signals) -> None:
        self.process.send_signal(signum)

    def drain(self) -> None:
        """Send SIGTERM to a server with open requests, and wait until it takes no new ones."""
        supervisor = self.block().supervisor
        self.signal(signal.SIGTERM)
        wait_until(lambda: supervisor.phase == Phase.DRAINING, "the server drains")

    def lose_engine(self, slot: int = 0) -> EngineRecord:
        """Kill an engine and wait until the server knows that it is lost. Returns its record."""
        record = self.engines()[slot]
        num_starts = record.num_starts
        os.kill(record.pid, signal.SIGKILL)
        wait_until(
            lambda: record.num_starts > num_starts or not record.is_alive, "the engine is lost"
        )
        return record

    def wait(self, timeout_s: float = WAIT_S) -> int:
        """Wait for its end. Returns its exit code."""
        wait_until(lambda: self.process.poll() is not None, "the server ended", timeout_s)
        return self.process.wait()

    def wait_within(self, bound_s: float) -> int:
        """Wait for its end, within a bound that the test checks. Returns its exit code."""
        wait_within(bound_s, lambda: self.process.poll() is not None, "the server ended")
        return self.process.wait()

    def account(self) -> str:
        """What is known of it, for the message of a test that fails."""
        code = self.process.poll()
        state = "runs" if code is None else f"ended with {code}"
        lines = self.log.read_text(errors="replace").splitlines() if self.log.is_file() else []
        head = (
            f"--- the server on port {self.port} {state}; its last /ping: {self.last_ping}; "
            f"its "
            f"log:"
        )
        return "\n".join([head, *lines[-MAX_LOG_LINES:]])

    def last_words(self) -> dict[str, Any]:
        last: dict[str, Any] = json.loads(self.log.read_text().splitlines()[-1])
        return last

    def kill(self) -> None:
        if self in machine.SERVERS:
            machine.SERVERS.remove(self)

        while pids := self.pids():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

            time.sleep(0.01)

        self.process.wait()
