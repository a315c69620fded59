"""`docker build` with the settings that this machine needs to reach its package index, and that no layer may keep.

The settings of the host's pip (its files and PIP_ variables) go into the build as one pip.conf, and the certificates
that the host trusts as another file. Both are build secrets. Folders of packages that the host's pip looks into are
served on the loopback while the build runs. On a host without any of these the build is a plain `docker build`.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit
from urllib.request import url2pathname

ROOT = Path(__file__).resolve().parents[2]
TARGETS = ("cpu", "vllm", "trtllm")
MARK = "lmi-build-secret"  # a comment in each secret, by which a check finds one in the image
CA_VARIABLES = ("PIP_CERT", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE")
SYSTEM_CA_BUNDLE = "/etc/ssl/certs/ca-certificates.crt"
PROXY_VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy")
KEPT = ("index-url", "no-index", "trusted-host", "default-timeout", "timeout", "retries", "proxy")
LISTS = ("extra-index-url", "find-links")


@dataclass(frozen=True)
class Docker:
    """The client, and the daemon that it talks to."""

    client: str = "docker"
    host: str | None = None
    is_own: bool = False  # `own_docker` started the daemon, which has only the host's network

    def command(self, *words: str) -> list[str]:
        return [self.client, *(["--host", self.host] if self.host else []), *words]

    def run(self, *words: str, **options) -> subprocess.CompletedProcess:
        """Run one command of the client, and keep its output as text."""
        return subprocess.run(self.command(*words), **{"capture_output": True, "text": True} | options)

    def ask(self, *words: str) -> str:
        """The output of a command, which must succeed."""
        done = self.run(*words)
        if done.returncode:
            raise RuntimeError(f"docker {' '.join(words)}: {done.stderr.strip()}")
        return done.stdout.strip()


def build(docker: Docker, tag: str, target: str, base: str | None = None) -> int:
    """Build the image and print Docker's output as it comes. Returns Docker's exit code."""
    labels = {"version": _version(), "revision": _revision()}
    arguments = {"BASE_IMAGE": base} if base else {}
    arguments |= {name: os.environ[name] for name in PROXY_VARIABLES if name in os.environ}
    if index := os.environ.get("LMI_TORCH_INDEX_URL"):
        arguments["TORCH_INDEX_URL"] = index
    with build_secrets() as (secrets, has_loopback):
        words = ["build", "--tag", tag, "--target", target]
        words += [f"--secret=id={name},src={path}" for name, path in secrets.items()]
        words += [f"--label=org.opencontainers.image.{name}={value}" for name, value in labels.items()]
        words += [f"--build-arg={name}={value}" for name, value in arguments.items()]
        if has_loopback or docker.is_own:
            words.append("--network=host")
        environ = os.environ | {"DOCKER_BUILDKIT": "1"}
        return docker.run(*words, str(ROOT), capture_output=False, env=environ).returncode


@contextmanager
def build_secrets() -> Iterator[tuple[dict[str, Path], bool]]:
    """Yield the file of each secret by name, and whether one of them names the loopback of this machine."""
    settings = pip_settings()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lmi-secrets-")))
        lines = [f"{key} = {settings[key]}" for key in KEPT if key in settings]
        has_loopback = False
        for key in LISTS:
            places = settings.get(key, "").split()
            urls = [stack.enter_context(_served(place)) if _local(place) else place for place in places]
            has_loopback |= any(map(_local, places))
            if urls:
                lines.append(f"{key} = {' '.join(filter(None, urls))}")
        secrets = {}
        if bundle := ca_bundle(settings):
            secrets["ca_bundle"] = folder / "ca_bundle"
            secrets["ca_bundle"].write_text(f"# {MARK}\n{bundle.read_text()}")
            lines.append("cert = /run/secrets/ca_bundle")
        if lines:
            secrets["pip_conf"] = folder / "pip_conf"
            secrets["pip_conf"].write_text("\n".join([f"# {MARK}", "[global]", *lines, ""]))
        yield secrets, has_loopback


def pip_settings() -> dict[str, str]:
    """The host's settings of pip by key. Its environment overrides its files."""
    done = subprocess.run(
        [shutil.which("python3") or sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True
    )
    found: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in done.stdout.splitlines():
        if match := re.fullmatch(r"(global|install|:env:)\.([\w-]+)=('.*'|\".*\")", line):
            found[match[1]][match[2]] = ast.literal_eval(match[3])
    return found["global"] | found["install"] | found[":env:"]


def ca_bundle(settings: dict[str, str]) -> Path | None:
    """The file of certificates that the host trusts, if it has one."""
    named = [settings.get("cert"), *map(os.environ.get, CA_VARIABLES), SYSTEM_CA_BUNDLE]
    return next((Path(name) for name in named if name and Path(name).is_file()), None)


def _local(place: str) -> Path | None:
    """The folder of a place to find packages, or None if the place is on another machine."""
    if place.startswith("file:"):
        return Path(url2pathname(urlsplit(place).path))
    return None if "://" in place else Path(place).expanduser()


@contextmanager
def _served(place: str) -> Iterator[str | None]:
    """Serve a folder and yield its URL, or None if it does not exist. An index (file:…) may link to its siblings."""
    folder = _local(place)
    if folder is None or not folder.is_dir():
        yield None
        return
    root, rest = (folder.parent, folder.name) if place.startswith("file:") else (folder, "")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(root))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/{rest}"
        finally:
            server.shutdown()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Drop the log."""


def _version() -> str:
    match = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    return match[1] if match else "unknown"


def _revision() -> str:
    done = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"
