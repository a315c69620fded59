"""An S3 for tests: moto's server in a separate venv, behind a server that fails where a test says
so.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import boto3

from tests.clients.venvs import python_of
from tests.sources.faulty_server import Answer, FaultyServer
from tests.system.container import free_port

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "someone",
    "AWS_SECRET_ACCESS_KEY": "aws-secret-of-someone",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
OF_ONE_CONNECTION = {
    "connection",
    "transfer-encoding",
    "content-length",
    "date",
    "server",
    "keep-alive",
}


@contextmanager
def moto(folder: Path) -> Iterator[int]:
    """Run moto's server on a port of loopback."""
    port = free_port()
    command = [
        str(python_of("moto")),
        "-I",
        "-m",
        "moto.server",
        "-H",
        "127.0.0.1",
        "-p",
        str(port),
    ]
    environ_kept = {
        name: value for name, value in os.environ.items() if name in ("PATH", "LANG", "TMPDIR")
    }
    with open(folder / "moto.log", "wb") as log:
        process = subprocess.Popen(
            command, env=environ_kept | CREDENTIALS | {"HOME": str(folder)}, stdout=log, stderr=log
        )

    try:
        _wait_for(port)
        yield port
    finally:
        process.kill()
        process.wait()


def _wait_for(port: int) -> None:
    deadline_s = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            assert time.monotonic() < deadline_s, "moto's server does not start"
            time.sleep(0.05)


@cache
def _client(port: int) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=f"http://127.0.0.1:{port}",
        aws_access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
        region_name=CREDENTIALS["AWS_DEFAULT_REGION"],
    )


class S3Server(FaultyServer):
    """Passes each request on to moto, except where a test lets it fail."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self._port = port
        self.client = _client(port)

    @property
    def environ(self) -> dict[str, str]:
        return CREDENTIALS | {"AWS_ENDPOINT_URL_S3": self.url}

    def put(self, bucket: str, objects: Mapping[str, bytes]) -> None:
        for key, data in objects.items():
            self.client.put_object(Bucket=bucket, Key=key, Body=data)

    def answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        connection = HTTPConnection("127.0.0.1", self._port, timeout=60)
        try:
            connection.request(method, path, body or None, dict(headers))
            response = connection.getresponse()
            data = response.read()
            headers_sent = {
                name: value
                for name, value in response.getheaders()
                if name.lower() not in OF_ONE_CONNECTION
            }
            if method == "HEAD" and (length := response.getheader("Content-Length")) is not None:
                headers_sent["Content-Length"] = length

            return Answer(response.status, headers_sent, data)
        finally:
            connection.close()
