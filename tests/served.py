"""A whole server as a test meets it: `lmi serve` in processes of its own, on a port of its own, over real sockets.

    with serve(folder, "--frontend-workers", "2") as server:
        answer = server.post({"inputs": "The quick"})
        wait_until(lambda: server.metrics()["lmi_requests_running"] == 0)

`folder` holds the model and its serving.properties; `echo_folder` makes one for the engine without a model. What the
server prints lies in `server.stdout` and `server.stderr`. It is gone when the block ends, whatever happened in it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.scripted import wait_until, write_byte_tokenizer

BIN = Path(sys.executable).parent
TIMEOUT_S = 60.0  # for whatever a test waits for; a busy machine imports torch in half of it
CONTEXT_LENGTH = 4096
# What would change a server's settings, or its engine's, behind the back of a test.
FOREIGN = ("OPTION_", "SERVING_", "SAGEMAKER_", "HF_", "LMI_", "GUNICORN_", "TENSOR_PARALLEL", "PYTEST_")


@dataclass(frozen=True)
class Answer:
    """A response that was read to its end."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def fields(self) -> dict[str, Any]:
        fields = json.loads(self.body)
        assert isinstance(fields, dict)
        return fields


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    port: int
    stdout: Path
    stderr: Path

    def send(
        self,
        method: str,
        path: str,
        body: bytes | Iterable[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> Answer:
        """One request on a connection of its own."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            connection.request(method, path, body, dict(headers or {}))
            response = connection.getresponse()
            return Answer(response.status, response.headers, response.read())
        finally:
            connection.close()

    def post(self, body: object, path: str = "/invocations", headers: Mapping[str, str] | None = None) -> Answer:
        """Bytes as they are, anything else as JSON, without a content type unless `headers` has one."""
        return self.send("POST", path, body if isinstance(body, bytes) else json.dumps(body).encode(), headers)

    @contextmanager
    def open(self, body: object) -> Iterator[HTTPResponse]:
        """A response whose head has come, its body still to be read. Leaving closes the connection at once."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)
        try:
            connection.request("POST", "/invocations", json.dumps(body).encode())
            with connection.getresponse() as response:
                yield response
        finally:
            connection.close()

    def connect(self, body: object) -> socket.socket:
        """A connection on which a request has been sent and nothing has been read."""
        data = json.dumps(body).encode()
        connection = socket.create_connection(("127.0.0.1", self.port), TIMEOUT_S)
        connection.sendall(b"POST /invocations HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
        return connection

    def ping(self) -> int:
        """The status of /ping, 0 where nobody answers."""
        try:
            return self.send("GET", "/ping", timeout_s=5).status
        except OSError:
            return 0

    def metrics(self) -> dict[str, float]:
        """Samples by name, with labels as in `lmi_requests_total{code="200"}`."""
        text = self.send("GET", "/metrics").body.decode()
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return {
            sample.name + "".join(f'{{{name}="{value}"}}' for name, value in sample.labels.items()): sample.value
            for sample in samples
        }

    def is_idle(self) -> bool:
        """Whether no request is anywhere in the server and none holds a block of the cache."""
        metrics = self.metrics()
        gauges = ("requests_in_flight", "requests_running", "requests_waiting", "kv_cache_usage_ratio")
        return all(metrics[f"lmi_{name}"] == 0 for name in gauges)

    def log(self) -> list[dict[str, Any]]:
        """Every line of the log, which must be JSON."""
        return [json.loads(line) for line in self.stderr.read_text().splitlines()]

    def pids(self, title: str) -> list[int]:
        """Processes of this server by the name that they gave themselves: lmi-engine-0, lmi-front-1, lmi-gunicorn."""
        return [pid for pid in descendants(self.process.pid) if _title(pid) == title]

    def wait(self, timeout_s: float = TIMEOUT_S) -> int:
        """The exit code."""
        return self.process.wait(timeout_s)

    def wait_ready(self) -> None:
        """Until /ping says 200 and the banner is out."""
        wait_until(lambda: self.process.poll() is not None or (self.stdout.stat().st_size and self.ping() == 200), 120)
        assert self.process.poll() is None, self.stderr.read_text()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextmanager
def launch(
    *argv: str | Path,
    env: Mapping[str, str] | None = None,
    port: int | None = None,
    preexec: Callable[[], None] | None = None,
    stderr: str | Path | None = None,
) -> Iterator[Server]:
    """Start a console script of this package; not waited for. `port` None: flags for a free one are added."""
    with tempfile.TemporaryDirectory(prefix="lmi-served-") as name:
        folder = Path(name)
        flags = []
        if port is None:
            port = free_port()
            flags = ["--host", "127.0.0.1", "--port", str(port)]
        out, err = folder / "stdout", Path(stderr or folder / "stderr")
        with out.open("wb") as out_file, err.open("wb") as err_file:
            process = subprocess.Popen(
                [BIN / argv[0], *argv[1:], *flags],
                cwd=folder,
                env=environment(env or {}),
                stdin=subprocess.DEVNULL,
                stdout=out_file,
                stderr=err_file,
                preexec_fn=preexec,
            )
        server = Server(process, port, out, err)
        try:
            yield server
        finally:
            server.stop()


@contextmanager
def serve(folder: Path, *flags: str, env: Mapping[str, str] | None = None) -> Iterator[Server]:
    """A server that is ready."""
    with launch("lmi", "serve", folder, *flags, env=env) as server:
        server.wait_ready()
        yield server


def environment(changes: Mapping[str, str]) -> dict[str, str]:
    """This process's own environment without what would configure a server; one thread for each engine."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    return {**own, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **changes}


def echo_folder(folder: Path, **options: object) -> Path:
    """A folder for the engine `echo`, whose tokens are the bytes of the prompt; `options` go to its properties."""
    write_byte_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({"vocab_size": 257, "max_position_embeddings": CONTEXT_LENGTH}))
    write_properties(folder, **{"option.rolling_batch": "echo", **options})
    return folder


def write_properties(folder: Path, **properties: object) -> None:
    lines = [f"{key}={value}" for key, value in properties.items()]
    (folder / "serving.properties").write_text("\n".join(lines) + "\n")


def free_port() -> int:
    """A port that nobody listens on, below those that the kernel gives to clients."""
    while True:
        port = random.randrange(15000, 32000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def descendants(pid: int) -> list[int]:
    """Every process below `pid`; those that end meanwhile may be among them."""
    parents = dict(filter(None, map(_pid_and_parent, Path("/proc").iterdir())))
    found = [pid]
    for parent in found:
        found += [child for child, its_parent in parents.items() if its_parent == parent]
    return found[1:]


def _pid_and_parent(entry: Path) -> tuple[int, int] | None:
    if not entry.name.isdigit():
        return None
    try:
        return int(entry.name), int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def resident_bytes(pid: int) -> int:
    """Memory that a process holds now."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """How many seconds a call took, and what it returned."""
    started_s = time.monotonic()
    result = call()
    return time.monotonic() - started_s, result
