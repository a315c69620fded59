"""How long a newcomer waits: for `pip install` of the wheel, and for the first answer of
`scripts/serve` in a checkout.

Packages are cached: everything is installed once before.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from http.client import HTTPConnection
from pathlib import Path

from scripts.benchmarks.servers import free_port, process
from scripts.benchmarks.table import ROOT


def measure() -> dict[str, float]:
    """Do everything twice, and return the figures of the second time."""
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel = new_wheel(folder)
        for place in ("first", "again"):
            figures |= install_wheel(wheel, folder / place)

        paths = {"serve_pip_s": path_without_uv()}
        if shutil.which("uv"):
            paths["serve_uv_s"] = os.environ["PATH"]

        for figure, path in paths.items():
            environ = {**os.environ, "PATH": path}
            for place in ("first", "again"):
                figures[figure] = first_answer_s(folder / figure / place, environ)

    return figures


def install_wheel(wheel: Path, venv: Path) -> dict[str, float]:
    """Make a venv, and return the time until the wheel is installed and what it adds."""
    start_s = time.monotonic()
    run(sys.executable, "-m", "venv", venv)
    empty_mb = size_mb(venv)
    run(venv / "bin" / "pip", "install", "-q", "--disable-pip-version-check", wheel)
    seconds = time.monotonic() - start_s
    return {"wheel_install_s": seconds, "wheel_mb": size_mb(venv) - empty_mb}


def path_without_uv() -> str:
    """Return PATH without the folders that have uv."""
    folders = os.environ["PATH"].split(":")
    return ":".join(folder for folder in folders if not Path(folder, "uv").exists())


def new_wheel(folder: Path) -> Path:
    """Build the wheel of this checkout."""
    pip_wheel = [sys.executable, "-m", "pip", "wheel", "-q", "--disable-pip-version-check"]
    run(*pip_wheel, "--no-deps", "-w", folder, ROOT)
    return next(folder.glob("*.whl"))


def first_answer_s(checkout: Path, environ: Mapping[str, str]) -> float:
    """Copy the checkout without what was installed or built, and return the time of `scripts/serve`
    to an answer.
    """
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    for name in tracked.split("\0")[:-1]:
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, checkout / name)

    port = free_port()
    command = [
        str(checkout / "scripts" / "serve"),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--log-level",
        "WARNING",
    ]
    start_s = time.monotonic()
    with process(command, port, environ=environ):
        connection = HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request(
            "POST",
            "/invocations",
            json.dumps({"inputs": "Hello"}),
            {"Content-Type": "application/json"},
        )
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"/invocations said {response.status}: {response.read()!r}")

        response.read()
        took_s = time.monotonic() - start_s
        connection.close()

    return took_s


def size_mb(folder: Path) -> float:
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*")) / 1e6


def run(*command: object) -> None:
    subprocess.run(list(map(str, command)), check=True, stdout=sys.stderr)
