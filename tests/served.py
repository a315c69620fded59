"""A whole server as its clients see it: a `Container` with the calls that tests of requests need.

    with serve(folder, "frontend_workers=2") as server:
        answer = server.post({"inputs": "The quick"})
        wait_until(server.is_idle, "every request is over")

`folder` holds a checkpoint; each setting is a line of serving.properties, written to a folder
beside it.
"""

from __future__ import annotations

import json
import os
import re
import select
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.system.container import Answer, Container, free_port, wait_until

TIMEOUT_S = 60.0
QUIET = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
GAUGES = (
    "requests_in_flight",
    "sequences_in_flight",
    "requests_running",
    "requests_waiting",
    "kv_cache_usage_ratio",
    "request_body_bytes",
)


@dataclass
class Server(Container):
    def wait_ready(self) -> None:
        self.wait_200()
        wait_until(
            lambda: re.search('"event":"ready"|^  curl ', self.log.read_text(), re.MULTILINE),
            "it says so",
        )

    def post(
        self, body: object, path: str = "/invocations", headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Send bytes as they are and any other body as JSON, without a content type unless
        `headers` has one.
        """
        with self.open(body, path, headers) as response:
            received = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, received, response.read())

    @contextmanager
    def open(
        self,
        body: object,
        path: str = "/invocations",
        headers: Mapping[str, str] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> Iterator[HTTPResponse]:
        """A response whose head has come and whose body is still to be read. Leaving closes the
        connection at once.
        """
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection = HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            connection.request("POST", path, data, dict(headers or {}))
            with connection.getresponse() as response:
                yield response
        finally:
            connection.close()

    def connect_raw(self, receive_bytes: int | None = None) -> socket.socket:
        """A connection on which nothing is sent. `receive_bytes`: room in the kernel for unread
        bytes.
        """
        connection = socket.socket()
        if receive_bytes is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)

        connection.settimeout(TIMEOUT_S)
        connection.connect(("127.0.0.1", self.port))
        return connection

    def connect(
        self, body: object, receive_bytes: int | None = None, path: str = "/invocations"
    ) -> socket.socket:
        """A connection on which a request is sent and nothing is read."""
        connection = self.connect_raw(receive_bytes)
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        return connection

    def metrics(self) -> dict[str, float]:
        """Samples by name, with labels as in `lmi_requests_total{code="200"}`, but without that of
        the only model.
        """
        text = self.request("GET", "/metrics").body.decode()
        samples = [
            sample for family in text_string_to_metric_families(text) for sample in family.samples
        ]
        return {
            sample.name
            + "".join(
                f'{{{name}="{value}"}}' for name, value in sample.labels.items() if name != "model"
            ): sample.value
            for sample in samples
        }

    def is_idle(self) -> bool:
        """Whether the server holds no request and no block of the cache."""
        metrics = self.metrics()
        return all(metrics[f"lmi_{name}"] == 0 for name in GAUGES)

    def log_lines(self) -> list[dict[str, Any]]:
        """Every whole line that the server wrote; each must be a JSON object."""
        return [json.loads(line) for line in self.log.read_bytes().split(b"\n")[:-1] if line]


@contextmanager
def launch(
    folder: Path,
    environ: Mapping[str, str] | None = None,
    command_prefix: Sequence[str] = (),
    port: int | None = None,
) -> Iterator[Server]:
    """Start `lmi serve folder` and do not wait for it. `command_prefix`: the words of a command
    that runs a command.

    Without `port` it has a free one.
    """
    with tempfile.TemporaryDirectory(prefix="lmi-served-") as name:
        runtime = Path(name) / "tmp"
        runtime.mkdir()
        server = Server(
            folder,
            Path(name) / "log",
            port or free_port(),
            environ={**QUIET, "TMPDIR": str(runtime), **(environ or {})},
            command_prefix=list(command_prefix),
        )

        try:
            server.start()
            yield server
        except BaseException as error:
            error.add_note(server.account())  # pytest shows it
            raise
        finally:
            server.kill()


@contextmanager
def serve(
    folder: Path, *settings: str, environ: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """A server that is ready, with the checkpoint of `folder`."""
    with tempfile.TemporaryDirectory(prefix="lmi-settings-") as name:
        lines = [f"option.model_id={folder}", "log_format=json", *settings]
        (Path(name) / "serving.properties").write_text("\n".join(lines) + "\n")
        with launch(Path(name), environ) as server:
            server.wait_ready()
            yield server


def readable(connections: Sequence[socket.socket]) -> list[socket.socket]:
    """Those that have something to read, or have ended. Unlike select(2), poll(2) knows descriptors
    over 1023.
    """
    poll = select.poll()
    for connection in connections:
        poll.register(connection, select.POLLIN)

    readable = {fd for fd, _ in poll.poll(0)}
    return [connection for connection in connections if connection.fileno() in readable]


def resident_bytes(pid: int) -> int:
    """The memory of a process now, in bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """The duration of a call in seconds, and its result."""
    started_s = time.monotonic()
    result = call()
    return time.monotonic() - started_s, result
