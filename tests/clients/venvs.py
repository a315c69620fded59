"""The client libraries. Each set has its own venv, because their pins conflict with each other's
and with ours.

A venv is made from its lock in `scripts/locks/clients` when a test first asks for it, and again
when the lock changed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LOCKS = ROOT / "scripts" / "locks" / "clients"
VENVS = ROOT / ".venv-clients"
INSTALL_TIMEOUT_S = 300
RUN_TIMEOUT_S = 180


def python_of(name: str, base: str = sys.executable) -> Path:
    """Return the interpreter of a venv that exists and is up to date. One process makes the venv,
    others wait. `base` is the Python that it is made of.
    """
    VENVS.mkdir(exist_ok=True)
    with (VENVS / f"{name}.lock").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        return _made(name, base)


def _made(name: str, base: str) -> Path:
    venv = VENVS / name
    lock = LOCKS / f"{name}.txt"
    python = venv / "bin" / "python"
    stamp = venv / "lmi-stamp"
    version = sys.version if base == sys.executable else base
    made_from = hashlib.sha256(
        lock.read_bytes() + version.encode() + str(ROOT).encode()
    ).hexdigest()
    if stamp.is_file() and stamp.read_text() == made_from:
        return python

    shutil.rmtree(venv, ignore_errors=True)
    subprocess.run([base, "-m", "venv", "--without-pip", str(venv)], check=True)
    exact = ["--no-deps", "--require-hashes", "--only-binary=:all:", "-r", str(lock)]
    if (uv := shutil.which("uv")) is not None:  # as scripts/install
        command = [uv, "pip", "install", "-q", "--python", str(python), *exact]
    else:
        # --no-compile: only a small part of the largest clients is ever imported
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
        command = [*pip, "install", "-qq", "--no-compile", *exact]

    subprocess.run(command, check=True, timeout=INSTALL_TIMEOUT_S)
    stamp.write_text(made_from)
    return python


def run(venv: str, script: str, base_url: str, *arguments: str) -> Any:
    """Return the JSON that a script of this folder prints. Like a user's program, it can import
    nothing of ours.
    """
    environ = {
        name: value
        for name, value in os.environ.items()
        if name in ("PATH", "HOME", "LANG", "TMPDIR")
    }

    quiet = {
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "LANGSMITH_TRACING": "false",
        # Otherwise it asks the network for a price list
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nothing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }

    command = [
        str(python_of(venv)),
        "-I",
        str(Path(__file__).parent / "scripts" / script),
        base_url,
        *arguments,
    ]
    done = subprocess.run(
        command, env=environ | quiet, capture_output=True, text=True, timeout=RUN_TIMEOUT_S
    )

    assert done.returncode == 0, f"{script}: {done.stdout[-2000:]}\n{done.stderr[-4000:]}"

    return json.loads(done.stdout)
