"""`docker build` with the settings that this machine needs to reach its package index, and that no
layer may keep.

The settings of the host's pip (its files and PIP_ variables) go into the build as one pip.conf, and
the certificates that the host trusts as another file. Both are build secrets. Folders of packages
that the host's pip looks into are served on the loopback while the build runs. On a host without
any of these the build is a plain `docker build`.
"""

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit
from urllib.request import url2pathname

ROOT = Path(__file__).resolve().parents[2]
TARGETS = ("cpu", "torch", "vllm", "trtllm")
# Of the others: as the Dockerfile says
BASES = {"trtllm": "nvcr.io/nvidia/tensorrt-llm/release:1.2.1"}
# A comment in each secret, by which a check finds one in the image
MARK = "lmi-build-secret"
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
    # `own_docker` started the daemon, which has only the host's network
    is_own: bool = False

    def command(self, *words: str) -> list[str]:
        return [self.client, *(["--host", self.host] if self.host else []), *words]

    def run(self, *words: str, **options) -> subprocess.CompletedProcess:
        """Run one command of the client, and keep its output as text."""
        return subprocess.run(
            self.command(*words), **{"capture_output": True, "text": True} | options
        )

    def ask(self, *words: str) -> str:
        """The output of a command, which must succeed."""
        done = self.run(*words)
        if done.returncode:
            raise RuntimeError(f"docker {' '.join(words)}: {done.stderr.strip()}")

        return done.stdout.strip()


def build(docker: Docker, tag: str, target: str, base: str | None = None) -> int:
    """Build the image and print Docker's output as it comes. Returns Docker's exit code."""
    with build_secrets() as (secrets, has_loopback):
        sources = [f"id={name},src={path}" for name, path in secrets.items()]
        words = _words(tag, target, base, sources, has_loopback or docker.is_own)
        environ = os.environ | {"DOCKER_BUILDKIT": "1"}
        if _names_torch_index(target):
            environ["TORCH_INDEX_URL"] = os.environ["LMI_TORCH_INDEX_URL"]

        return docker.run(*words, capture_output=False, env=environ).returncode


def shown(tag: str, target: str, base: str | None = None) -> str:
    """The command of `build`, for a shell. Secrets, and whatever may hold a password, are only
    names in it.
    """
    settings = pip_settings()
    names = secret_names(settings)
    words = _words(
        tag, target, base, [f"id={name},src={name}" for name in names], _has_loopback(settings)
    )
    index = 'TORCH_INDEX_URL="$LMI_TORCH_INDEX_URL" ' if _names_torch_index(target) else ""
    command = f"DOCKER_BUILDKIT=1 {index}{shlex.join(['docker', *words])}"
    origin = (
        "# The secrets are files that scripts/build-image writes from the settings of this "
        "host's pip."
    )
    return f"{origin}\n{command}" if names else command


def _words(
    tag: str, target: str, base: str | None, secrets: Iterable[str], is_host_network: bool
) -> list[str]:
    """The words after `docker`. An argument without a value has that of the variable of
    its name.
    """
    base = base or BASES.get(target)
    arguments = [f"BASE_IMAGE={base}"] if base else []
    arguments += [name for name in PROXY_VARIABLES if name in os.environ]
    arguments += ["TORCH_INDEX_URL"] if _names_torch_index(target) else []
    labels = {"version": _version(), "revision": _revision()}
    words = ["build", "--tag", tag, "--target", target]
    words += [f"--secret={secret}" for secret in secrets]
    words += [f"--label=org.opencontainers.image.{name}={value}" for name, value in labels.items()]
    words += [f"--build-arg={argument}" for argument in arguments]
    words += ["--network=host"] if is_host_network else []
    return [*words, str(ROOT)]


def _names_torch_index(target: str) -> bool:
    return target == "torch" and bool(os.environ.get("LMI_TORCH_INDEX_URL"))


@contextmanager
def build_secrets() -> Iterator[tuple[dict[str, Path], bool]]:
    """Yield the file of each secret by name, and whether one of them names the loopback of this
    machine.
    """
    settings = pip_settings()
    names = secret_names(settings)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lmi-secrets-")))
        secrets = {name: folder / name for name in names}
        if bundle := ca_bundle(settings):
            secrets["ca_bundle"].write_text(f"# {MARK}\n{bundle.read_text()}")

        if "pip_conf" in secrets:
            lines = [f"# {MARK}", "[global]", *_pip_lines(settings, stack), ""]
            secrets["pip_conf"].write_text("\n".join(lines))

        yield secrets, _has_loopback(settings)


def secret_names(settings: dict[str, str]) -> list[str]:
    """The secrets that a build gets from these settings of pip."""
    has_bundle = ca_bundle(settings) is not None
    has_settings = any(key in settings for key in KEPT) or any(
        _places(settings, key) for key in LISTS
    )
    return ["ca_bundle", "pip_conf"] if has_bundle else ["pip_conf"] if has_settings else []


def _pip_lines(settings: dict[str, str], stack: ExitStack) -> list[str]:
    """The settings for the build, with its folders served until the stack closes."""
    lines = [f"{key} = {settings[key]}" for key in KEPT if key in settings]
    for key in LISTS:
        urls = [
            stack.enter_context(_served(place)) if _local(place) else place
            for place in _places(settings, key)
        ]
        lines += [f"{key} = {' '.join(urls)}"] if urls else []

    return lines + ["cert = /run/secrets/ca_bundle"] if ca_bundle(settings) else lines


def _has_loopback(settings: dict[str, str]) -> bool:
    return any(_local(place) for key in LISTS for place in _places(settings, key))


def _places(settings: dict[str, str], key: str) -> list[str]:
    """The places of a list of packages, without the folders that do not exist."""
    places = settings.get(key, "").split()
    return [place for place in places if (folder := _local(place)) is None or folder.is_dir()]


def pip_settings() -> dict[str, str]:
    """The host's settings of pip by key. Its environment overrides its files."""
    done = subprocess.run(
        [shutil.which("python3") or sys.executable, "-m", "pip", "config", "list"],
        capture_output=True,
        text=True,
    )
    settings: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in done.stdout.splitlines():
        if match := re.fullmatch(r"(global|install|:env:)\.([\w-]+)=('.*'|\".*\")", line):
            settings[match[1]][match[2]] = ast.literal_eval(match[3])

    return settings["global"] | settings["install"] | settings[":env:"]


def ca_bundle(settings: dict[str, str]) -> Path | None:
    """The file of certificates that the host trusts, if it has one."""
    candidates = [settings.get("cert"), *map(os.environ.get, CA_VARIABLES), SYSTEM_CA_BUNDLE]
    return next((Path(name) for name in candidates if name and Path(name).is_file()), None)


def _local(place: str) -> Path | None:
    """The folder of a place to find packages, or None if the place is on another machine."""
    if place.startswith("file:"):
        return Path(url2pathname(urlsplit(place).path))

    return None if "://" in place else Path(place).expanduser()


@contextmanager
def _served(place: str) -> Iterator[str]:
    """Serve a folder and yield its URL. An index (file:…) may link to its siblings."""
    folder = _local(place)
    assert folder is not None
    root, path_after = (folder.parent, folder.name) if place.startswith("file:") else (folder, "")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(root))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/{path_after}"
        finally:
            server.shutdown()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Drop the log."""


def _version() -> str:
    match = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    return match[1] if match else "unknown"


def _revision() -> str:
    if shutil.which("git") is None:
        return "unknown"

    done = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True
    )
    return done.stdout.strip() or "unknown"
