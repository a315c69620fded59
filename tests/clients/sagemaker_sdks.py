"""The SageMaker SDKs' own `deploy()` at the gateway's control plane: `scripts/sagemaker-sdks
[KIND…]`.

Versions 2 and 3 of the SDK, unchanged, deploy the built-in demo model in each way that their
ModelBuilder has, call the endpoint, update it and delete everything. They find the gateway by the
variables that AWS's clients read. Where they ask huggingface.co themselves, a proxy of this machine
answers with the files of the demo model, and refuses every other host; S3 and STS are moto's.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3

from tests.clients.venvs import ROOT, VENVS
from tests.gateway.gateways import gateway
from tests.sources.faulty_server import Answer
from tests.sources.hub_server import HubServer
from tests.sources.s3_server import CREDENTIALS, S3Server, moto
from tests.system.container import free_port

SDKS = {"2": "sagemaker==2.257.7", "3": "sagemaker==3.27.0"}
# The classes of version 2 that deploy without a ModelBuilder.
CLASSES = (
    "Model",
    "HuggingFaceModel",
    "DJLModel",
    "AsyncInferenceConfig",
    "ResourceRequirements",
)
ALL = (
    *(("2", kind) for kind in (*CLASSES, "DJL_SERVING", "TGI")),
    *(("3", kind) for kind in ("VLLM", "SGLANG", "VLLM_OMNI", "LLAMACPP", "DJL_SERVING", "TGI")),
)
# Version 2 waits for what CloudWatch has of an endpoint.
LOG_GROUPS = (
    "/aws/sagemaker/Endpoints/sdk2-djl-serving",
    "/aws/sagemaker/Endpoints/sdk2-tgi",
)
DEMO = ROOT / "handlers" / "lmi_dist" / "demo"
REPOSITORY = "lmi/demo"
# Where the SDKs look whether a name is one of JumpStart's models.
JUMPSTART = "jumpstart-cache-prod-us-east-1"
MANIFESTS = ("models_manifest.json", "proprietary-sdk-manifest.json")
# They need one.
OTHER = {"model_id": "none", "version": "1.0.0", "min_version": "2.0.0", "spec_key": "none"}
# The default bucket of the SDKs.
BUCKET = "sagemaker-us-east-1-123456789012"
HUB = "huggingface.co"
# The SDKs do not ask it at the endpoint of the variables.
STS = "sts.us-east-1.amazonaws.com"
# Version 3 took 14 minutes with pip on two cores that had other work
INSTALL_TIMEOUT_S = 3600
RUN_TIMEOUT_S = 400
MAX_ERROR_CHARS = 1500
SCRIPTS = Path(__file__).parent / "scripts" / "gateway"


def python_of(major: str) -> Path:
    """Return the interpreter of a venv with this version of the SDK and all that it requires."""
    venv = VENVS / f"sagemaker-{major}"
    python = venv / "bin" / "python"
    stamp = venv / "lmi-stamp"
    if stamp.is_file() and stamp.read_text() == SDKS[major]:
        return python

    shutil.rmtree(venv, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    # Only a part of what they require is ever imported, so nothing is compiled
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    command = [*pip, "install", "-qq", "--no-compile"]
    if (uv := shutil.which("uv")) is not None:
        command = [uv, "pip", "install", "-q", "--python", str(python)]

    subprocess.run([*command, SDKS[major]], check=True, timeout=INSTALL_TIMEOUT_S)
    stamp.write_text(SDKS[major])
    return python


class Hub(HubServer):
    """A hub that has the demo model, and the two pages that the SDKs read of a model."""

    def answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        if path == f"/api/models/{REPOSITORY}":
            page = {"id": REPOSITORY, "pipeline_tag": "text-generation", "tags": []}
            return Answer(200, json.dumps(page).encode())

        return super().answer(method, path.replace("/raw/", "/resolve/"), headers, body)


class Tunnel(BaseHTTPRequestHandler):
    """One connection of the proxy: to the hub, or refused."""

    server: Proxy

    def do_CONNECT(self) -> None:
        host = self.path.rpartition(":")[0]
        self.server.asked.add(host)
        if host not in self.server.ports:
            self.send_error(403)
            return

        self.send_response(200)
        self.end_headers()
        with (
            self.server.context.wrap_socket(self.connection, server_side=True) as client,
            socket.create_connection(("127.0.0.1", self.server.ports[host])) as hub,
        ):
            back = threading.Thread(target=_pass_on, args=(hub, client), daemon=True)
            back.start()
            _pass_on(client, hub)
            back.join()

    def log_message(self, *arguments: object) -> None:
        pass


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)

    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)


class Proxy(ThreadingHTTPServer):
    """A proxy to servers of this machine by the names of other hosts, with a certificate in
    `folder`.
    """

    daemon_threads = True

    def __init__(self, ports: Mapping[str, int], folder: Path) -> None:
        super().__init__(("127.0.0.1", free_port()), Tunnel)
        self.ports = ports
        self.asked: set[str] = set()
        self.certificate = folder / "hub.crt"
        key = folder / "hub.key"
        new = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2"
        hosts = ",".join(f"DNS:{host}" for host in ports)
        names = f"-subj /CN={HUB} -addext subjectAltName={hosts}"
        files = ["-keyout", str(key), "-out", str(self.certificate)]
        subprocess.run([*f"{new} {names}".split(), *files], check=True, capture_output=True)
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.load_cert_chain(self.certificate, key)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def running(server: ThreadingHTTPServer) -> Iterator[None]:
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def place(folder: Path) -> Iterator[dict[str, str]]:
    """Run the gateway with hub, proxy and S3. Yields the variables with which an SDK finds them."""
    with ExitStack() as stack:
        hub = stack.enter_context(Hub())
        hub.publish(REPOSITORY, {file.name: file.read_bytes() for file in DEMO.iterdir()})
        moto_port = stack.enter_context(moto(folder))
        s3_url = f"http://127.0.0.1:{moto_port}"
        with S3Server(moto_port) as s3:
            s3.client.create_bucket(Bucket=JUMPSTART)
            s3.put(JUMPSTART, dict.fromkeys(MANIFESTS, json.dumps([OTHER]).encode()))

        logs = boto3.client(
            "logs",
            endpoint_url=s3_url,
            region_name="us-east-1",
            aws_access_key_id="any",
            aws_secret_access_key="any",
        )
        for group in LOG_GROUPS:
            logs.create_log_group(logGroupName=group)

        proxy = Proxy({HUB: int(hub.url.rpartition(":")[2]), STS: moto_port}, folder)
        stack.enter_context(running(proxy))
        environ = {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "hub"), **CREDENTIALS}
        flags = ["--control-dir", str(folder / "control"), "--s3-endpoint", s3_url]
        flags += ["--bucket", BUCKET, "--async-bucket", BUCKET]
        aws = stack.enter_context(gateway(*flags, environ=environ))
        yield {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "TMPDIR": str(folder),
            "HTTPS_PROXY": proxy.url,
            "HTTP_PROXY": proxy.url,
            "NO_PROXY": "127.0.0.1",
            "SSL_CERT_FILE": str(proxy.certificate),
            "AWS_CA_BUNDLE": str(proxy.certificate),
            "AWS_ENDPOINT_URL": s3_url,
            "AWS_ENDPOINT_URL_SAGEMAKER": aws.url,
            "AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME": aws.url,
            # Only an account has roles.
            "SAGEMAKER_VALIDATE_ROLE": "false",
            **CREDENTIALS,
        }
        print("refused by the gateway, or without an effect:")
        for text in sorted(
            {line["message"] for line in aws.log_lines() if line["level"] != "INFO"}
        ):
            print(f"  {text}")

        print(f"asked by the SDKs beside it: {sorted(proxy.asked)}")


def deploy(major: str, kind: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """Let an SDK deploy in one way. Returns what its script printed, or {"error": …}."""
    script = SCRIPTS / f"deploy_sagemaker{major}.py"
    command = [str(python_of(major)), "-I", str(script), kind, REPOSITORY]
    with tempfile.TemporaryDirectory(dir=environ["TMPDIR"]) as folder:
        done = subprocess.run(
            command, cwd=folder, env=environ, capture_output=True, text=True, timeout=RUN_TIMEOUT_S
        )

    if done.returncode:
        return {"error": done.stderr[-MAX_ERROR_CHARS:]}

    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def row_of(major: str, kind: str, result: Mapping[str, Any]) -> str:
    """Return the row that docs/sagemaker.md has for what was run. Raises AssertionError for an
    answer or an update that is not there.
    """
    assert result["answer"]["generated_text"], result
    assert result["was_updated"] and result["instances"] == 2, result
    image = result["image"].partition("/")[2].partition("-gpu")[0]
    builder = "" if kind in CLASSES else "ModelBuilder, "
    return f"| {SDKS[major].replace('==', ' ')} | {builder}`{kind}` | `{image}` |"


def main() -> int:
    parser = argparse.ArgumentParser(description="\n".join(str(__doc__).splitlines()[3:]))
    parser.add_argument("kinds", nargs="*", help="2:TGI, 3:VLLM …; all by default")
    wanted = parser.parse_args().kinds or [f"{sdk}:{kind}" for sdk, kind in ALL]
    num_failed = 0
    with tempfile.TemporaryDirectory(prefix="lmi-sdks-") as folder, place(Path(folder)) as environ:
        for major, kind in ALL:
            if f"{major}:{kind}" not in wanted:
                continue

            result = deploy(major, kind, environ)
            if "error" in result:
                num_failed += 1
                print(f"sagemaker {major} {kind} failed: {result['error']}", flush=True)
            else:
                print(row_of(major, kind, result), flush=True)

    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
