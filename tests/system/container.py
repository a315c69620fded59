"""`lmi serve` as a platform runs it: a process with a port, signals, logs and an exit code.

Each of its processes inherits a mark in its environment, so a test can find all of them and check that none is left.
"""

from __future__ import annotations

import json
import os
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
from lmi.shared.state import Block, EngineRecord
from tests.scripted import write_byte_tokenizer

ENGINES = Path(__file__).parent / "engines"
ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 30.0
ENVIRON = dict(os.environ)  # as before vllm, in another test of this process, wrote into it


def write_model(folder: Path, **options: object) -> Path:
    """Write a folder to serve: a tokenizer of bytes, a config.json and a serving.properties for the echo engine."""
    write_byte_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({"vocab_size": 257, "max_position_embeddings": 100_000}))
    settings = {"option.rolling_batch": "echo", "log_format": "json", **options}
    lines = [f"{key}={value}" for key, value in settings.items()]
    (folder / "serving.properties").write_text("\n".join(lines) + "\n")
    return folder


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = 15.0) -> float:
    """Poll until `condition` is true; return the seconds that it took."""
    started_s = time.monotonic()
    while not condition():
        assert time.monotonic() - started_s < timeout_s, f"in {timeout_s} s it did not happen that {what}"
        time.sleep(0.02)
    return time.monotonic() - started_s


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes
    is_whole: bool = True  # the connection ended where HTTP ends it, not in the middle

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
    stderr: str | None = None  # a file to write to instead of the log

    def start(self, from_its_folder: bool = False) -> Container:
        self.mark = uuid.uuid4().hex
        paths = [str(ENGINES), str(ROOT), ENVIRON.get("PYTHONPATH", "")]
        environ = {
            **ENVIRON,
            "LMI_TEST_MARK": self.mark,
            "PYTHONPATH": ":".join(filter(None, paths)),
            **self.environ,
        }
        what = ["serve", "." if from_its_folder else str(self.folder), "--host", "127.0.0.1", "--port", str(self.port)]
        command = [*self.command_prefix, sys.executable, "-P", "-m", "lmi", *what]
        with open(self.stderr or self.log, "ab") as errors, open(self.log, "ab") as output:
            self.process = subprocess.Popen(
                command,
                env=environ,
                stdout=output,
                stderr=errors,
                start_new_session=True,
                cwd=self.folder if from_its_folder else None,
            )
        return self

    def start_and_wait(self, from_its_folder: bool = False) -> Container:
        self.start(from_its_folder)
        wait_until(
            lambda: self.ping() == 200 or self.process.poll() is not None, "the server got ready", START_TIMEOUT_S
        )
        assert self.process.poll() is None, self.log.read_text()
        return self

    # Requests to it.

    def request(self, method: str, path: str, body: object = None, timeout_s: float = 30.0) -> Answer:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, path, data)
            response = connection.getresponse()
            heard, is_whole = b"", True
            try:
                while piece := response.read1(65536):
                    heard += piece
            except (HTTPException, OSError):
                is_whole = False
            return Answer(
                response.status, {name.lower(): value for name, value in response.getheaders()}, heard, is_whole
            )
        finally:
            connection.close()

    def ping(self) -> int:
        """The status of /ping, or 0 if no server answers."""
        with suppress(OSError, HTTPException):
            return self.request("GET", "/ping", timeout_s=2.0).status
        return 0

    def generate(self, num_tokens: int, prompt: str = "abc", stream: bool = True) -> Answer:
        parameters = {"max_new_tokens": num_tokens}
        return self.request("POST", "/invocations", {"inputs": prompt, "parameters": parameters, "stream": stream})

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
        wait_until(lambda: sum(record.beat_s > 0 for record in frontends) == number, f"{number} front ends serve", 60.0)

    def engines(self) -> list[EngineRecord]:
        """The records of the engines of its first model."""
        [folder] = Path(self.environ["TMPDIR"]).glob("lmi-*/1")
        return Runtime.at(folder).attach().engines

    def pids(self, name: str = "") -> list[int]:
        """Live processes of this container whose name begins with `name`."""
        found = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdigit() and self.mark.encode() in (entry / "environ").read_bytes():
                    if (entry / "comm").read_text().startswith(name):
                        found.append(int(entry.name))
        return sorted(found)

    def pid(self, name: str) -> int:
        wait_until(lambda: len(self.pids(name)) == 1, f"there is one {name}")
        return self.pids(name)[0]

    def signal(self, signum: signal.Signals) -> None:
        self.process.send_signal(signum)

    def wait(self, timeout_s: float = 15.0) -> int:
        return self.process.wait(timeout_s)

    def last_words(self) -> dict[str, Any]:
        last: dict[str, Any] = json.loads(self.log.read_text().splitlines()[-1])
        return last

    def kill(self) -> None:
        while pids := self.pids():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        self.process.wait()
