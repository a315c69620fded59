"""`scripts/serve` on a machine that has only Python and a compiler: it installs no torch, and
answers.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from tests.machine import wait_until
from tests.system.container import free_port

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "xgrammar", "vllm", "nvidia*", "scipy")
BODY = {
    "inputs": "What is the capital of France?",
    "parameters": {"max_new_tokens": 8, "do_sample": True, "temperature": 0.8, "seed": 1},
}

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no compiler")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What a clone of the working tree would have, and the kernels, which CI builds before."""
    files = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    kernels = [str(path.relative_to(ROOT)) for path in ROOT.glob("handlers/lmi_dist/native/*.so")]
    for name in [*files.split("\0"), *kernels]:
        if name and (ROOT / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tmp_path / name)

    return tmp_path


@pytest.fixture
def url(clone: Path) -> Iterator[str]:
    port = free_port()
    environ = {
        name: value
        for name, value in os.environ.items()
        if name not in ("VIRTUAL_ENV", "PYTHONPATH")
    }
    # Without uv: what pip does here, uv does in every .venv of CI.
    places = environ["PATH"].split(os.pathsep)
    environ["PATH"] = os.pathsep.join(
        place for place in places if not (Path(place) / "uv").exists()
    )
    # Most of what it installs is never imported, and pip would compile all of it
    environ["PIP_NO_COMPILE"] = "1"
    command = ["bash", "scripts/serve", "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(command, cwd=clone, env=environ, process_group=0)
    try:
        wait_until(lambda: process.poll() is not None or is_ready(port), "the server is ready", 400)
        assert process.poll() is None, "it ended"
        yield f"http://127.0.0.1:{port}"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)

        process.wait(60)


def is_ready(port: int) -> bool:
    try:
        with urlopen(f"http://127.0.0.1:{port}/ping", timeout=5) as answer:
            return answer.status == 200
    except (HTTPError, OSError):
        return False


def test_a_fresh_clone_installs_no_torch_and_answers(clone: Path, url: str) -> None:
    http_request = Request(
        f"{url}/invocations", json.dumps(BODY).encode(), {"Content-Type": "application/json"}
    )
    with urlopen(http_request, timeout=60) as answer:
        assert answer.status == 200 and json.load(answer)["generated_text"]

    packages = next(clone.glob(".venv/lib/python*/site-packages"))
    assert [path.name for name in HEAVY for path in packages.glob(name)] == []
