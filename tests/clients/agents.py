"""The coding agents, as their makers publish them on npm: the programs alone, without the scripts
of an installation.

They are installed from their lock when a test first asks for one, and again when the lock changed.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.clients.venvs import LOCKS, VENVS

LOCK = LOCKS / "agents.json"  # npm's package-lock.json
PROGRAMS = {
    "claude": "@anthropic-ai/claude-code-*/claude",
    "codex": "codex-*/vendor/*/bin/codex",
    "opencode": "opencode-*/bin/opencode",
}
INSTALL_TIMEOUT_S = 300
RUN_TIMEOUT_S = 240


def program_of(name: str) -> Path:
    """Return the program of an agent. One process installs them, others wait. Skips the test where
    that cannot be.
    """
    VENVS.mkdir(exist_ok=True)
    folder = VENVS / "agents"
    with (VENVS / "agents.lock").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        lock = LOCK.read_text()
        stamp = folder / "lmi-stamp"
        if not stamp.is_file() or stamp.read_text() != lock:
            _install(lock, folder)
            stamp.write_text(lock)

    return _program(folder, name)


def _program(folder: Path, name: str) -> Path:
    program = next((folder / "node_modules").glob(PROGRAMS[name]), None)
    return program or pytest.skip(f"npm cannot install {name} here")


def _install(lock: str, folder: Path) -> None:
    if (npm := shutil.which("npm")) is None:
        pytest.skip("there is no npm")

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "package-lock.json").write_text(lock)
    (folder / "package.json").write_text(json.dumps(json.loads(lock)["packages"][""]))
    command = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--no-update-notifier"]
    try:
        subprocess.run(
            command, cwd=folder, check=True, stdout=subprocess.DEVNULL, timeout=INSTALL_TIMEOUT_S
        )
    except subprocess.SubprocessError as error:
        pytest.skip(f"npm cannot install the agents here: {error}")

    # Npm leaves out what it cannot fetch, since each is for one kind of machines
    for name in PROGRAMS:
        _program(folder, name)


def run(
    name: str,
    folder: Path,
    home: Path,
    environ: Mapping[str, str],
    *arguments: str,
    timeout_s: float = RUN_TIMEOUT_S,
) -> str:
    """Return what an agent prints, which knows nothing of this machine's user and asks nobody but
    127.0.0.1.
    """
    machine_env = {
        variable: os.environ[variable] for variable in ("PATH", "LANG") if variable in os.environ
    }
    own_env = {
        "HOME": str(home),
        "TMPDIR": str(home),
        "NO_PROXY": "127.0.0.1",
        "SHELL": "/bin/bash",
    }
    command = [str(program_of(name)), *arguments]
    done = subprocess.run(
        command,
        cwd=folder,
        env=machine_env | own_env | dict(environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )

    assert done.returncode == 0, f"{name}: {done.stdout[-2000:]}\n{done.stderr[-4000:]}"

    return done.stdout
