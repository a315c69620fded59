"""Help is there at once: no command of `scripts/` installs anything to say what it does."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The commands alone, where nothing was installed."""
    shutil.copytree(
        ROOT / "scripts",
        tmp_path / "scripts",
        ignore=shutil.ignore_patterns("figures", "__pycache__"),
    )
    return tmp_path


def ran(clone: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {"PATH": os.environ["PATH"], **variables}
    return subprocess.run(
        ["bash", *words], cwd=clone, env=environ, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (("scripts/install", "--help"), "scripts/install [extra...]"),
        (("scripts/serve", "--help"), "scripts/serve [DIR] [flags of lmi serve]"),
        (("scripts/sagemaker", "--help"), "deploy"),
        (("scripts/sagemaker", "invoke", "--help"), "--endpoint-url"),
    ],
)
def test_help_installs_nothing(clone: Path, command: tuple[str, ...], text: str) -> None:
    done = ran(clone, *command)

    assert done.returncode == 0, done.stderr
    assert text in done.stdout
    assert not (clone / ".venv").exists()


def test_a_python_that_is_not_there_is_said_to_be_missing(clone: Path) -> None:
    done = ran(clone, "scripts/install", PYTHON="python3.99")

    assert done.returncode == 2
    assert done.stderr.startswith("scripts/install: there is no python3.99;")
