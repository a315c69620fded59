"""The server that is loaded: one that runs already, or one that is started here."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import urlopen

from scripts.benchmarks import servers
from scripts.benchmarks.table import ROOT
from scripts.benchmarks.vllm_servers import ENVIRON

LMI_ENVIRON = {  # flags win over it
    "echo": {"OPTION_ROLLING_BATCH": "echo", "OPTION_ECHO_STEP_MS": "60"},  # slow enough for busy cores
    "demo": {},
    "35M": {},
}
KINDS = [*LMI_ENVIRON, "vllm"]
READY_S = 300.0  # vLLM compiles first


@dataclass(frozen=True)
class Target:
    host: str
    port: int
    health: str  # a path
    model: str  # what a body of OpenAI's API names
    pid: int | None = None

    def roles(self) -> dict[int, str]:
        return {pid: "server" for pid in servers.family(self.pid)} if self.pid else {}


@contextmanager
def started(kind: str, flags: Sequence[str]) -> Iterator[Target]:
    """Start a server of one of `KINDS` with more flags of its command, and end it with the block."""
    port = servers.free_port()
    place = ["--host", "127.0.0.1", "--port", str(port)]
    if kind == "vllm":
        command = [sys.executable, "-m", "scripts.benchmarks.vllm_serve", "serve", model_35m()]
        command += [*place, "--served-model-name", "bench", *flags]
    else:
        command = [sys.executable, "-m", "lmi", "serve", model_35m() if kind == "35M" else "demo", *place]
        command += ["--log-level", "WARNING", "--set", "trust_fairness_id=true", *flags]
    with servers.process(command, port, ENVIRON | LMI_ENVIRON.get(kind, {}), "/health", READY_S) as server:
        yield running(f"http://127.0.0.1:{port}", pid=server.process.pid)


def running(url: str, model: str = "", pid: int | None = None) -> Target:
    """A server that runs. Its health is at the first of the usual paths that is 200."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        raise ValueError(f"the URL must be http://HOST:PORT, given {url}")
    root = f"http://{parts.netloc}"
    health = next((path for path in ("/ping", "/health", "/v1/models") if _get(root + path) is not None), "/ping")
    listed = json.loads(_get(f"{root}/v1/models") or b"{}").get("data") or [{"id": ""}]
    return Target(parts.hostname, parts.port or 80, health, model or listed[0]["id"], pid)


def model_35m() -> str:
    """The folder of the model, which is made once: a process makes it, so that torch stays out of the driver's."""
    folder = ROOT / "build" / "overload" / "35M"
    if not (folder / "config.json").exists():
        print("making the model ...", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "scripts.benchmarks.vllm_model", folder, "35M"], check=True, cwd=ROOT)
    return str(folder)


def _get(url: str) -> bytes | None:
    try:
        with urlopen(url, timeout=10) as response:
            body: bytes = response.read()
            return body
    except HTTPError:
        return None
