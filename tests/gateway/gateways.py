"""A gateway in its own process with AWS's own client in front of it, and a container that answers
as a test says.

with scripted(whole(b"hello")) as container, gateway("--endpoint", container.url) as aws:
    aws.runtime.invoke_endpoint(EndpointName="any", Body=b"{}")
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config

from tests.system.container import ENVIRON, ROOT

REGION = "eu-central-1"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "AKIDEXAMPLE", "AWS_SECRET_ACCESS_KEY": "a-secret"}
TIMEOUT_S = 60.0


@dataclass
class Gateway:
    url: str
    log: Path
    process: subprocess.Popen[bytes]
    # Where it serves HTTP/2, if it does.
    http2: str = ""

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def client(self, service: str, region: str = REGION, **credentials: str) -> Any:
        """AWS's client, with only an endpoint URL set. It tries once."""
        arguments = {
            "aws_access_key_id": "AKIDEXAMPLE",
            "aws_secret_access_key": "a-secret",
            **credentials,
        }
        config = Config(
            retries={"total_max_attempts": 1}, read_timeout=TIMEOUT_S, max_pool_connections=64
        )
        return boto3.client(
            service, endpoint_url=self.url, region_name=region, config=config, **arguments
        )

    @cached_property
    def runtime(self) -> Any:
        return self.client("sagemaker-runtime")

    @cached_property
    def control(self) -> Any:
        return self.client("sagemaker")

    def close_clients(self) -> None:
        for name in {"runtime", "control"} & vars(self).keys():
            vars(self)[name].close()

    def invoke(self, body: bytes = b"{}", endpoint: str = "any", **parameters: str) -> Any:
        return self.runtime.invoke_endpoint(EndpointName=endpoint, Body=body, **parameters)

    def stream(self, body: bytes = b"{}", endpoint: str = "any", **parameters: str) -> Any:
        return self.runtime.invoke_endpoint_with_response_stream(
            EndpointName=endpoint, Body=body, **parameters
        )

    def parts(self, body: bytes = b"{}", **parameters: str) -> list[bytes]:
        with closing(self.stream(body, **parameters)["Body"]) as events:
            return [event["PayloadPart"]["Bytes"] for event in events]

    def log_lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def says(self, text: str) -> bool:
        return any(text in line["message"] for line in self.log_lines())


@contextmanager
def gateway(
    *flags: str, environ: Mapping[str, str] | None = None, prefix: Sequence[str] = ()
) -> Iterator[Gateway]:
    """Run `lmi gateway` on a free port until the block ends. `prefix` begins its command."""
    with tempfile.TemporaryDirectory(prefix="lmi-gateway-") as folder:
        log = Path(folder) / "log"
        command = [
            *prefix,
            sys.executable,
            "-P",
            "-m",
            "lmi",
            "gateway",
            "--port",
            "0",
            "--log-format",
            "json",
            *flags,
        ]
        variables = {**ENVIRON, "PYTHONPATH": str(ROOT), "TMPDIR": folder, **(environ or {})}
        with open(log, "wb") as errors:
            process = subprocess.Popen(
                command, env=variables, stdout=subprocess.PIPE, stderr=errors
            )

        assert process.stdout is not None
        with process, process.stdout:
            try:
                line = process.stdout.readline()
                assert line, log.read_text()
                ready = json.loads(line)
                running = Gateway(ready["gateway"], log, process, ready.get("http2", ""))
                yield running
                running.close_clients()
            except BaseException:
                sys.stderr.write(log.read_text())  # pytest shows it
                raise
            finally:
                process.send_signal(signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(60)

                process.kill()


@dataclass
class Seen:
    """A request that a container got."""

    method: str
    path: str
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str | None:
        return next(
            (value for header_name, value in self.headers if header_name.lower() == name.lower()),
            None,
        )


class Talk(BaseHTTPRequestHandler):
    """One connection of a scripted container."""

    protocol_version = "HTTP/1.1"
    server: ScriptedContainer
    seen: Seen

    def do_GET(self) -> None:
        self._answer()

    def do_DELETE(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self.seen = Seen(self.command, self.path, self.headers.items(), body)
        self.close_connection = True
        if self.path == "/ping":
            self.server.ping(self)
        else:
            self.server.seen.append(self.seen)
            self.server.script(self)

    def send(self, data: bytes) -> None:
        self.wfile.write(data)

    def wait_until_left(self) -> None:
        """Wait until the other side closes the connection."""
        self.connection.settimeout(TIMEOUT_S)
        with suppress(ConnectionError):
            assert self.connection.recv(1) == b""

        self.server.left.set()

    def log_message(self, *arguments: object) -> None:
        pass


Script = Callable[[Talk], None]


class ScriptedContainer(ThreadingHTTPServer):
    """A container that answers each invocation, and each /ping, as its script says."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, script: Script, ping: Script, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Talk)
        self.script = script
        self.ping = ping
        self.seen: list[Seen] = []
        self.left = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


def whole(body: bytes, status: int = 200, *headers: str) -> Script:
    lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}", *headers, "", ""]
    return lambda talk: talk.send("\r\n".join(lines).encode("latin-1") + body)


def chunked(*chunks: bytes, end: bytes = b"0\r\n\r\n", pause_s: float = 0.0) -> Script:
    """A streamed answer. Without `end` it is cut there."""

    def answer(talk: Talk) -> None:
        talk.send(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/jsonlines\r\nTransfer-Encoding: "
            b"chunked\r\n\r\n"
        )
        for chunk in chunks:
            talk.send(b"%x\r\n%s\r\n" % (len(chunk), chunk))
            time.sleep(pause_s)

        talk.send(end)

    return answer


def then_silent(script: Script) -> Script:
    """Answer as far as the script goes, then wait until the gateway leaves."""

    def answer(talk: Talk) -> None:
        # It left before the script's end
        with suppress(ConnectionError):
            script(talk)

        talk.wait_until_left()

    return answer


READY = whole(b"")


@contextmanager
def scripted(script: Script, ping: Script = READY, port: int = 0) -> Iterator[ScriptedContainer]:
    container = ScriptedContainer(script, ping, port)
    thread = threading.Thread(target=container.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield container
    finally:
        container.shutdown()
        thread.join()
        container.server_close()
